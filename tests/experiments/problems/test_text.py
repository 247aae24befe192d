"""Shakespeare: characters, windows, the network, and runs on a small text of our own."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cabs.experiments.errors import DataError
from cabs.experiments.problems import SHAKESPEARE, problem
from cabs.experiments.problems.data.text import CHARACTERS, CONTEXT, load_shakespeare
from cabs.experiments.runs import session
from cabs.experiments.runs.config import RunConfig

TEXT = "".join(f"Speaker {chr(65 + k % 26)}:\nThe quick brown fox jumps over the lazy dog.\n\n" for k in range(60))


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A directory with a text that is not the official one, which loading would remark on."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "input.txt").write_text(TEXT)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*other contents")
        yield tmp_path / "data"


def decoded(numbers: torch.Tensor) -> str:
    return "".join(CHARACTERS[number] for number in numbers.tolist())


def test_windows_and_their_targets(data: Path) -> None:
    loaded = load_shakespeare(data)
    cut = len(TEXT) * 9 // 10
    assert len(loaded.train) == cut - CONTEXT
    inputs, targets = loaded.train.dataset()[100]
    assert decoded(inputs) == TEXT[100 : 100 + CONTEXT]
    assert decoded(targets) == TEXT[101 : 101 + CONTEXT]
    seen = "".join(decoded(targets) for _, targets in (loaded.test.dataset()[k] for k in range(len(loaded.test))))
    assert seen == TEXT[cut + 1 :][: len(seen)]  # each character of the last tenth once, none of the others
    assert len(TEXT) - cut - 1 - len(seen) < CONTEXT


def test_windows_hold_the_text_but_once(data: Path) -> None:
    inputs, targets = load_shakespeare(data).train.dataset().tensors
    assert inputs.untyped_storage().data_ptr() == targets.untyped_storage().data_ptr()
    assert inputs.untyped_storage().nbytes() <= len(TEXT)


def test_the_file_or_its_directory(data: Path) -> None:
    windows = load_shakespeare(data).train.windows
    assert torch.equal(load_shakespeare(data / "input.txt").train.windows, windows)
    (data / "shakespeare").mkdir()
    (data / "input.txt").rename(data / "shakespeare" / "input.txt")
    assert torch.equal(load_shakespeare(data).train.windows, windows)


def test_another_text_is_remarked_on(data: Path) -> None:
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        load_shakespeare(data)
    assert "other contents (SHA-256) than the official ones" in str(remarks[0].message)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "too few"),
        (b"too short", "9 characters are too few for windows of 64 in their last tenth"),
        ("Ä ".encode() * 2000, r"byte 0 is b'\\xc3', which does not occur"),
        (b"a" * 5000 + b"\r\n", r"byte 5,000 is b'\\r'"),
        (b"\0" * 5000, "does not occur"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "input.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"input\.txt: .*{expected}"):
        load_shakespeare(tmp_path)


def test_a_text_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cabs data fetch shakespeare"):
        load_shakespeare(tmp_path)
    (tmp_path / "input.txt").mkdir()
    with pytest.raises(DataError, match="is not in"):
        load_shakespeare(tmp_path)


def test_the_network() -> None:
    width, layers, characters = 96, 3, 65
    block = (width * 3 * width + 3 * width) + (width * width + width) + 8 * width * width + 5 * width + 4 * width
    expected = layers * block + characters * width * 2 + CONTEXT * width + 2 * width
    network = SHAKESPEARE.network(0)
    assert sum(parameter.numel() for parameter in network.parameters()) == expected
    tokens = torch.randint(0, characters, (2, CONTEXT))
    scores = network(tokens)
    assert scores.shape == (2, CONTEXT, characters)
    assert SHAKESPEARE.loss(scores, tokens).item() == pytest.approx(math.log(characters), abs=0.1)


def test_the_network_does_not_look_ahead() -> None:
    network = SHAKESPEARE.network(0)
    tokens = torch.randint(0, 65, (1, CONTEXT))
    changed = tokens.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 65
    before, after = network(tokens), network(changed)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 40:], after[0, 40:])


def test_seeds_decide_the_weights() -> None:
    torch.manual_seed(5)
    first = SHAKESPEARE.network(1)(torch.zeros(1, 4, dtype=torch.long))
    torch.manual_seed(6)
    assert torch.equal(SHAKESPEARE.network(1)(torch.zeros(1, 4, dtype=torch.long)), first)
    assert not torch.equal(SHAKESPEARE.network(2)(torch.zeros(1, 4, dtype=torch.long)), first)


def test_the_loss_is_the_mean_over_examples_of_their_means() -> None:
    scores, targets = torch.randn(5, 7, 65), torch.randint(0, 65, (5, 7))
    whole = SHAKESPEARE.loss(scores, targets)
    each = torch.stack([SHAKESPEARE.loss(scores[k : k + 1], targets[k : k + 1]) for k in range(5)])
    assert torch.allclose(whole, each.mean())
    assert torch.allclose(SHAKESPEARE.loss(scores, targets, reduction="sum"), whole * 35)


@pytest.mark.parametrize(
    "given",
    [{"rule": "constant", "batch_size": 8}, {"rule": "cabs", "optimizer": "sgd", "lr": 0.3}, {"rule": "cabs"}],
    ids=["constant, AdamW", "CABS, SGD", "CABS, AdamW"],
)
def test_a_run(tmp_path: Path, data: Path, given: dict[str, Any]) -> None:
    schedule = {"examples": 240, "eval_every": 120, "checkpoint_every": 80, "data": str(data)}
    config = RunConfig.make(problem("shakespeare"), {**schedule, **given})
    assert config.optimizer == given.get("optimizer", "adamw")
    console = Console(record=True, width=120)
    summary = session.train(config, tmp_path / "run", console)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "train_loss" in row]
    for row in evaluations:
        assert row["test_perplexity"] == pytest.approx(math.exp(row["test_loss"]))
        assert 0 <= row["test_accuracy"] <= 1
    assert evaluations[0]["test_perplexity"] == pytest.approx(65, abs=5)
    assert evaluations[-1]["test_perplexity"] < 50
    assert summary["best_test_perplexity"] == min(row["test_perplexity"] for row in evaluations)
    assert summary["optimizer"] == config.optimizer
    assert "test perplexity" in console.export_text()
    assert (tmp_path / "run" / "picture.png").stat().st_size > 1000


def test_a_run_goes_on_where_it_was(tmp_path: Path, data: Path) -> None:
    given = {"rule": "constant", "batch_size": 8, "examples": 160, "eval_every": 80, "checkpoint_every": 40}
    whole = RunConfig.make(SHAKESPEARE, {**given, "data": str(data)})
    session.train(whole, tmp_path / "whole", Console(quiet=True))
    half = RunConfig.make(SHAKESPEARE, {**given, "examples": 80, "log_every": whole.log_every, "data": str(data)})
    session.train(half, tmp_path / "parts", Console(quiet=True))
    session.resume(tmp_path / "parts", {"examples": 160}, Console(quiet=True))
    ends = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts")]
    for name, weight in ends[0]["network"].items():
        assert torch.equal(weight, ends[1]["network"][name])
