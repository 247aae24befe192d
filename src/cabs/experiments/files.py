"""Files that are whole or not there, and that one process at a time writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cabs.experiments.errors import CommandError

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows has no locks of this kind; files go unguarded there)
    fcntl = None  # type: ignore[assignment]

PART = ".part"


def part_of(path: Path) -> Path:
    """The name a file has while it is written."""
    return path.with_name(path.name + PART)


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
