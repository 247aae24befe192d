"""Finished runs, read back from their directories."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cabs.experiments.config import RunConfig
from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.rundir import CONFIG, METRICS, SUMMARY, read_config, read_metrics


@dataclass(frozen=True)
class Run:
    """A run and its measurements.

    Attributes:
        path: Its directory.
        config: Its configuration.
        status: ``finished``, ``diverged``, ``interrupted``, or ``unfinished``.
        steps: The step rows of its metrics.
        evaluations: The evaluation rows.
    """

    path: Path
    config: RunConfig
    status: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def final_accuracy(self) -> float:
        """Test accuracy at the end; a run that diverged has none."""
        return float(self.evaluations[-1]["test_accuracy"]) if self.finished else 0.0

    @property
    def final_loss(self) -> float:
        """Training loss at the end."""
        return float(self.evaluations[-1]["train_loss"]) if self.finished else float("inf")

    @property
    def finished(self) -> bool:
        """Whether the run used up its budget."""
        return self.status == "finished"


def read_status(path: Path) -> str:
    """What became of the run in a directory."""
    try:
        content = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        return str(content["status"])
    except FileNotFoundError:
        return "unfinished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path / SUMMARY}: not the summary of a run: {error}") from error


def read_run(path: Path) -> Run:
    """Read the run in a directory.

    Raises:
        CommandError: If a file of it is not what it should be.
    """
    rows = list(read_metrics(path)) if (path / METRICS).exists() else []
    evaluations = [row for row in rows if "test_accuracy" in row]
    status = read_status(path)
    if status == "finished" and not evaluations:
        raise CommandError(f"{path / METRICS}: a finished run without an evaluation; rows were lost")
    return Run(path, read_config(path), status, [row for row in rows if "loss" in row], evaluations)


def find_runs(directories: Iterable[Path]) -> list[Run]:
    """All runs in and below some directories, in the order of their paths.

    Raises:
        UsageError: If a directory is missing or holds no run.
        CommandError: If a run cannot be read.
    """
    found: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
        below = [Path(base) for base, _, names in os.walk(directory) if CONFIG in names and METRICS in names]
        if not below:
            raise UsageError(f"{directory}: no run in it or below it (a run has {CONFIG} and {METRICS})")
        found.update(dict.fromkeys(sorted(below)))
    return [read_run(path) for path in found]
