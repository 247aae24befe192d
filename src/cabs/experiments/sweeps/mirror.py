"""The directory of a run that is trained elsewhere, kept up to date from there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cabs.experiments.errors import CommandError
from cabs.experiments.files import PART, atomically, open_alone
from cabs.experiments.runs.directory import SUMMARY
from cabs.experiments.runs.metrics import METRICS
from cabs.experiments.sweeps.node import Change, Known, digest, reading_order


class Mirror:
    """Locks a run's directory, as the process that trains it would, and writes to it what comes from the node.

    The run can be resumed from the directory at any moment: the checkpoint in it is complete, and the metrics have the
    rows that it covers.

    Attributes:
        known: What is there of each file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metrics = open_alone(path / METRICS, str(path))
        (path / SUMMARY).unlink(missing_ok=True)  # as a resumed run does
        self.known: Known = {}

    def files(self) -> dict[str, bytes]:
        """All files, for a node to resume from."""
        names = [entry.name for entry in os.scandir(self._path) if entry.is_file() and not entry.name.endswith(PART)]
        content = {name: (self._path / name).read_bytes() for name in names}
        self.known = {name: (len(data), digest(data)) for name, data in content.items()}
        return content

    def write(self, changes: Iterable[Change]) -> None:
        """Bring files up to date, each of them at once.

        Raises:
            CommandError: If they cannot be written.
        """
        try:
            self._write(changes)
        except OSError as error:
            raise CommandError(
                f"{self._path}: cannot be written: {error}; fix that and run the same command again to resume"
            ) from error

    def _write(self, changes: Iterable[Change]) -> None:
        for name, kept, data in sorted(changes, key=lambda change: -reading_order(change[0])):
            path = self._path / name
            before = path.read_bytes() if path.exists() else b""
            content = before[:kept] + data
            if name == METRICS:
                self._write_metrics(before, content)
            else:
                with atomically(path) as file:
                    file.write(content)
            self.known[name] = (len(content), digest(content))

    def _write_metrics(self, before: bytes, content: bytes) -> None:
        # Not replaced: a lock on this very file shows others that the directory is in use. A run that is resumed
        # cuts off rows which its checkpoint does not cover and writes them again; those it covers stay all the time.
        shorter = min(len(before), len(content))
        same = next((i for i in range(shorter) if before[i] != content[i]), shorter)
        if same < len(before):
            self._metrics.truncate(same)
        self._metrics.write(content[same:])
        self._metrics.flush()
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Let go of the directory."""
        self._metrics.close()
