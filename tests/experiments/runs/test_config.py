"""Configurations: checked where they are made, and the same after a trip to disk."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cabs.experiments.errors import UsageError
from cabs.experiments.problems import DIGITS, SVHN
from cabs.experiments.runs.config import RunConfig, parse_count


def make(**given: Any) -> RunConfig:
    return RunConfig.make(DIGITS, given)


def test_the_problem_provides_what_is_not_given() -> None:
    config = RunConfig.make(SVHN, {"examples": 100_000, "seed": None})
    assert (config.rule, config.lr, config.weight_decay, config.seed) == ("cabs", SVHN.lr, SVHN.weight_decay, 0)
    assert (config.eval_every, config.log_every, config.checkpoint_every) == (4_000, 50, 5_000)


def test_a_run_takes_the_cores_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2, 5}, raising=False)
    assert RunConfig.make(SVHN, {}).threads == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rule": "sgd"}, "no rule is called 'sgd'; there are cabs, horizon, gain-per-cost, norm-test, noise-scale, "),
        ({"optimizer": "sdg"}, "no optimizer is called 'sdg'; there are sgd, momentum, adamw"),
        ({"estimator": "rough"}, "--estimator rough"),
        ({"measure": "some"}, "--measure some"),
        ({"lr": 0.0}, "--lr 0.0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"smoothing": 1.0}, "--smoothing 1.0"),
        ({"weight_decay": -1e-4}, "--weight-decay"),
        ({"eval_every": 0}, "--eval-every 0"),
        ({"threads": 0}, "--threads 0"),
        ({"threads": 100_000}, "--threads 100000: must be at most 1024"),
        ({"seed": -1}, "--seed -1"),
        ({"rule": "constant"}, "--rule constant needs --batch-size"),
        ({"rule": "constant", "batch_size": 1}, "--batch-size 1: must be at least 2"),
        ({"rule": "constant", "batch_size": -3}, "--batch-size -3"),
        ({"batch_size": 32}, "--batch-size goes with --rule constant, not with --rule cabs"),
        ({"theta": 0.8}, "--theta goes with --rule norm-test or inner-product-test, not with"),
        ({"rule": "norm-test", "theta": -1.0}, "--theta -1.0"),
        ({"rule": "gain-per-cost"}, "--rule gain-per-cost needs --lipschitz"),
        ({"min_batch_size": 1}, "--min-batch-size 1"),
        ({"min_batch_size": 32, "max_batch_size": 16}, "--max-batch-size 16"),
    ],
)
def test_what_cannot_be_is_refused_by_option(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(**given)
    assert expected in str(caught.value)


def test_norm_test_has_the_default_of_its_authors() -> None:
    assert make(rule="norm-test").theta == 1.0


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({}, "CABS"),
        ({"estimator": "paper"}, "CABS (paper's estimator)"),
        ({"rule": "norm-test", "theta": 0.6}, "Competitor θ = 0.6"),
        ({"rule": "constant", "batch_size": 128, "estimator": "paper"}, "Constant 128"),
        ({"rule": "gain-per-cost", "lipschitz": 4.0}, "Gain per cost L = 4.0"),
    ],
)
def test_methods_have_names(given: dict[str, Any], method: str) -> None:
    assert make(**given).method == method


def test_json_round_trip() -> None:
    config = make(rule="norm-test", theta=0.6, lr=0.03, data="/some/where")
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda content: [], "not the configuration"),
        (lambda content: {}, "not the configuration"),
        (lambda content: {**content, "format": 99}, "format 99"),
        (lambda content: {k: v for k, v in content.items() if k != "lr"}, "lacks lr"),
        (lambda content: {**content, "lr": "fast"}, "cannot be"),
        (lambda content: {**content, "lr": -1}, "cannot be"),
    ],
)
def test_other_json_is_refused(change, expected) -> None:
    with pytest.raises(ValueError, match=expected):
        RunConfig.from_json(change(make().to_json()))


def test_resuming_allows_more_examples_and_other_data_only() -> None:
    config = make(lr=0.1)
    assert config.resumed({"lr": 0.1, "theta": None}) == config
    more = config.resumed({"examples": config.examples + 1, "data": "/elsewhere"})
    assert (more.examples, more.data) == (config.examples + 1, "/elsewhere")
    with pytest.raises(UsageError, match="--batch-size 32: the run was started without; resume it without the option"):
        config.resumed({"batch_size": 32})
    with pytest.raises(UsageError, match=r"--lr 0\.2: the run was started with 0\.1"):
        config.resumed({"lr": 0.2})
    with pytest.raises(UsageError, match="--examples 5"):
        config.resumed({"examples": 5})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("60000", 60_000),
        ("400k", 400_000),
        ("1.5M", 1_500_000),
        ("10m", 10_000_000),
        ("60_000", 60_000),
        ("1,000", 1000),
    ],
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "-5", "0", "1.5", "many", "nan", "inf", "1e400", "0.0001k"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="400k"):
        parse_count(text)
