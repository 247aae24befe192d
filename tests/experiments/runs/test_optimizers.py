"""The table of optimizers, and runs that name one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cabs import CABS
from cabs.experiments.problems import DIGITS, PROBLEMS, SHAKESPEARE, SVHN, Problem
from cabs.experiments.runs import session
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.naming import headline, run_name
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.sweeps.grid import Grid


def test_what_they_are() -> None:
    network = torch.nn.Linear(2, 2)
    sgd, momentum, adamw = (OPTIMIZERS[name].optimizer(network, 0.1, 0.0) for name in ("sgd", "momentum", "adamw"))
    assert [type(made) for made in (sgd, momentum, adamw)] == [torch.optim.SGD, torch.optim.SGD, torch.optim.AdamW]
    assert [made.param_groups[0]["lr"] for made in (sgd, momentum, adamw)] == [0.1] * 3
    assert (sgd.param_groups[0]["momentum"], momentum.param_groups[0]["momentum"]) == (0, 0.9)
    assert adamw.param_groups[0]["weight_decay"] == 0
    weights, biases = OPTIMIZERS["adamw"].optimizer(network, 0.1, 0.5).param_groups
    assert (weights["weight_decay"], biases["weight_decay"]) == (0.5, 0)


def test_the_learning_rate_suits_the_optimizer() -> None:
    assert RunConfig.make(SVHN, {}).lr == SVHN.lr
    assert RunConfig.make(SVHN, {"optimizer": "adamw"}).lr == OPTIMIZERS["adamw"].lr
    assert RunConfig.make(SHAKESPEARE, {}).lr == SHAKESPEARE.lr
    assert RunConfig.make(SVHN, {"optimizer": "adamw", "lr": 0.5}).lr == 0.5


def test_the_name_tells_the_optimizer_where_it_is_not_the_problems() -> None:
    assert run_name(RunConfig.make(DIGITS, {})) == "digits-cabs-lr0.1-seed0"
    assert run_name(RunConfig.make(DIGITS, {"optimizer": "momentum"})) == "digits-cabs-momentum-lr0.01-seed0"
    assert run_name(RunConfig.make(SHAKESPEARE, {})) == "shakespeare-cabs-lr0.001-seed0"
    assert run_name(RunConfig.make(SHAKESPEARE, {"optimizer": "sgd"})) == "shakespeare-cabs-sgd-lr0.1-seed0"
    config = RunConfig.make(DIGITS, {"optimizer": "adamw", "rule": "constant", "batch_size": 32})
    assert headline(config) == "digits · Constant 32, AdamW · α = 0.001 · seed 0"


@pytest.mark.parametrize("rule", [{"rule": "constant", "batch_size": 32}, {"rule": "cabs"}], ids=["constant", "cabs"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_trains_and_resumes(tmp_path: Path, name: str, rule: dict[str, Any]) -> None:
    given = {**rule, "optimizer": name, "eval_every": 320, "checkpoint_every": 160}
    quiet = Console(file=io.StringIO())
    whole = RunConfig.make(DIGITS, {**given, "examples": 640})
    summary = session.train(whole, tmp_path / "whole", quiet)
    assert (summary["status"], summary["optimizer"]) == ("finished", name)
    session.train(RunConfig.make(DIGITS, {**given, "examples": 320, "log_every": 1}), tmp_path / "parts", quiet)
    session.resume(tmp_path / "parts", {"examples": 640}, quiet)
    first, second = (torch.load(tmp_path / run / "checkpoint.pt", weights_only=True) for run in ("whole", "parts"))
    assert all(torch.equal(weight, second["network"][key]) for key, weight in first["network"].items())


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=lambda problem: problem.name)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_goes_with_every_problem(problem: Problem, name: str) -> None:
    config = RunConfig.make(problem, {"optimizer": name, "rule": "cabs"})
    network = problem.network()
    optimizer = OPTIMIZERS[name].optimizer(network, config.lr, config.weight_decay)
    scheduler = CABS(network, optimizer, None, monitor_only=True, max_examples=2, measure_every=1)
    words = problem is SHAKESPEARE
    shape = problem.net.input_shape
    for _ in range(2):
        inputs = torch.randint(0, problem.net.classes, (4, *shape)) if words else torch.randn(4, *shape)
        outputs = network(inputs)
        targets = torch.randint(0, problem.net.classes, outputs.shape[:-1])
        loss = problem.loss(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    assert scheduler.last is not None
    assert scheduler.last.measured
    assert scheduler.last.noise_share > 0


def test_grids_range_over_them_each_with_its_own_rates() -> None:
    grid = Grid.make("digits", {}, {"optimizers": "sgd,adamw", "rules": "cabs"})
    rates = {name: {config.lr for config in grid.configs(1, None) if config.optimizer == name} for name in OPTIMIZERS}
    assert rates == {"sgd": {*OPTIMIZERS["sgd"].lrs}, "momentum": set(), "adamw": {*OPTIMIZERS["adamw"].lrs}}
    both = Grid.make("digits", {}, {"optimizers": "sgd,adamw", "rules": "cabs", "lrs": "0.5"}).configs(1, None)
    assert [(config.optimizer, config.lr) for config in both] == [("sgd", 0.5), ("adamw", 0.5)]
    assert {config.optimizer for config in Grid(problem="shakespeare").configs(1, None)} == {"adamw"}
