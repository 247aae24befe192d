"""`cabs train` from the first check of its options to the picture at the end."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cabs import hardware
from cabs._version import __version__
from cabs.experiments.checkpoints import NEWEST
from cabs.experiments.config import RunConfig
from cabs.experiments.data import ImageData
from cabs.experiments.display import Silent, display_for, duration
from cabs.experiments.errors import CommandError, WriteError
from cabs.experiments.files import writing
from cabs.experiments.picture import draw_run
from cabs.experiments.problems import problem
from cabs.experiments.rundir import CONFIG, PICTURE, RunDirectory, read_metrics, resumable
from cabs.experiments.signals import Interrupted, stop_on_signals
from cabs.experiments.train import Diverged, Trainer
from cabs.experiments.workers import Crew, Follower, Lost, crew


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let PyTorch compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(config: RunConfig, out: Path, console: Console, *, force: bool = False) -> dict[str, Any]:
    """Start a run and see it through.

    Args:
        config: What to run.
        out: The run's directory.
        console: Where to show progress.
        force: Replace a run that is in the directory.

    Returns:
        The summary that was written; nothing where another worker writes it.

    Raises:
        CommandError: If the run cannot be started, diverges, or is interrupted.
    """
    team = crew()
    with _way_to_go_on(out, config, team):
        config = team.first(lambda: config)
        data = _load(config, team)  # before anything is written or removed
        with team.together(
            lambda: RunDirectory.create(out, config, force=force) if team.leads else Follower(out, config)
        ) as run:
            return _see_through(_trainer(run, data, console, team), console)


def resume(out: Path, given: dict[str, Any], console: Console, *, from_previous: bool = False) -> dict[str, Any]:
    """Go on with the run in a directory, from its newest checkpoint or from the one before; see `train`."""
    team = crew()
    with team.in_contact():
        config = team.first(lambda: resumable(out, given))
    with _way_to_go_on(out, config, team):
        data = _load(config, team)
        run, checkpoint = team.together(
            lambda: (
                RunDirectory.resume(out, config, from_previous=from_previous)
                if team.leads
                else (Follower(out, config), None)
            )
        )
        with run:
            checkpoint = team.first(lambda: checkpoint)
            trainer = _trainer(run, data, console, team)
            if checkpoint is not None:
                _restore(trainer, checkpoint)
                done = "is finished:" if trainer.examples >= config.examples else "goes on from"
                console.print(f"the run {done} {trainer.examples:,} examples", highlight=False)
            return _see_through(trainer, console)


def _load(config: RunConfig, team: Crew) -> ImageData:
    def load() -> ImageData:
        team.device(config.device)  # that there is one is known before anything is written, too
        return problem(config.problem).load(None if config.data is None else Path(config.data))

    return team.together(load)


def _trainer(run: RunDirectory | Follower, data: ImageData, console: Console, team: Crew) -> Trainer:
    return Trainer(run, data, display_for(console, run.config) if team.leads else Silent(), team)


def _restore(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    try:
        trainer.load_state_dict(checkpoint)
    except (ValueError, RuntimeError, LookupError) as error:  # of torch's modules, the loader, the scheduler
        raise CommandError(
            f"{trainer.run.path}: its checkpoint does not fit: {error}; resume the run with the data and the "
            "version of cabs that it was started with"
        ) from error


@contextmanager
def _way_to_go_on(out: Path, config: RunConfig, team: Crew) -> Iterator[None]:
    """Tell those who run out of disk, or of workers, how to go on."""
    try:
        with team.in_contact():
            yield
    except Lost as error:
        if not (out / CONFIG).exists():
            raise
        raise Lost(
            f"{error}; torchrun says below which one it was. Go on, with as many workers as you like, with\n"
            f"  {_command_to_go_on(out, config, team)}"
        ) from error
    except WriteError as error:
        if not (out / NEWEST).exists():
            raise
        # In one line: a sweep shows the last line of what a run has said.
        raise WriteError(
            f"{error}; the last checkpoint is whole, go on from it with: {_command_to_go_on(out, config, team)}"
        ) from error


def _command_to_go_on(out: Path, config: RunConfig, team: Crew) -> str:
    command = f"cabs train {shlex.quote(config.problem)} --out {shlex.quote(str(out))} --resume"
    if team.size == 1:
        return command
    machines = f"--nproc-per-node {team.size}" if team.local_size == team.size else "…"
    return f"torchrun {machines} -m {command}"


def _see_through(trainer: Trainer, console: Console) -> dict[str, Any]:
    run = trainer.run
    with stop_on_signals() as stop, use_threads(trainer.crew.threads(trainer.config.threads)):
        try:
            with trainer.display:
                finished = trainer.train(trainer.crew.stop_for_all(stop))
        except Diverged as error:
            if isinstance(run, RunDirectory):
                run.write_summary({**summarise(trainer, "diverged"), "reason": str(error)})
            raise
    if isinstance(run, Follower):
        return {}
    summary = summarise(trainer, "finished" if finished else "interrupted")
    run.write_summary(summary)
    with writing(run.path / PICTURE):
        draw_run(run.path)
    if not finished:
        assert stop.signal_number is not None
        command = _command_to_go_on(run.path, run.config, trainer.crew)
        raise Interrupted(f"stopped at {trainer.examples:,} examples; go on with\n  {command}", stop.signal_number)
    _print_summary(summary, run.path, console)
    return summary


def summarise(trainer: Trainer, status: str) -> dict[str, Any]:
    """The outcome of a run so far, from its metrics."""
    trainer.run.flush()
    rows = list(read_metrics(trainer.run.path))
    evaluations = [row for row in rows if "test_accuracy" in row]
    sizes = [row["batch_size"] for row in rows if "batch_size" in row]
    last = evaluations[-1] if evaluations else {}
    return {
        "status": status,
        "problem": trainer.config.problem,
        "method": trainer.config.method,
        "lr": trainer.config.lr,
        "seed": trainer.config.seed,
        "examples": trainer.examples,
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 3),
        "input_share": round(trainer.input_seconds / trainer.seconds, 4) if trainer.seconds else None,
        "train_loss": last.get("train_loss"),
        "test_loss": last.get("test_loss"),
        "test_accuracy": last.get("test_accuracy"),
        "best_test_accuracy": max((row["test_accuracy"] for row in evaluations), default=None),
        "mean_batch_size": round(trainer.examples / trainer.step, 2) if trainer.step else None,
        "last_batch_size": sizes[-1] if sizes else None,
        "max_batch_size": max(sizes, default=None),
        "environment": environment(trainer.config, trainer.crew),
    }


def environment(config: RunConfig, team: Crew) -> dict[str, Any]:
    """What the numbers were made with."""
    return {
        "cabs": __version__,
        **hardware.describe(config.threads),
        "device": config.device,
        "workers": team.size,
    }


def _print_summary(summary: dict[str, Any], path: Path, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("test accuracy", f"{summary['test_accuracy']:.2%}  (best {summary['best_test_accuracy']:.2%})")
    table.add_row("training loss", f"{summary['train_loss']:.4g}")
    table.add_row(
        "batch size",
        f"{summary['last_batch_size']:,} at the end, {summary['mean_batch_size']:,.0f} on average",
    )
    table.add_row(
        "trained",
        f"{summary['examples']:,} examples in {summary['steps']:,} steps, {duration(summary['seconds'])} "
        f"({summary['input_share'] or 0:.0%} for inputs)",
    )
    table.add_row("run", escape(str(path)))
    table.add_row("picture", escape(str(path / PICTURE)))
    console.print(table, soft_wrap=not console.is_terminal)


def default_directory(config: RunConfig) -> Path:
    """Where a run goes that was given no directory: one name for one configuration of rule, rate and seed."""
    return Path("runs") / run_name(config)


def run_name(config: RunConfig) -> str:
    """A file name that tells the method, the learning rate and the seed."""
    detail = {
        "constant": f"-m{config.batch_size}",
        "norm-test": f"-theta{config.theta}",
        "gain-per-cost": f"-L{config.lipschitz}",
    }.get(config.rule, "")
    estimator = "-paper" if config.estimator == "paper" and config.rule != "constant" else ""
    return f"{file_name(config.problem)}-{config.rule}{detail}{estimator}-lr{config.lr:g}-seed{config.seed}"


def file_name(problem_name: str) -> str:
    """A problem's name as part of a file name; that of an image folder has a path in it."""
    return re.sub(r"[^\w.-]+", "_", problem_name)
