"""`cabs train` from the first check of its options to the picture at the end."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cabs.experiments.errors import CommandError, WriteError
from cabs.experiments.files import writing
from cabs.experiments.problems import problem
from cabs.experiments.problems.problem import Data
from cabs.experiments.runs.checkpoints import NEWEST
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.crew import Crew, Follower, Lost, crew
from cabs.experiments.runs.directory import CONFIG, PICTURE, RunDirectory, resumable
from cabs.experiments.runs.display import Silent, display_for
from cabs.experiments.runs.signals import Interrupted, stop_on_signals
from cabs.experiments.runs.summary import print_summary, summarise
from cabs.experiments.runs.training import Diverged, Trainer

_OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|cannot allocate memory", re.IGNORECASE
)


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
        The summary that was written; nothing where another process writes it.

    Raises:
        CommandError: If the run cannot be started, diverges, or is interrupted.
    """
    team = crew()
    with _way_to_go_on(out, config, team):
        config = team.first(lambda: config)
        # All that can be wrong with the options comes out before anything is written or removed.
        trainer = _trainer(out, config, console, team)
        with team.together(
            lambda: RunDirectory.create(out, config, force=force) if team.leads else Follower(out, config)
        ) as run:
            trainer.run = run
            try:
                with _enough_memory(config):
                    return _see_through(trainer, console)
            except OutOfMemory:
                if isinstance(run, RunDirectory) and not (out / NEWEST).exists():
                    run.discard()
                raise


def resume(out: Path, given: dict[str, Any], console: Console, *, from_previous: bool = False) -> dict[str, Any]:
    """Resume the run in a directory, from its newest checkpoint or from the one before; see `train`."""
    team = crew()
    with team.in_contact():
        config = team.first(lambda: resumable(out, given))
    with _way_to_go_on(out, config, team):
        trainer = _trainer(out, config, console, team)
        run, checkpoint = team.together(
            lambda: (
                RunDirectory.resume(
                    out, config, from_previous=from_previous, restore=lambda state: _restore(trainer, state)
                )
                if team.leads
                else (Follower(out, config), None)
            )
        )
        with run:
            trainer.run = run
            checkpoint = team.first(lambda: checkpoint)
            if checkpoint is not None and not team.leads:
                _restore(trainer, checkpoint)
            console.print(_where(trainer, checkpoint is not None), highlight=False, soft_wrap=True)
            return _see_through(trainer, console)


def _where(trainer: Trainer, restored: bool) -> str:
    if not restored:
        return "the run was stopped before its first checkpoint: it starts over"
    done = "is finished:" if trainer.examples >= trainer.config.examples else "resumes from"
    return f"the run {done} {trainer.examples:,} examples"


class OutOfMemory(CommandError):
    """A run needs more memory than there is."""


@contextmanager
def _enough_memory(config: RunConfig) -> Iterator[None]:
    """Replace an error about memory by a message that says what to do.

    Raises:
        OutOfMemory: In place of Python's or PyTorch's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        low, high = config.bounds
        option = f"--max-batch-size, which is {high:,}" if high > low else f"--batch-size, which is {low:,}"
        raise OutOfMemory(f"there is not enough memory on {config.device} for the run; lower {option}") from error


def _trainer(out: Path, config: RunConfig, console: Console, team: Crew) -> Trainer:
    """The trainer of a run, before there is a directory to write to."""

    def prepared() -> Trainer:
        with _enough_memory(config):
            team.device(config.device)
            data: Data = problem(config.problem).load(None if config.data is None else Path(config.data))
            display = display_for(console, config) if team.leads else Silent()
            return Trainer(Follower(out, config), data, display, team)

    return team.together(prepared)


def _restore(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    try:
        trainer.load_state_dict(checkpoint)
    # Whatever torch's modules, the loader and the scheduler say of a state that is not theirs.
    except Exception as error:
        reason = f"{error}" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
        raise CommandError(
            f"{trainer.run.path}: its checkpoint does not fit: {reason}; resume the run with the data and the "
            "version of cabs that it was started with"
        ) from error


@contextmanager
def _way_to_go_on(out: Path, config: RunConfig, team: Crew) -> Iterator[None]:
    """Say how to resume after a full disk or a lost process."""
    try:
        with team.in_contact(), _enough_memory(config):
            yield
    except Lost as error:
        if not os.path.exists(out / CONFIG):
            raise
        raise Lost(
            f"{error}; torchrun says below which one it was. Resume, with any number of processes, with\n"
            f"  {_command_to_resume(out, config, team)}"
        ) from error
    except WriteError as error:
        if not os.path.exists(out / NEWEST):  # which a name that cannot be does not trouble
            raise
        # In one line: a sweep shows the last line of what a run has said.
        raise WriteError(
            f"{error}; the last checkpoint is complete; resume from it with: {_command_to_resume(out, config, team)}"
        ) from error


def _command_to_resume(out: Path, config: RunConfig, team: Crew) -> str:
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
    _draw(run.path)
    if not finished:
        assert stop.signal_number is not None
        command = _command_to_resume(run.path, run.config, trainer.crew)
        raise Interrupted(f"stopped at {trainer.examples:,} examples; resume with\n  {command}", stop.signal_number)
    print_summary(summary, run.config, run.path, console)
    return summary


def _draw(path: Path) -> None:
    from cabs.experiments.runs.picture import draw_run  # not before there is something to draw

    with writing(path / PICTURE):
        draw_run(path)
