"""Runs read back: whole, or named with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_up
import pytest

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.problems import DIGITS, SHAKESPEARE
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.metrics import latest, parse_row
from cabs.experiments.runs.reader import find_runs, read_run, read_status

CONFIG = RunConfig.make(DIGITS, {"examples": 1000})
EVALUATION = '{"examples": 1000, "step": 1, "seconds": 1.0, "train_loss": 0.1, "test_loss": 0.1, "test_accuracy": 0.9}'

NOT_ROWS = {
    "not UTF-8": b'{"examples": 1000, "name": "\xff\xfe"}',
    "NaN": EVALUATION.replace("0.9", "NaN").encode(),
    "infinite": EVALUATION.replace("0.9", "1e999").encode(),
    "minus infinite": EVALUATION.replace("0.9", "-Infinity").encode(),
    "a huge integer": EVALUATION.replace("0.9", "9" * 400).encode(),
    "an integer of too many digits": EVALUATION.replace("0.9", "9" * 5000).encode(),
    "text for a number": EVALUATION.replace("0.9", '"high"').encode(),
    "a list for a number": EVALUATION.replace("0.9", "[0.9]").encode(),
    "truth for a number": EVALUATION.replace("0.9", "true").encode(),
    "nothing for a number": EVALUATION.replace("0.9", "null").encode(),
    "half an example": EVALUATION.replace("1000", "999.5").encode(),
    "examples below zero": EVALUATION.replace("1000", "-1").encode(),
    "nested absurdly": b'{"examples": 1, "x": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    "a list": b"[1, 2]",
    "no examples": b'{"step": 1}',
    "nonsense": b"nonsense",
    "nothing": b"",
}


@pytest.mark.parametrize("line", NOT_ROWS.values(), ids=NOT_ROWS)
def test_what_is_no_row_is_refused_by_line(tmp_path: Path, line: bytes) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    good = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(line + b"\n" + good)
    with pytest.raises(CommandError, match=r"metrics\.jsonl, line 1: not a row of metrics: "):
        read_run(path)
    with pytest.raises(ValueError):
        parse_row(line)
    (path / "metrics.jsonl").write_bytes(good + line + b"\n")
    assert latest(path)["test_accuracy"] > 0.9  # what displays show is not troubled by it


def test_rows_that_go_back_are_refused(tmp_path: Path) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join([*lines, lines[4]]))
    with pytest.raises(CommandError, match="fewer examples than in the row before"):
        read_run(path)


@pytest.mark.parametrize("name", ["step", "seconds", "test_loss", "test_accuracy"])
def test_rows_that_lack_something_are_refused(tmp_path: Path, name: str) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[-1].pop(name)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(CommandError, match=f"the row at 1,000 examples lacks {name}"):
        read_run(path)


def test_a_text_has_perplexities(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="lacks test_perplexity"):
        read_run(made_up.write_run(tmp_path / "run", RunConfig.make(SHAKESPEARE, {"examples": 1000}), perplexity=False))


@pytest.mark.parametrize("kept", [0, 1, 20, 40, 81])
@pytest.mark.parametrize("told", [True, False], ids=["the summary tells how many", "it does not"])
def test_a_finished_run_that_was_cut_off_is_not_taken_for_whole(tmp_path: Path, kept: int, told: bool) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    if told:
        (path / "summary.json").write_text(json.dumps({"status": "finished", "examples": 1000}))
    assert read_run(path).finished
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:kept]))
    with pytest.raises(CommandError, match=r"metrics\.jsonl: .*but the run is finished; rows were lost"):
        read_run(path)


def test_a_finished_run_without_its_metrics_is_found_and_damaged(tmp_path: Path) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    (path / "metrics.jsonl").unlink()
    found = find_runs([tmp_path])
    assert found.runs == []
    assert "rows were lost" in found.damaged[path]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"status": 3}', b'{"status": "done"}', b"\xff", b'{"status": NaN}', b"[" * 100_000],
)
def test_summaries_that_are_none(tmp_path: Path, content: bytes) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    (path / "summary.json").write_bytes(content)
    with pytest.raises(CommandError, match=r"summary\.json: not the summary of a run"):
        read_status(path)


@pytest.mark.parametrize(
    "change",
    [
        {"problem": 5},
        {"problem": None},
        {"lr": "fast"},
        {"lr": 10**400},
        {"lr": True},
        {"examples": 1.5},
        {"examples": 10**30},
        {"rule": ["cabs"]},
        {"rule": "unheard-of"},
        {"optimizer": "unheard-of"},
        {"optimizer": 3},
        {"theta": {}},
        {"format": 99},
        {"seed": [[[[]]]]},
    ],
    ids=str,
)
def test_configurations_that_are_none(tmp_path: Path, change: dict[str, Any]) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    (path / "config.json").write_text(json.dumps({**CONFIG.to_json(), **change}))
    found = find_runs([tmp_path])
    assert found.runs == []
    assert "config.json: " in found.damaged[path]


def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    made_up.write_run(tmp_path / "a", CONFIG)
    (made_up.write_run(tmp_path / "b", CONFIG) / "config.json").write_bytes(b"\xff")
    made_up.write_run(tmp_path / "c", CONFIG)
    found = find_runs([tmp_path])
    assert [run.path.name for run in found.runs] == ["a", "c"]
    assert [path.name for path in found.damaged] == ["b"]


def test_runs_from_before_there_was_a_choice_of_optimizers(tmp_path: Path) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    content = CONFIG.to_json()
    del content["optimizer"]
    (path / "config.json").write_text(json.dumps(content))
    assert read_run(path).config == CONFIG


def test_directories_without_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="no run in it or below it"):
        find_runs([tmp_path])
