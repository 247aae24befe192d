"""Files that are complete or absent, written by one process at a time."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cabs.experiments.errors import CommandError, WriteError

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows has no locks of this kind; files go unguarded there)
    fcntl = None  # type: ignore[assignment]

PART = ".part"
_REMEDIES = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room, the quota is used up",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make the file system writable",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of the path is a file: choose another",
    errno.EISDIR: "a directory has its name: move that away",
    errno.ELOOP: "it is a link: remove that",
    errno.ENXIO: "it is no ordinary file: remove that",
}


def part_of(path: Path) -> Path:
    """The name a file has while it is written."""
    return path.with_name(path.name + PART)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what to do about a file or directory that cannot be written.

    Raises:
        WriteError: In place of whatever the system said.
    """
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see to it")
        raise WriteError(f"{path} cannot be written: {error.strerror or error}; {remedy}, then try again") from error


@contextmanager
def atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when it is complete and on the disk."""
    part = part_of(path)
    try:
        with open_new(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def open_new(path: Path) -> IO[bytes]:
    """Open a new file for writing. What had its name is removed first: if that was a link, what it led to stays."""
    try:
        return open(path, "xb")
    except FileExistsError:
        path.unlink()
        return open(path, "xb")


def open_appending(path: Path) -> IO[bytes]:
    """Open an ordinary file for appending, and make it if it is not there. Links are not followed.

    Raises:
        OSError: If it is a link, a directory or no ordinary file.
    """
    # A pipe must not make us wait for whoever reads it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    file = os.fdopen(os.open(path, flags, 0o666), "ab")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.ENXIO, "Not an ordinary file", str(path))
    return file


def open_reading(path: Path) -> IO[bytes]:
    """Open an ordinary file for reading; a pipe would make us wait for whoever writes to it.

    Raises:
        OSError: If it is not there, or no ordinary file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.ENXIO, "Not an ordinary file", str(path))
    return open(path, "rb")


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open_new(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk, where the system and the file system can do that."""
    if os.name != "posix":  # pragma: no cover  (directories cannot be opened there)
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, completely or not at all."""
    with atomically(path) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not JSON, or has numbers that JSON does not know.
    """
    if not path.is_file() and path.exists():
        raise ValueError("not an ordinary file")
    return parse_json(path.read_bytes())


def parse_json(content: bytes) -> Any:
    """The value that some JSON stands for.

    Raises:
        ValueError: If it is not JSON, nested too deep, or has numbers that JSON does not know.
    """
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def open_alone(path: Path, what: str) -> IO[bytes]:
    """Open a file for appending that no other process has open this way.

    Args:
        path: The file.
        what: What to call it in the error when another process has it.

    Raises:
        CommandError: If another process has it open.
    """
    file = open_appending(path)
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise CommandError(f"{what} is in use by another process; wait for it, or stop it first") from error
    return file
