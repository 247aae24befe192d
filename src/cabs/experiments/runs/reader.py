"""Runs, read back from their directories; one that is damaged is named and left alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.files import read_json
from cabs.experiments.problems import metric_of
from cabs.experiments.problems.problem import Metric
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.directory import CONFIG, SUMMARY, read_config
from cabs.experiments.runs.metrics import METRICS, read_metrics

STATUSES = ("finished", "diverged", "interrupted")
SETTLED = ("finished", "diverged")
"""The status of a run that is not to be resumed."""


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
    def metric(self) -> Metric:
        """What it is ranked by."""
        return metric_of(self.config.problem)

    @property
    def final_score(self) -> float:
        """Its metric at the end; a run that diverged has the worst there is."""
        return float(self.evaluations[-1][self.metric.key]) if self.finished else self.metric.worst

    @property
    def final_loss(self) -> float:
        """Training loss at the end."""
        return float(self.evaluations[-1]["train_loss"]) if self.finished else float("inf")

    @property
    def finished(self) -> bool:
        """Whether the run used up its budget."""
        return self.status == "finished"


@dataclass(frozen=True)
class Found:
    """The runs in some directories.

    Attributes:
        runs: Those that can be read.
        damaged: For each of the others its directory, and what is wrong with it.
    """

    runs: list[Run] = field(default_factory=list)
    damaged: dict[Path, str] = field(default_factory=dict)


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of the run in a directory; nothing if it has none.

    Raises:
        CommandError: If it is not one.
    """
    try:
        content = read_json(path / SUMMARY)
        if not isinstance(content, dict) or content.get("status") not in STATUSES:
            raise ValueError(f"its status is none of {', '.join(STATUSES)}")
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CommandError(f"{path / SUMMARY}: not the summary of a run: {error}") from error


def read_status(path: Path) -> str:
    """What became of the run in a directory.

    Raises:
        CommandError: If its summary is damaged.
    """
    return str(read_summary(path).get("status", "unfinished"))


def read_run(path: Path) -> Run:
    """Read the run in a directory.

    Raises:
        CommandError: If a file of it is not what it should be.
    """
    config, summary = read_config(path), read_summary(path)
    try:
        rows = list(read_metrics(path))
    except FileNotFoundError:
        rows = []
    except OSError as error:
        raise CommandError(f"{path / METRICS}: cannot be read: {error.strerror or error}") from error
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "train_loss" in row]
    run = Run(path, config, summary.get("status", "unfinished"), steps, evaluations)
    _check_complete(run)
    if run.finished:
        _check_whole(run, summary)
    return run


def _check_complete(run: Run) -> None:
    """See that every row has the columns of its kind."""
    for rows, columns in (
        (run.steps, ("step", "seconds", "batch_size")),
        (run.evaluations, ("step", "seconds", "test_loss", "test_accuracy", run.metric.key)),
    ):
        for row in rows:
            for name in columns:
                if row.get(name) is None:
                    raise CommandError(f"{run.path / METRICS}: the row at {row['examples']:,} examples lacks {name}")


def _check_whole(run: Run, summary: dict[str, Any]) -> None:
    """See that the metrics of a finished run go as far as its summary says."""
    last = run.evaluations[-1]["examples"] if run.evaluations else None
    expected = summary.get("examples", run.config.examples)
    other = _other_outcome(run, summary)
    if last is None or last != expected or last < run.config.examples or other:
        got = "has no evaluation" if last is None else f"ends at {last:,} examples"
        if other and last == expected:
            got += f" with another {other} than its summary"
        raise CommandError(
            f"{run.path / METRICS}: {got}, but the run is finished; rows were lost. "
            "Put them back, or start the run again with --force"
        )


def _other_outcome(run: Run, summary: dict[str, Any]) -> str | None:
    """What the last evaluation and the summary tell differently, but for rounding."""
    for name in ("train_loss", "test_loss", run.metric.key):
        if run.evaluations and name in summary:
            told = summary[name]
            if not isinstance(told, int | float) or not math.isclose(told, run.evaluations[-1][name], rel_tol=1e-4):
                return name
    return None


def find_runs(directories: Iterable[Path]) -> Found:
    """All runs in and below some directories, in the order of their paths.

    Raises:
        UsageError: If a directory is missing or holds no run.
    """
    paths: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
        below = [
            Path(base) for base, _, names in os.walk(directory) if CONFIG in names and {METRICS, SUMMARY} & {*names}
        ]
        if not below:
            raise UsageError(f"{directory}: no run in it or below it (a run has {CONFIG} and {METRICS})")
        paths.update(dict.fromkeys(sorted(below)))
    found = Found()
    for path in paths:
        try:
            found.runs.append(read_run(path))
        except CommandError as error:
            found.damaged[path] = str(error)
    return found
