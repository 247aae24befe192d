"""Grids: the paper's by default, any part of it by options or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cabs.experiments.errors import UsageError
from cabs.experiments.runs.naming import run_name
from cabs.experiments.sweeps.grid import Grid, read_grid


def test_the_default_is_the_papers() -> None:
    configs = Grid.make("cifar10", {}, {}).configs(2, None)
    assert len(configs) == 6 * (1 + 3 + 6)
    assert {config.lr for config in configs} == {0.3, 0.1, 0.06, 0.03, 0.01, 0.006}
    assert {config.batch_size for config in configs} == {None, 16, 32, 64, 128, 256, 512}
    assert {config.theta for config in configs} == {None, 0.6, 0.8, 1.0}
    assert {(config.min_batch_size, config.max_batch_size) for config in configs} == {(16, 2048)}
    assert {config.examples for config in configs} == {10_000_000}
    assert len({run_name(config) for config in configs}) == len(configs)


def test_options_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(
        "problem: digits\nlrs: [0.1, 0.2]\nsizes: 32\nrules: cabs, constant\nexamples: 20k\nseeds: [0, 1]\n"
    )
    grid = Grid.make(None, read_grid(path), {"lrs": "0.3", "sizes": None})
    assert grid == Grid(
        problem="digits", rules=("cabs", "constant"), lrs=(0.3,), sizes=(32,), examples=20_000, seeds=(0, 1)
    )
    assert len(grid.configs(1, None)) == 4


def test_estimators_apply_to_adaptive_rules_only() -> None:
    grid = Grid(problem="digits", lrs=(0.1,), sizes=(32,), thetas=(1.0,), estimators=("exact", "paper"))
    assert [config.method for config in grid.configs(1, None)] == [
        "CABS",
        "CABS (paper's estimator)",
        "Competitor θ = 1.0",
        "Competitor θ = 1.0 (paper's estimator)",
        "Constant 32",
    ]


def test_what_the_variance_is_measured_on_applies_to_adaptive_rules_only() -> None:
    given = {"lrs": "0.1", "rules": "cabs,constant", "sizes": "16"}
    assert [config.measure for config in Grid.make("digits", {}, given).configs(1, None)] == ["all", "all"]
    auto = Grid.make("digits", {}, {**given, "measure": "auto"})
    assert [config.measure for config in auto.configs(1, None)] == ["auto", "all"]
    with pytest.raises(UsageError, match="--measure some: there are all, auto"):
        Grid.make("digits", {}, {**given, "measure": "some"}).configs(1, None)


def test_repeated_values_are_run_once() -> None:
    grid = Grid.make("digits", {}, {"lrs": "0.1,0.1", "rules": "cabs,cabs"})
    assert len(grid.configs(1, None)) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lrs": "fast"}, "lrs cannot be 'fast'"),
        ({"lrs": ""}, "lrs cannot be"),
        ({"sizes": "1.5"}, "sizes cannot be"),
        ({"rules": "sgd"}, "no rule is called 'sgd'"),
        ({"examples": "lots"}, "400k"),
        ({"learning_rates": "0.1"}, "a grid has no learning_rates"),
        ({"seeds": []}, "no seeds"),
    ],
)
def test_bad_grids_are_refused(given, expected) -> None:
    with pytest.raises(UsageError, match=expected):
        Grid.make("digits", {}, given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"lrs": "-0.1"}, "--lr"), ({"sizes": "1"}, "--batch-size"), ({"rules": "gain-per-cost"}, "--lipschitz")],
)
def test_bad_values_are_refused_before_anything_runs(given, expected) -> None:
    with pytest.raises(UsageError, match=expected):
        Grid.make("digits", {}, given).configs(1, None)


def test_no_problem() -> None:
    with pytest.raises(UsageError, match="which problem"):
        Grid.make(None, {}, {})


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "lrs: [0.1\n", "just words", "!!python/object/apply:os.getcwd []"])
def test_files_that_are_no_grid(tmp_path: Path, text: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"grid\.yaml"):
        read_grid(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml: cannot be read"):
        read_grid(tmp_path / "nowhere.yaml")


def test_every_rule_and_decay_can_be_in_a_grid() -> None:
    options = {
        "rules": "cabs,horizon,noise-scale,steps,ramp,geometric,on-plateau,decay-to-batch,constant",
        "lrs": "0.1",
        "noise_shares": "0.25,0.5",
        "horizons": "measured,0.6:0.6:0.125",
        "costs": "examples,measured",
        "schedules": "0:32 10k:64,0:16",
        "starts": "16",
        "ends": "64,128",
        "overs": "10k",
        "shapes": "linear,cosine",
        "factors": "2,4",
        "intervals": "5k",
        "patiences": "1k",
        "decays": "cosine,linear",
        "sizes": "16,32",
        "lr_decays": "none,cosine",
    }
    configs = Grid.make("digits", {}, options).configs(1, None)
    assert len(configs) == 2 * (4 + 4 + 1 + 2 + 4 + 2 + 2 + 2 + 2)
    assert len({run_name(config) for config in configs}) == len(configs)
    assert len({config.method for config in configs}) == len(configs)
    assert {config.over for config in configs if config.rule == "ramp"} == {10_000}
