"""Every rule of the command line: trained, resumed, named; budgets are extended, and noise shares are shown."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from cabs import rules
from cabs.experiments.errors import UsageError
from cabs.experiments.problems import DIGITS
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.directory import RunDirectory
from cabs.experiments.runs.display import LivePanel, PlainLines
from cabs.experiments.runs.metrics import read_metrics
from cabs.experiments.runs.naming import run_name
from cabs.experiments.runs.picture import draw_run
from cabs.experiments.runs.rules import RULES
from cabs.experiments.runs.training import Trainer

Command = Callable[..., tuple[int, str, str]]

DATA = DIGITS.load(None)

GIVEN: dict[str, dict[str, Any]] = {
    "cabs": {"noise_share": 0.05},
    "horizon": {},
    "gain-per-cost": {"lipschitz": 4.0},
    "norm-test": {"theta": 0.6},
    "noise-scale": {},
    "inner-product-test": {"theta": 0.3, "nu": 0.5},
    "steps": {"schedule": "0:8 300:16 700:40"},
    "ramp": {"start": 8, "end": 40, "over": 600, "shape": "cosine"},
    "geometric": {"start": 8, "every": 300},
    "on-plateau": {"start": 8, "factor": 3.0, "patience": 100},
    "decay-to-batch": {"start": 8},
    "constant": {"batch_size": 24},
}
NAMES = {
    "cabs": "CABS ρ = 0.05",
    "horizon": "CABS, horizon",
    "noise-scale": "Noise scale",
    "inner-product-test": "Inner product test θ = 0.3 ν = 0.5",
    "steps": "Steps 0:8 300:16 700:40",
    "ramp": "Ramp 8 to 40 over 600 cosine",
    "geometric": "Geometric 8 × 2 every 300",
    "on-plateau": "On plateau 8 × 3 after 100",
    "decay-to-batch": "Decay to batch 8 cosine",
    "constant": "Constant 24",
}


def config(**given: Any) -> RunConfig:
    schedule = {"examples": 1_200, "eval_every": 400, "checkpoint_every": 100, "log_every": 1}
    return RunConfig.make(
        DIGITS, {**schedule, "threads": 1, "lr": 0.2, "min_batch_size": 6, "max_batch_size": 64, **given}
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(path) if "loss" in row]


def numbers(path: Path) -> str:
    return re.sub(r'"seconds":[0-9.e-]+', "", (path / "metrics.jsonl").read_text())


def test_every_rule_is_tried_here() -> None:
    assert set(GIVEN) == set(RULES)


@pytest.mark.parametrize("rule", GIVEN)
def test_a_rule_trains_and_survives_interruptions(rule: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = config(rule=rule, **GIVEN[rule])
    with RunDirectory.create(tmp_path / "whole", settings) as run:
        assert Trainer(run, DATA).train()
    stops = iter([False] * 5 + [True] + [False] * 4 + [True] + [False] * 10_000)
    with RunDirectory.create(tmp_path / "parts", settings) as run:
        assert not Trainer(run, DATA).train(lambda: next(stops))
    finished = False
    while not finished:
        run, checkpoint = RunDirectory.resume(tmp_path / "parts", settings)
        with run:
            trainer = Trainer(run, DATA)
            assert checkpoint is not None
            trainer.load_state_dict(checkpoint)
            finished = trainer.train(lambda: next(stops))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    sizes = [row["batch_size"] for row in rows(tmp_path / "whole")]
    assert len(set(sizes)) > (0 if rule == "constant" else 1)
    shares = [row["noise_share"] for row in rows(tmp_path / "whole")]
    assert all((share is not None) == RULES[rule].measures for share in shares)
    if rule == "horizon":
        assert sum(sizes) == 1_200


@pytest.mark.parametrize("rule", NAMES)
def test_rules_have_names(rule: str) -> None:
    settings = config(rule=rule, **GIVEN[rule])
    assert settings.method == NAMES[rule]
    assert re.fullmatch(r"[\w.-]+", run_name(settings))
    assert RunConfig.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_names_of_decays_and_costs() -> None:
    assert config(rule="constant", batch_size=16, lr_decay="cosine").method == "Constant 16, cosine decay"
    assert run_name(config(rule="constant", batch_size=16, lr_decay="cosine")).startswith("digits-constant-m16-cosine-")
    assert config(rule="horizon", cost="measured").method == "CABS, horizon cost measured"
    assert config().method == "CABS"


def test_configurations_of_before_are_read() -> None:
    content = config().to_json()
    sizes = ("nu", "noise_share", "horizon", "cost", "schedule", "start", "end", "over", "shape")
    for name in (*sizes, "lr_decay", "optimizer"):
        del content[name]
    assert RunConfig.from_json(content) == config()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rule": "steps"}, "needs --schedule: say from which examples on"),
        ({"rule": "steps", "schedule": "0:8 10q:9"}, "--rule steps: the start of '10q:9'"),
        ({"rule": "steps", "schedule": "5:8"}, "begin with 0:size"),
        ({"rule": "steps", "schedule": "0:4"}, "the first size, 4.0, is outside of the bounds, 6 to 64"),
        ({"rule": "ramp", "start": 8}, "needs --end"),
        ({"rule": "ramp", "start": 8, "end": 9, "shape": "round"}, "shape is 'round'"),
        ({"rule": "ramp", "start": 1, "end": 9}, "--start 1: must be at least 2"),
        ({"rule": "geometric", "start": 8}, "needs --every"),
        ({"rule": "geometric", "start": 8, "every": 100, "factor": -2.0}, "--factor -2.0"),
        ({"rule": "on-plateau", "start": 8, "factor": 1.0}, "never move"),
        (
            {"rule": "decay-to-batch", "start": 8, "decay": "fast"},
            "no decay is called 'fast'; there are cosine, linear",
        ),
        ({"noise_share": -0.1}, "--noise-share -0.1"),
        ({"cost": "free"}, "write examples, measured, or c0:c1"),
        ({"cost": "-1:1"}, "neither negative"),
        ({"rule": "horizon", "horizon": "soon"}, "write measured, or start:until:end"),
        ({"rule": "horizon", "horizon": "0.1:0.5:0.2"}, "--rule horizon: the horizon goes from 0.1 to 0.2"),
        ({"horizon": "measured"}, "--horizon goes with --rule horizon, not with --rule cabs"),
        ({"rule": "horizon", "noise_share": 0.5}, "--noise-share goes with --rule cabs, not with --rule horizon"),
        (
            {"start": 8},
            "--start goes with --rule ramp or geometric or on-plateau or decay-to-batch, not with --rule cabs",
        ),
        ({"lr_decay": "fast"}, "--lr-decay fast: there are none, cosine, linear"),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        config(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({}, 2),
        ({"cost": "measured"}, 16),
        ({"rule": "horizon", "cost": "measured"}, 16),
        ({"cost": "measured", "min_batch_size": 32}, 32),
        ({"cost": "measured", "max_batch_size": 8}, 8),
        ({"cost": "0.02:0.001"}, 2),
        ({"rule": "constant", "batch_size": 5}, 5),
    ],
)
def test_the_first_batch(given: dict[str, Any], first: int, tmp_path: Path) -> None:
    """The least size, unless the cost is to be measured: one step of two examples can undo a new network."""
    made = config(**{"min_batch_size": 2, "examples": 400, **given})
    assert made.first_batch_size == first
    with RunDirectory.create(tmp_path / "run", made) as run:
        assert Trainer(run, DATA).train()
    assert rows(tmp_path / "run")[0]["batch_size"] == first


def test_the_first_batch_of_data_that_has_fewer_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cabs.experiments.runs.config.UNTOLD", 10_000)
    made = config(cost="measured", max_batch_size=20_000, examples=400)
    with RunDirectory.create(tmp_path / "run", made) as run:
        assert Trainer(run, DATA).loader.batch_size == len(DATA.train)


def test_horizons_are_read() -> None:
    made = config(rule="horizon", horizon="1:0.7:0.0625")
    assert made.kind.rule(vars(made)) == rules.CABS(budget=1_200, horizon=rules.Horizon(1, 0.7, 1 / 16))
    assert made.method == "CABS, horizon 1:0.7:0.0625"
    assert run_name(made).startswith("digits-horizon-1_0.7_0.0625-")
    made = config(rule="horizon", horizon="measured")
    assert made.kind.rule(vars(made)) == rules.CABS(budget=1_200, horizon="measured")


def test_costs_are_read() -> None:
    made = config(cost="0.02:0.001")
    assert made.kind.rule(vars(made)) == rules.CABS(cost=(0.02, 0.001))
    made = config(rule="horizon", cost="measured")
    assert made.kind.rule(vars(made)) == rules.CABS(budget=1_200, cost="measured")


@pytest.mark.parametrize("batch_size", [16, 48])
def test_learning_rates_fall_by_examples(batch_size: int, tmp_path: Path) -> None:
    """The same at the same examples, whatever the size."""
    settings = config(rule="constant", batch_size=batch_size, lr_decay="cosine")
    with RunDirectory.create(tmp_path, settings) as run:
        Trainer(run, DATA).train()
    for row in rows(tmp_path):
        before = row["examples"] - row["batch_size"]
        assert row["lr"] == pytest.approx(0.2 * (1 + math.cos(math.pi * before / 1_200)) / 2)


def test_adam_keeps_the_root_of_the_decay(tmp_path: Path) -> None:
    settings = config(rule="decay-to-batch", start=8, decay="linear", optimizer="adamw", lr=0.001)
    with RunDirectory.create(tmp_path, settings) as run:
        Trainer(run, DATA).train()
    for row in rows(tmp_path):
        before = row["examples"] - row["batch_size"]
        assert row["lr"] == pytest.approx(0.001 * math.sqrt(1 - before / 1_200))
        assert row["batch_size"] == min(64, math.floor(8 / (1 - before / 1_200) + 0.5))


def test_a_budget_is_extended(tmp_path: Path, cabs: Command) -> None:
    """--resume --examples with more: noise comes back until the new end is near, and that is met to the example."""
    out = str(tmp_path / "run")
    code, _, said = cabs(
        "train", "--budget-aware", "--examples", "1200", "--lr", "0.2", "--threads", "1", "--out", out,
        "--log-every", "1",
    )  # fmt: skip
    assert code == 0, said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["rule"] == "horizon"
    first = rows(tmp_path / "run")
    assert first[-1]["examples"] == 1_200
    code, _, said = cabs("train", "--out", out, "--resume", "--examples", "3k")
    assert code == 0, said
    whole = rows(tmp_path / "run")
    assert whole[: len(first)] == first
    assert whole[-1]["examples"] == 3_000
    assert cabs("train", "--out", out, "--resume", "--budget-aware")[0] == 0
    code, _, said = cabs("train", "--out", out, "--resume", "--examples", "2k")
    assert code != 0
    assert "--examples 2,000: the run was started with 3,000" in said


def test_options_of_rules(tmp_path: Path, cabs: Command) -> None:
    out = str(tmp_path / "run")
    arguments = ("train", "--rule", "ramp", "--start", "8", "--end", "64", "--over", "0.5k", "--examples", "600")
    code, _, said = cabs(*arguments, "--threads", "1", "--out", out)
    assert code == 0, said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["over"] == 500
    code, _, said = cabs("train", "--rule", "norm-test", "--budget-aware", "--out", str(tmp_path / "no"))
    assert code != 0
    assert "--budget-aware is for CABS" in said
    help_text = cabs("train", "--help")[1]
    for option in ("--budget-aware", "--noise-share", "--cost", "--schedule", "--patience", "--lr-decay"):
        assert option in help_text


def test_the_noise_share_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    settings = config()
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None, legacy_windows=False)
    panel = LivePanel(console, settings)
    with panel:
        panel.step(100, 0.5, 16, 0.27)
    assert isinstance(console.file, io.StringIO)
    assert "noise share" in console.file.getvalue()
    assert "0.27" in console.file.getvalue()
    plain = Console(file=io.StringIO(), width=200)
    lines = PlainLines(plain, settings)
    with RunDirectory.create(tmp_path, settings) as run:
        Trainer(run, DATA, lines).train()
    assert isinstance(plain.file, io.StringIO)
    assert re.search(r"noise share +0\.\d\d", plain.file.getvalue())
    with Image.open(draw_run(tmp_path)) as image:
        assert image.size[1] > 1500  # a panel more


def test_a_budget_below_the_least_size_is_refused(tmp_path: Path) -> None:
    settings = config(rule="horizon", examples=5, min_batch_size=6, eval_every=5, checkpoint_every=5)
    with (
        RunDirectory.create(tmp_path, settings) as run,
        pytest.raises(UsageError, match="smaller than min_batch_size = 6"),
    ):
        Trainer(run, DATA)
