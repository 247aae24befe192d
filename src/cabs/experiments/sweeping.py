"""`cabs sweep` from the grid to the table of best learning rates."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cabs._version import __version__
from cabs.experiments.errors import CommandError
from cabs.experiments.files import write_json
from cabs.experiments.grid import Grid
from cabs.experiments.problems import problem
from cabs.experiments.progress import SweepDisplay
from cabs.experiments.runs import read_run
from cabs.experiments.select import Method, by_method
from cabs.experiments.session import file_name
from cabs.experiments.signals import Interrupted, stop_on_signals
from cabs.experiments.sweep import Job, last_words, plan, run_all

SWEEP = "sweep.json"


def run_sweep(
    grid: Grid, out: Path | None, console: Console, *, workers: int, retries: int, data: str | None, dry_run: bool
) -> None:
    """Run a grid and say which learning rates were best.

    Args:
        grid: What to run.
        out: Directory for the runs; None for one named after the problem.
        console: Where to show progress.
        workers: How many runs at a time.
        retries: How often a run that crashes is gone on with.
        data: Directory with data sets.
        dry_run: Only list the runs.

    Raises:
        CommandError: If the sweep cannot be started, runs failed, or it was interrupted.
    """
    out = out or Path("runs") / f"sweep-{file_name(grid.problem)}"
    workers = max(1, min(workers, len(grid.configs(1, data))))
    threads = max(1, (os.cpu_count() or 1) // workers)
    jobs = plan(grid.configs(threads, data), out)
    if dry_run:
        for job in jobs:
            console.print(f"{job.path}  {job.status}", markup=False, highlight=False, soft_wrap=True)
        return
    problem(grid.problem).load(None if data is None else Path(data))  # missing data is better said once, and now
    out.mkdir(parents=True, exist_ok=True)
    with stop_on_signals() as stop, SweepDisplay(console, jobs, workers) as display:
        complete = run_all(jobs, workers, retries, stop, display.changed)
    methods = _record(grid, jobs, out)
    if not complete:
        assert stop.signal_number is not None
        raise Interrupted("stopped; give the same command again to go on", stop.signal_number)
    _print_best(methods, out, console)
    failed = [job for job in jobs if job.status == "failed"]
    if failed:
        reasons = "\n".join(f"  {job.path}: {last_words(job)}" for job in failed)
        raise CommandError(f"{len(failed)} of {len(jobs)} runs failed:\n{reasons}")


def _record(grid: Grid, jobs: list[Job], out: Path) -> list[Method]:
    """Write down what was run and what came of it."""
    done = [job for job in jobs if job.status in ("finished", "diverged")]
    methods = by_method([read_run(job.path) for job in done])
    best: dict[str, dict[str, Any]] = {
        method.name: {"lr": method.best.lr, "test_accuracy": method.best.accuracy, "train_loss": method.best.loss}
        for method in methods
        if method.best.finished
    }
    content = {
        "cabs": __version__,
        "grid": asdict(grid),
        "runs": {job.name: job.status for job in jobs},
        "best": best,
    }
    write_json(out / SWEEP, content)
    return methods


def _print_best(methods: list[Method], out: Path, console: Console) -> None:
    table = Table(title="best learning rate of each method, by final test accuracy", title_justify="left", box=None)
    for heading in ("method", "α", "test accuracy", "training loss"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method in methods:
        best = method.best
        if best.finished:
            table.add_row(escape(method.name), f"{best.lr:g}", f"{best.accuracy:.2%}", f"{best.loss:.4g}")
        else:
            table.add_row(escape(method.name), "", "diverged", "")
    console.print(table)
    console.print(
        f"draw them with:  cabs report {shlex.quote(str(out))}", markup=False, highlight=False, soft_wrap=True
    )
