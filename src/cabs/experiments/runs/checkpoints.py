"""Checkpoints of a run: the last two, each complete or absent, and refused if it is not what was written.

A checkpoint is a file of `torch.save`, so ``torch.load(path, weights_only=True)`` reads it. Such a file is a zip
archive, which may end in a comment; ours is a seal: the version, and a digest of every byte before it.

``checkpoint.pt`` is the newest and ``checkpoint-previous.pt`` the one before. A new one is written to a part file
first; then the newest becomes the previous one and the part file the newest, by renaming. Whenever the process
dies, the last good checkpoint is ``checkpoint.pt`` or, between the two renamings, ``checkpoint-previous.pt``.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.files import part_of, sync_directory, write_synced, writing
from cabs.experiments.runs.config import RunConfig, added_since

VERSION = 2
NEWEST, PREVIOUS, SET_ASIDE = "checkpoint.pt", "checkpoint-previous.pt", "checkpoint-set-aside.pt"

_SEAL = re.compile(rb"cabs checkpoint, version (\d{1,9}), blake2b ([0-9a-f]{64})\Z")
_SEAL_LENGTH = 128  # more than the longest seal has
# What a zip archive ends in: this signature, 16 bytes of numbers, and the length of the comment that follows.
_END, _END_LENGTH = b"PK\x05\x06", 22


class CheckpointError(CommandError):
    """A checkpoint that cannot be resumed from; the message names the file, and what to do."""


class Checkpoints:
    """The checkpoints in the directory of a run.

    Args:
        directory: The directory.
        config: The run's configuration; checkpoints of another one are refused.
    """

    def __init__(self, directory: Path, config: RunConfig) -> None:
        self._newest, self._previous = directory / NEWEST, directory / PREVIOUS
        self._set_aside = directory / SET_ASIDE
        self._config = config

    def save(self, state: dict[str, Any]) -> None:
        """Make a state the newest checkpoint, and keep the one before.

        Raises:
            WriteError: If it cannot be written; the checkpoints are then as they were.
        """
        content = sealed({**state, "version": VERSION, "config": asdict(self._config)})
        part = part_of(self._newest)
        with writing(self._newest):
            try:
                write_synced(part, content)
                if self._newest.exists():
                    os.replace(self._newest, self._previous)
                os.replace(part, self._newest)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            sync_directory(part.parent)

    def load(self, *, from_previous: bool = False) -> dict[str, Any] | None:
        """The state to resume from.

        Args:
            from_previous: Take the previous checkpoint rather than the newest.

        Returns:
            What was saved, or None if there is no checkpoint yet.

        Raises:
            CheckpointError: If it is damaged, or not a checkpoint of this run.
            UsageError: If the previous one is asked for and there is none.
        """
        if from_previous and not self._previous.is_file():
            raise UsageError(
                f"{self._previous}: there is no such checkpoint; leave out --from-previous, "
                "or start the run again with --force"
            )
        # A process that died between the two renamings has left its newest checkpoint as the previous one.
        path = self._newest if self._newest.exists() and not from_previous else self._previous
        if not path.exists():
            return None
        try:
            state = unsealed(path.read_bytes())
            _check_state(state)
            _check_same_run(state["config"], self._config)
            return state
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}; {self._way_out(path)}") from error

    def drop_newest(self) -> None:
        """Make the previous checkpoint the newest; what was the newest is set aside, not removed."""
        with writing(self._newest):
            if self._newest.exists():
                os.replace(self._newest, self._set_aside)
            os.replace(self._previous, self._newest)
            sync_directory(self._newest.parent)

    def _way_out(self, path: Path) -> str:
        if path == self._newest and self._previous.exists():
            return "resume from the checkpoint before it with --resume --from-previous"
        return "start the run again with --force"


def sealed(state: dict[str, Any]) -> bytes:
    """The content of a checkpoint file."""
    # In memory first: torch meets a full disk with an error that does not say so.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    archive = buffer.getvalue()
    if archive[-_END_LENGTH:][:4] != _END or archive[-2:] != b"\0\0":
        raise AssertionError("torch.save has written something else than a zip archive without a comment")
    seal = b"cabs checkpoint, version %d, blake2b " % VERSION
    body = archive[:-2] + (len(seal) + len(_digest(b""))).to_bytes(2, "little") + seal
    return body + _digest(body)


def unsealed(content: bytes) -> dict[str, Any]:
    """The state in the content of a checkpoint file.

    Raises:
        ValueError: If it is damaged, or of another version, or not a checkpoint.
    """
    seal = _SEAL.search(content[-_SEAL_LENGTH:])
    if seal is None:
        raise ValueError("not a complete checkpoint of cabs: cut off, damaged, or written by another program")
    version, digest = int(seal[1]), seal[2]
    if _digest(content[: -len(digest)]) != digest:
        raise ValueError("damaged: its content is not what was written")
    if version != VERSION:
        raise ValueError(f"a checkpoint of version {version}, and this cabs reads version {VERSION}")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    # A seal can be forged. What torch makes of a file that it has not written, no list of exceptions holds.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"not a checkpoint that can be read safely: {reason}") from error
    if not isinstance(state, dict):
        raise ValueError("not a checkpoint of cabs: it holds something else")
    return state


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).hexdigest().encode()


def _check_state(state: dict[str, Any]) -> None:
    """Check the parts that every checkpoint has, as far as no other part of the program does."""
    for name, least in (("examples", 0), ("metrics_bytes", 0)):
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"not a checkpoint of cabs: its {name} is no count")
    if not isinstance(state.get("config"), dict):
        raise ValueError("not a checkpoint of cabs: it has no config")


def _check_same_run(there: dict[str, Any], here: RunConfig) -> None:
    there = {**added_since(), **there}
    for name, value in asdict(here).items():
        found = there.get(name)
        # A tensor, which only a forged checkpoint has here, compares with no plain answer.
        if name not in RunConfig.MAY_CHANGE and (isinstance(found, torch.Tensor) or found != value):
            raise ValueError(f"a checkpoint of another run: its {name} is {found}, this run's is {value}")
