"""Runs of the experiments that one process or several can make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.problems import DIGITS
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.crew import Crew, Follower
from cabs.experiments.runs.directory import RunDirectory
from cabs.experiments.runs.training import Diverged, Trainer

SHORT = {"examples": 700, "eval_every": 300, "checkpoint_every": 150, "log_every": 1, "threads": 1}


def config(**given: Any) -> RunConfig:
    """A short run whose batch size moves from the start."""
    rule = {} if "rule" in given else {"rule": "norm-test", "theta": 0.6}
    return RunConfig.make(DIGITS, {**SHORT, **rule, "lr": 0.2, "min_batch_size": 2, "max_batch_size": 64, **given})


def crew() -> Crew:
    return Crew(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Crew()


def train(path: Path, settings: RunConfig, until: int | None = None) -> tuple[str, dict[str, Any]]:
    """Start or resume a run: how it ended, and its state."""
    torch.set_num_threads(1)
    team, data = crew(), DIGITS.load(None)
    checkpoint: dict[str, Any] | None = None
    run: RunDirectory | Follower = Follower(path, settings)
    if team.leads and not path.exists():
        run = RunDirectory.create(path, settings)
    elif team.leads:
        run, checkpoint = RunDirectory.resume(path, settings)
    with run:
        checkpoint = team.first(lambda: checkpoint)
        trainer = Trainer(run, data, crew=team)
        if checkpoint is not None:
            trainer.load_state_dict(checkpoint)
        try:
            end = "finished" if trainer.train(lambda: trainer.step == until) else "stopped"
        except Diverged as error:
            end = str(error)
    trainer.scheduler.close()
    return end, trainer.state_dict()


def complaint(ranks: list[int]) -> tuple[str, int]:
    """What a process hears when some have failed at their work."""
    team = crew()

    def work() -> None:
        if team.rank in ranks:
            raise UsageError(f"no good in {team.rank}")

    try:
        team.together(work)
    except CommandError as error:
        return str(error), error.exit_code
    return "nothing", 0
