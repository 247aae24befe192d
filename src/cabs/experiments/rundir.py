"""The directory of a run: who may write to it, and how its files stay whole whatever happens.

``config.json`` says what is run, ``metrics.jsonl`` gets a row for each thing measured, ``checkpoint.pt`` is the
state that a run goes on from, ``summary.json`` its outcome, ``picture.png`` what it looked like, and
``train.log`` what a run that belongs to a sweep had to say. A checkpoint knows how
many bytes of the metrics it covers; whatever a killed run wrote after it is cut off when the run is resumed and
written again, the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import torch

from cabs.experiments.config import RunConfig
from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.files import atomically, open_alone, part_of, write_json

CONFIG, METRICS, CHECKPOINT, SUMMARY = "config.json", "metrics.jsonl", "checkpoint.pt", "summary.json"
PICTURE, LOG = "picture.png", "train.log"
_WRITTEN = (METRICS, CHECKPOINT, SUMMARY, PICTURE, LOG, CONFIG)


class RunDirectory:
    """An open run: made by `create` or `resume`, closed by `close` or a ``with`` block."""

    def __init__(self, path: Path, config: RunConfig, metrics: IO[bytes]) -> None:
        self.path = path
        self.config = config
        self._metrics = metrics

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, force: bool = False) -> Self:
        """Start a run in a new or empty directory.

        Args:
            path: The directory.
            config: The run's configuration.
            force: Replace a run that is there. Only files that runs write are removed, and only if the directory
                holds a run.

        Raises:
            UsageError: If the directory holds a run (without ``force``) or something else (always).
        """
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file; --out takes a directory")
        if (path / CONFIG).exists():
            if not force:
                raise UsageError(f"{path} holds a run already; go on with it by --resume, or replace it by --force")
            read_config(path)  # a config.json of something else is not ours to remove
        elif path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{path} is neither empty nor a run of cabs; choose another --out")
        path.mkdir(parents=True, exist_ok=True)
        metrics = _open_metrics(path)
        for name in _WRITTEN:
            part_of(path / name).unlink(missing_ok=True)
            if name != METRICS:
                (path / name).unlink(missing_ok=True)
        metrics.truncate(0)
        write_json(path / CONFIG, config.to_json())
        return cls(path, config, metrics)

    @classmethod
    def resume(cls, path: Path, config: RunConfig) -> tuple[Self, dict[str, Any] | None]:
        """Open a run to go on with it.

        Args:
            path: The directory.
            config: What `resumable` returned for it.

        Returns:
            The run, and its last checkpoint, or None if it was stopped before there was one.

        Raises:
            CommandError: If the run cannot be gone on with.
        """
        metrics = _open_metrics(path)
        try:
            checkpoint = _read_checkpoint(path / CHECKPOINT)
            covered = 0 if checkpoint is None else int(checkpoint["metrics_bytes"])
            written = os.fstat(metrics.fileno()).st_size
            if written < covered:
                raise CommandError(
                    f"{path / METRICS} has {written:,} bytes, its checkpoint covers {covered:,}: "
                    "rows were lost, the run cannot be resumed; start it again with --force"
                )
            metrics.truncate(covered)
        except BaseException:
            metrics.close()
            raise
        (path / SUMMARY).unlink(missing_ok=True)
        write_json(path / CONFIG, config.to_json())
        return cls(path, config, metrics), checkpoint

    def write_row(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics."""
        self._metrics.write(json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Let others see the rows written so far."""
        self._metrics.flush()

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint, after the rows it covers have reached the disk."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        state = {**state, "metrics_bytes": os.fstat(self._metrics.fileno()).st_size}
        with atomically(self.path / CHECKPOINT) as file:
            torch.save(state, file)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the outcome."""
        self._metrics.flush()
        write_json(self.path / SUMMARY, summary)

    def close(self) -> None:
        """Let go of the directory."""
        self._metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_metrics(path: Path) -> IO[bytes]:
    """The metrics file, opened for appending and held by us alone."""
    return open_alone(path / METRICS, str(path))


def resumable(path: Path, given: dict[str, Any]) -> RunConfig:
    """The configuration for going on with the run in a directory.

    Args:
        path: The directory.
        given: Options given now; they must not contradict the run.

    Raises:
        UsageError: If there is no run, or the options do not fit it.
    """
    if not (path / CONFIG).is_file():
        raise UsageError(f"{path} holds no run to resume; leave out --resume to start one")
    return read_config(path).resumed(given)


def read_config(path: Path) -> RunConfig:
    """The configuration of the run in a directory.

    Raises:
        CommandError: If its ``config.json`` is not one of a run.
    """
    try:
        return RunConfig.from_json(json.loads((path / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path / CONFIG}: {error}") from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's metrics; a last line that is still being written is left out."""
    with open(path / METRICS, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CommandError(f"{path / METRICS}, line {number}: not a row of metrics: {error}") from error
            if not isinstance(row, dict) or "examples" not in row:
                raise CommandError(f"{path / METRICS}, line {number}: not a row of metrics")
            yield row


def _read_checkpoint(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file can fail in the zip reader, the unpickler or torch itself.
    except Exception as error:
        raise CommandError(f"{path}: cannot be read, start the run again with --force: {error}") from error
    if not isinstance(checkpoint, dict) or "metrics_bytes" not in checkpoint:
        raise CommandError(f"{path}: not a checkpoint of a run; start it again with --force")
    return checkpoint
