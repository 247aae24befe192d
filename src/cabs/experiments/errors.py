"""Errors that are a message to the person at the keyboard, not a bug."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


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


def named(name: str, things: Mapping[str, T], what: str) -> T:
    """The thing of this name.

    Args:
        name: Its name.
        things: All there are.
        what: What such a thing is called, for the message.

    Raises:
        UsageError: If there is none.
    """
    if name not in things:
        raise UsageError(f"no {what} is called {name!r}; there are {', '.join(things)}")
    return things[name]
