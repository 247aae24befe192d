"""`cabs sweep` from the grid to the table of best learning rates."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cabs._version import __version__
from cabs.experiments.errors import CommandError
from cabs.experiments.files import write_json, writing
from cabs.experiments.problems import metric_of, problem
from cabs.experiments.problems.problem import Metric
from cabs.experiments.reports.selection import Method, by_method
from cabs.experiments.runs.naming import file_name
from cabs.experiments.runs.reader import SETTLED, read_run
from cabs.experiments.runs.signals import Interrupted, stop_on_signals
from cabs.experiments.sweeps.cluster import connected
from cabs.experiments.sweeps.connection import Resources
from cabs.experiments.sweeps.grid import Grid
from cabs.experiments.sweeps.jobs import Job, last_words, plan, run_all
from cabs.experiments.sweeps.progress import SweepDisplay
from cabs.hardware import cores

SWEEP = "sweep.json"


def run_sweep(
    grid: Grid,
    out: Path | None,
    console: Console,
    *,
    slots: int | None,
    retries: int,
    data: str | None,
    dry_run: bool,
    ray: str | None = None,
    resources: Resources | None = None,
) -> None:
    """Run a grid and say which learning rates were best.

    Args:
        grid: What to run.
        out: Directory for the runs; None for one named after the problem.
        console: Where to show progress.
        slots: How many runs at a time; None for one for each core, or as many as a cluster has room for.
        retries: How often to resume a run that crashes.
        data: Directory with data sets.
        dry_run: Only list the runs.
        ray: Address of a Ray cluster to run on; None for processes of this machine.
        resources: What each run takes up on a cluster.

    Raises:
        CommandError: If the sweep cannot be started, runs failed, or it was interrupted.
    """
    out = out or Path("runs") / f"sweep-{file_name(grid.problem)}"
    resources = resources or Resources()
    count = len(grid.configs(1, data))
    if ray is None:
        slots = max(1, min(slots or cores(), count))
        configs = grid.configs(max(1, cores() // slots), data)
    else:
        configs = grid.configs(resources.threads, data, "cuda" if resources.gpus else None)
    with writing(out):
        jobs = plan(configs, out)
    if dry_run:
        for job in jobs:
            console.print(f"{job.path}  {job.status}", markup=False, highlight=False, soft_wrap=True)
        return
    if ray is None:
        problem(grid.problem).load(None if data is None else Path(data))  # missing data is better said once, and now
    room = "as many at a time as the cluster has room for" if slots is None else f"{slots} at a time"
    with nullcontext() if ray is None else connected(ray, resources) as cluster:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        for note in cluster.notes if cluster else []:
            console.print(f"note: {note}", highlight=False)
        with stop_on_signals() as stop, SweepDisplay(console, jobs, room) as display:
            start = cluster.start if cluster else None
            complete = run_all(jobs, slots or count, retries, stop, display.changed, start)
    methods = _record(grid, jobs, out)
    if not complete:
        assert stop.signal_number is not None
        raise Interrupted("stopped; run the same command again to resume", stop.signal_number)
    _print_best(methods, metric_of(grid.problem), out, console)
    failed = [job for job in jobs if job.status in ("failed", "damaged")]
    if failed:
        what = " or are ".join(dict.fromkeys(sorted((job.status for job in failed), reverse=True)))
        reasons = "\n".join(f"  {job.path}: {last_words(job)}" for job in failed)
        raise CommandError(f"{len(failed)} of {len(jobs)} runs {what}:\n{reasons}")


def _record(grid: Grid, jobs: list[Job], out: Path) -> list[Method]:
    """Record the runs and their outcomes."""
    runs = []
    for job in jobs:
        if job.status in SETTLED:
            try:
                runs.append(read_run(job.path))
            except CommandError as error:
                job.damage(error)
    methods = by_method(runs)
    best: dict[str, dict[str, Any]] = {
        method.name: {
            "lr": method.best.lr,
            method.best.metric.key: method.best.score,
            "train_loss": method.best.loss,
        }
        for method in methods
        if method.best.finished
    }
    content = {
        "cabs": __version__,
        "grid": asdict(grid),
        "runs": {job.name: job.status for job in jobs},
        "best": best,
    }
    with writing(out / SWEEP):
        write_json(out / SWEEP, content)
    return methods


def _print_best(methods: list[Method], metric: Metric, out: Path, console: Console) -> None:
    table = Table(
        title=f"best learning rate of each method, by final test {metric.name}", title_justify="left", box=None
    )
    for heading in ("method", "α", f"test {metric.name}", "training loss"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method in methods:
        best = method.best
        if best.finished:
            table.add_row(escape(method.name), f"{best.lr:g}", metric.show(best.score), f"{best.loss:.4g}")
        else:
            table.add_row(escape(method.name), "", "diverged", "")
    if methods:
        console.print(table)
        console.print(
            f"draw them with:  cabs report {shlex.quote(str(out))}", markup=False, highlight=False, soft_wrap=True
        )
