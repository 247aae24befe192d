"""Training runs: what they write, and that they end the same however often they are interrupted."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.problems import DIGITS, problem
from cabs.experiments.runs import session
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.directory import RunDirectory
from cabs.experiments.runs.metrics import read_metrics
from cabs.experiments.runs.optimizers import parameter_groups
from cabs.experiments.runs.training import Diverged, Trainer, crossed

DATA = DIGITS.load(None)


def config(**given: Any) -> RunConfig:
    """A short run whose batch size moves from the start: the norm test, unless another rule is given."""
    if "rule" not in given:
        given |= {"rule": "norm-test", "theta": 0.6}
    schedule = {"examples": 1_200, "eval_every": 300, "checkpoint_every": 150, "log_every": 40}
    return RunConfig.make(
        DIGITS, {**schedule, "threads": 1, "lr": 0.2, "min_batch_size": 6, "max_batch_size": 64, **given}
    )


def trained(path: Path, settings: RunConfig) -> Trainer:
    with RunDirectory.create(path, settings) as run:
        trainer = Trainer(run, DATA)
        assert trainer.train()
    return trainer


def numbers(path: Path) -> str:
    """The metrics without their times, byte for byte."""
    return re.sub(r'"seconds":[0-9.e-]+', "", (path / "metrics.jsonl").read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    torch.set_num_threads(1)
    trained(path, config())
    return path


def test_rows_hold_what_they_should(reference: Path) -> None:
    rows = list(read_metrics(reference))
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "test_accuracy" in row]
    assert len(steps) + len(evaluations) == len(rows)
    columns = {"examples", "step", "seconds", "loss", "batch_size", "variance", "noise_share", "lr"}
    assert all(row.keys() == columns for row in steps)
    assert all(
        row.keys() == {"examples", "step", "seconds", "train_loss", "test_loss", "test_accuracy"} for row in evaluations
    )
    assert [row["examples"] // 300 for row in evaluations] == [0, 1, 2, 3, 4]
    assert evaluations[0]["train_loss"] == pytest.approx(math.log(10), abs=0.05)
    assert evaluations[-1]["train_loss"] < 2.2
    assert rows[-1]["examples"] >= 1_200
    assert all(row["lr"] == 0.2 and row["variance"] > 0 and row["noise_share"] > 0 for row in steps)
    assert [row["examples"] for row in rows] == sorted(row["examples"] for row in rows)


def test_examples_count_the_batches(tmp_path: Path) -> None:
    trained(tmp_path, config(log_every=1))
    steps = [row for row in read_metrics(tmp_path) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    total = 0
    for row in steps:
        total += row["batch_size"]
        assert row["examples"] == total
        assert 6 <= row["batch_size"] <= 64
    assert steps[0]["batch_size"] == 6
    assert len({row["batch_size"] for row in steps}) > 8
    assert total - steps[-1]["batch_size"] < 1_200 <= total


def test_same_seed_same_numbers_and_other_seed_others(reference: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # what happened before must not matter
    trained(tmp_path / "same", config())
    trained(tmp_path / "other", config(seed=1))
    assert numbers(tmp_path / "same") == numbers(reference)
    assert numbers(tmp_path / "other") != numbers(reference)


class Killed(BaseException):
    """Stands for the end of the process."""


class Killer(session.Trainer):
    """Dies before the given step."""

    def __init__(self, *arguments: Any, at: int) -> None:
        super().__init__(*arguments)
        self.at = at

    def make_step(self, *arguments: Any) -> None:
        if self.step >= self.at:
            raise Killed
        super().make_step(*arguments)


@pytest.mark.parametrize("seed", range(4))
def test_killed_and_resumed_runs_end_the_same(reference: Path, tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    path = tmp_path / "run"
    with RunDirectory.create(path, config()) as run, pytest.raises(Killed):
        Killer(run, DATA, at=choice.randrange(1, 20)).train()
    for _ in range(3):
        with open(path / "metrics.jsonl", "ab") as file:
            file.write(b'{"examples":9, "half a ro')
        run, checkpoint = RunDirectory.resume(path, config())
        with run:
            trainer = Killer(run, DATA, at=0)
            if checkpoint is not None:
                trainer.load_state_dict(checkpoint)
            trainer.at = trainer.step + choice.randrange(12)
            with contextlib.suppress(Killed):
                trainer.train()
    run, checkpoint = RunDirectory.resume(path, config())
    with run:
        trainer = Trainer(run, DATA)
        if checkpoint is not None:
            trainer.load_state_dict(checkpoint)
        assert trainer.train()
    assert numbers(path) == numbers(reference)


@pytest.mark.parametrize("steps", [1, 9, 20])
def test_stopped_runs_end_the_same(reference: Path, tmp_path: Path, steps: int) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, config()) as run:
        trainer = Trainer(run, DATA)
        assert not trainer.train(stop=lambda: trainer.step >= steps)
        assert trainer.step == steps
    run, checkpoint = RunDirectory.resume(path, config())
    with run:
        again = Trainer(run, DATA)
        assert checkpoint is not None
        again.load_state_dict(checkpoint)
        assert again.step == steps
        assert again.train()
    assert numbers(path) == numbers(reference)


@pytest.mark.parametrize(
    "given",
    [
        {"rule": "cabs"},
        {"rule": "constant", "batch_size": 50},
        {"rule": "gain-per-cost", "lipschitz": 3.0},
        {"estimator": "paper"},
        {"measure": "auto"},
        {"weight_decay": 0.01},
    ],
)
def test_every_rule_trains_and_resumes(tmp_path: Path, given: dict[str, Any]) -> None:
    settings = config(examples=900, **given)
    trained(tmp_path / "whole", settings)
    with RunDirectory.create(tmp_path / "parts", settings) as run:
        trainer = Trainer(run, DATA)
        trainer.train(stop=lambda: trainer.step >= 5)
    run, checkpoint = RunDirectory.resume(tmp_path / "parts", settings)
    with run:
        again = Trainer(run, DATA)
        assert checkpoint is not None
        again.load_state_dict(checkpoint)
        again.train()
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    steps = [row for row in read_metrics(tmp_path / "whole") if "loss" in row]
    if settings.rule == "constant":
        assert {row["batch_size"] for row in steps} == {50}
        assert {row["variance"] for row in steps} == {None}
    else:
        assert all(row["variance"] > 0 and row["noise_share"] > 0 for row in steps)


def test_the_estimators_differ(reference: Path, tmp_path: Path) -> None:
    trained(tmp_path, config(estimator="paper"))
    first = [next(row["variance"] for row in read_metrics(path) if "loss" in row) for path in (reference, tmp_path)]
    assert first[0] != first[1]


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    settings = config(lr=1e6, rule="constant", batch_size=16)
    with pytest.raises(Diverged, match="diverged"):
        session.train(settings, tmp_path, Console(quiet=True))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_batch_without_loss_does_not_end_the_run(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, config()) as run:
        trainer = Trainer(run, DATA)
        output = trainer.network[-1]
        with torch.no_grad():
            output.weight.zero_()
            output.bias.copy_(torch.tensor([1000.0] + [0.0] * 9))
        zeros = DATA.train.take((DATA.train.labels == 0).nonzero().flatten()[:16])
        trainer.make_step(iter([(zeros.images, zeros.labels)]))
        assert trainer.loader.batch_size == 6
        trainer.make_step(iter([(DATA.train.images[:16], DATA.train.labels[:16])]))


def test_weights_decay_and_biases_do_not() -> None:
    network = problem("digits").network()
    weights, biases = parameter_groups(network, 0.1)
    assert all(parameter.ndim > 1 for parameter in weights["params"])
    assert all(parameter.ndim == 1 for parameter in biases["params"])
    assert (weights["weight_decay"], biases.get("weight_decay", 0)) == (0.1, 0)
    assert len(weights["params"]) + len(biases["params"]) == len(list(network.parameters()))
    assert len(parameter_groups(network, 0.0)) == 1


def test_the_sample_for_the_training_loss_is_fixed() -> None:
    sample = DATA.train.sample(100)
    assert torch.equal(sample.images, DATA.train.sample(100).images)
    assert len(sample) == 100
    assert DATA.train.sample(10**6) is DATA.train


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(0, 9, False), (9, 10, True), (0, 10, True), (10, 19, False), (5, 35, True)]
)
def test_crossing_a_multiple(before: int, after: int, expected: bool) -> None:
    assert crossed(before, after, 10) is expected


def test_batches_larger_than_the_data_are_refused(tmp_path: Path) -> None:
    settings = config(rule="constant", batch_size=10_000)
    with RunDirectory.create(tmp_path, settings) as run, pytest.raises(UsageError, match="cannot be drawn"):
        Trainer(run, DATA)


def test_summary_and_picture(tmp_path: Path) -> None:
    console = Console(quiet=True)
    summary = session.train(config(), tmp_path / "run", console)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    evaluations = [row for row in read_metrics(tmp_path / "run") if "test_accuracy" in row]
    assert summary["status"] == "finished"
    assert summary["test_accuracy"] == evaluations[-1]["test_accuracy"]
    assert summary["best_test_accuracy"] == max(row["test_accuracy"] for row in evaluations)
    assert summary["mean_batch_size"] == pytest.approx(summary["examples"] / summary["steps"], abs=0.01)
    assert 0 < summary["input_share"] < 0.5
    assert summary["environment"]["torch"] == torch.__version__
    assert (tmp_path / "run" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_can_be_extended(reference: Path, tmp_path: Path) -> None:
    console = Console(quiet=True)
    session.train(config(), tmp_path / "run", console)
    before = numbers(tmp_path / "run")
    summary = session.resume(tmp_path / "run", {"examples": 1_500}, console)
    assert summary["examples"] >= 1_500
    assert numbers(tmp_path / "run").startswith(before)
    assert session.resume(tmp_path / "run", {}, console)["examples"] == summary["examples"]


def test_a_checkpoint_for_other_data_is_refused_in_words(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    fewer = replace(DATA, train=DATA.train.take(torch.arange(500)))
    monkeypatch.setattr(session, "problem", lambda _: replace(DIGITS, load=lambda _: fewer))
    with pytest.raises(CommandError, match=r"checkpoint does not fit: .*; resume the run with the data"):
        session.resume(path, {}, Console(quiet=True))
