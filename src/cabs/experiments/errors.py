"""Errors that are a message to the person at the keyboard, not a bug."""


class CommandError(Exception):
    """Something outside the program is wrong; the message says what, and what to do about it."""

    exit_code = 1


class UsageError(CommandError):
    """The command line (or a file that stands for it) asks for something that cannot be done."""

    exit_code = 2


class DataError(CommandError):
    """A data file is missing, damaged, or not what it should be; the message names the file."""


class WriteError(CommandError):
    """A file cannot be written: no room, no permission; the message names the file."""
