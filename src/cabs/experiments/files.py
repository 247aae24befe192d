"""Files that are whole or not there, and that one process at a time writes."""

from __future__ import annotations

import errno
import json
import os
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
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
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
    """Write a small file for people and programs, whole or not at all."""
    with atomically(path) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def open_alone(path: Path, what: str) -> IO[bytes]:
    """Open a file for appending that no other process has open this way.

    Args:
        path: The file.
        what: What to call it in the error when another process has it.

    Raises:
        CommandError: If another process has it open.
    """
    file = open(path, "ab")  # noqa: SIM115  (the caller keeps it)
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise CommandError(f"{what} is in use by another process; wait for it, or stop it first") from error
    return file
