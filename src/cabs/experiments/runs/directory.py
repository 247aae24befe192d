"""The directory of a run: who may write to it, and how its files stay whole whatever happens.

``config.json`` says what is run, ``metrics.jsonl`` gets a row for each thing measured, ``checkpoint.pt`` and
``checkpoint-previous.pt`` are states to resume from, ``summary.json`` is its outcome, ``picture.png`` its
picture, and ``train.log`` the output of a run of a sweep. A checkpoint knows how many bytes of the metrics it covers;
rows that a killed run wrote after it are cut off when the run is resumed, and written again, the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.files import open_alone, part_of, read_json, write_json, writing
from cabs.experiments.runs.checkpoints import NEWEST, PREVIOUS, SET_ASIDE, Checkpoints
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.metrics import METRICS, read_metrics

CONFIG, SUMMARY, PICTURE, LOG = "config.json", "summary.json", "picture.png", "train.log"
# The newest checkpoint goes before the previous one: whenever this is cut short, what is left can be resumed.
_WRITTEN = (SUMMARY, SET_ASIDE, NEWEST, PREVIOUS, PICTURE, LOG)


class RunDirectory:
    """An open run: made by `create` or `resume`, closed by `close` or a ``with`` block."""

    def __init__(self, path: Path, config: RunConfig, metrics: IO[bytes]) -> None:
        self.path = path
        self.config = config
        self._metrics = metrics
        self._checkpoints = Checkpoints(path, config)
        self._new = False

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
            WriteError: If it cannot be written.
        """
        with writing(path):
            if path.exists() and not path.is_dir():
                raise UsageError(f"{path} is a file; --out takes a directory")
            if (path / CONFIG).exists():
                if not force:
                    raise UsageError(f"{path} holds a run already; resume it with --resume, or replace it with --force")
                read_config(path)  # a config.json of something else is not ours to remove
                _check_removable(path)
            elif path.is_dir() and not vacant(path):
                raise UsageError(f"{path} is neither empty nor a run of cabs; choose another --out")
            new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            metrics = _new_metrics(path)
            try:
                for name in _WRITTEN:
                    part_of(path / name).unlink(missing_ok=True)
                    (path / name).unlink(missing_ok=True)
                write_json(path / CONFIG, config.to_json())
            except BaseException:
                metrics.close()
                raise
        run = cls(path, config, metrics)
        run._new = new
        return run

    @classmethod
    def resume(
        cls,
        path: Path,
        config: RunConfig,
        *,
        from_previous: bool = False,
        restore: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> tuple[Self, dict[str, Any] | None]:
        """Open a run to resume it.

        Args:
            path: The directory.
            config: What `resumable` returned for it.
            from_previous: Resume from the previous checkpoint rather than the newest, which is set aside.
            restore: Takes up the checkpoint, or raises a `CommandError`; nothing in the directory has changed then.

        Returns:
            The run, and its last checkpoint, or None if it was stopped before there was one.

        Raises:
            CommandError: If the run cannot be resumed.
        """
        if not (path / METRICS).exists():  # config.json comes after it
            raise CommandError(f"{path / METRICS} is gone; put it back, or start the run again with --force")
        with writing(path):
            run = cls(path, config, _open_metrics(path))
        try:
            checkpoint = run._checkpoints.load(from_previous=from_previous)
            if checkpoint is None:
                run._check_never_had_one()
            else:
                restore(checkpoint)
            run._go_back_to(0 if checkpoint is None else checkpoint["metrics_bytes"], from_previous)
        except BaseException:
            run.close()
            raise
        return run, checkpoint

    def _check_never_had_one(self) -> None:
        """Check that a run without a checkpoint was stopped before its first."""
        counts = sorted({row["examples"] for row in read_metrics(self.path)}) or [0]
        try:
            summary = read_json(self.path / SUMMARY)
        except (OSError, ValueError):
            summary = None
        ended = isinstance(summary, dict) and summary.get("status") in ("finished", "interrupted")
        # The checkpoint that is due after a step comes before the rows of the next.
        if ended or any(count >= self.config.checkpoint_every for count in counts[:-1]):
            raise CommandError(
                f"{self.path}: the run got to {counts[-1]:,} examples, and its checkpoints are gone; "
                f"put {NEWEST} back, or start the run again with --force"
            )

    def _go_back_to(self, covered: int, from_previous: bool) -> None:
        """Cut the metrics to what the checkpoint covers, and remove the summary."""
        _check_covered(self.path / METRICS, covered)
        if from_previous:
            self._checkpoints.drop_newest()  # before the cut: it covers rows that then are gone
        with writing(self.path):
            self._metrics.truncate(covered)
            (self.path / SUMMARY).unlink(missing_ok=True)
            if read_config(self.path) != self.config:
                write_json(self.path / CONFIG, self.config.to_json())

    def write_row(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics."""
        with writing(self.path / METRICS):
            self._metrics.write(json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Let others see the rows written so far."""
        with writing(self.path / METRICS):
            self._metrics.flush()

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Make a state the newest checkpoint, after the rows it covers have reached the disk."""
        with writing(self.path / METRICS):
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        self._checkpoints.save({**state, "metrics_bytes": os.fstat(self._metrics.fileno()).st_size})

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the outcome."""
        self.flush()
        with writing(self.path / SUMMARY):
            write_json(self.path / SUMMARY, summary)

    def discard(self) -> None:
        """Remove a run that failed at its start: all that it wrote, and the directory if it made that."""
        self.close()
        for name in (*_WRITTEN, CONFIG, METRICS):
            (self.path / name).unlink(missing_ok=True)
        if self._new and not any(self.path.iterdir()):
            self.path.rmdir()

    def close(self) -> None:
        """Unlock the directory."""
        with writing(self.path / METRICS):
            self._metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_metrics(path: Path) -> IO[bytes]:
    """The metrics file, opened for appending and locked."""
    return open_alone(path / METRICS, str(path))


def _new_metrics(path: Path) -> IO[bytes]:
    """A new metrics file, locked; that of another run is removed, unless it is in use."""
    old = path / METRICS
    if old.is_symlink():
        old.unlink()
    # A file that another program knows too, by a link of its own, stays as it is: ours is a new one.
    with _open_metrics(path):
        old.unlink()
        return _open_metrics(path)


def _check_removable(path: Path) -> None:
    """Check that no directory has the name of a file that runs write."""
    for name in (METRICS, CONFIG, *_WRITTEN):
        for item in (path / name, part_of(path / name)):
            if item.is_dir() and not item.is_symlink():
                raise UsageError(
                    f"{item} is a directory, which runs do not write; move it away, or choose another --out"
                )


def _check_covered(path: Path, covered: int) -> None:
    """Check that the rows a checkpoint covers are there.

    Raises:
        CommandError: If some were lost, or are not those that it covers.
    """
    with open(path, "rb") as file:
        written = file.seek(0, os.SEEK_END)
        file.seek(max(0, covered - 1))
        whole = covered == 0 or file.read(1) == b"\n"
    if written < covered:
        raise CommandError(
            f"{path} has {written:,} bytes, its checkpoint covers {covered:,}: "
            "rows were lost, the run cannot be resumed; start it again with --force"
        )
    if not whole:
        raise CommandError(
            f"{path} was changed: its checkpoint covers {covered:,} bytes, which is amid a row; "
            "start the run again with --force"
        )


def vacant(path: Path) -> bool:
    """Whether a directory is empty, apart from what a run that was killed at its very start may leave."""
    left_over = {METRICS, part_of(path / CONFIG).name}
    return all(
        item.name in left_over
        and item.is_file()
        and not item.is_symlink()
        and (item.name != METRICS or not item.stat().st_size)
        for item in path.iterdir()
    )


def resumable(path: Path, given: dict[str, Any]) -> RunConfig:
    """The configuration for resuming the run in a directory.

    Args:
        path: The directory.
        given: Options given now; they must not contradict the run.

    Raises:
        UsageError: If there is no run, or the options do not fit it.
    """
    with writing(path):
        there = (path / CONFIG).is_file()
    if not there:
        raise UsageError(f"{path} holds no run to resume; leave out --resume to start one")
    return read_config(path).resumed(given)


def read_config(path: Path) -> RunConfig:
    """The configuration of the run in a directory.

    Raises:
        CommandError: If its ``config.json`` is not one of a run.
    """
    try:
        return RunConfig.from_json(read_json(path / CONFIG))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path / CONFIG}: {error}") from error
