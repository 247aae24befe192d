"""Run directories: who may write where, and what is left after an accident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.problems import DIGITS
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.directory import RunDirectory, read_config, resumable
from cabs.experiments.runs.metrics import read_metrics

CONFIG = RunConfig.make(DIGITS, {"examples": 1000})


def finished_run(path: Path) -> None:
    with RunDirectory.create(path, CONFIG) as run:
        run.write_row({"examples": 0})
        run.save_checkpoint({"examples": 0})
        run.write_row({"examples": 5})
        run.write_summary({"status": "finished"})
    (path / "picture.png").write_bytes(b"picture")


def test_a_new_run_gets_its_directory(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a" / "b", CONFIG):
        assert read_config(tmp_path / "a" / "b") == CONFIG


def test_a_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UsageError, match="--resume, or replace it with --force"):
        RunDirectory.create(tmp_path / "run", CONFIG)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_force_removes_what_runs_write_and_nothing_else(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    for name in ("checkpoint.pt.part", "checkpoint-previous.pt", "checkpoint-set-aside.pt", "train.log"):
        (tmp_path / "run" / name).write_text("of the run")
    with RunDirectory.create(tmp_path / "run", CONFIG, force=True):
        pass
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "metrics.jsonl", "notes.txt"]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_is_no_run_is_never_touched(tmp_path: Path, force: bool) -> None:
    (tmp_path / "metrics.jsonl").write_text("someone else's")
    with pytest.raises(UsageError, match="neither empty nor a run"):
        RunDirectory.create(tmp_path, CONFIG, force=force)
    (tmp_path / "config.json").write_text('{"name": "another program"}')
    with pytest.raises(CommandError):
        RunDirectory.create(tmp_path, CONFIG, force=force)
    assert (tmp_path / "metrics.jsonl").read_text() == "someone else's"
    assert (tmp_path / "config.json").read_text() == '{"name": "another program"}'


def test_out_may_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.create(tmp_path / "file", CONFIG)


def test_two_processes_do_not_write_the_same_run(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.write_row({"examples": 0})
        for attempt in (
            lambda: RunDirectory.create(tmp_path, CONFIG, force=True),
            lambda: RunDirectory.resume(tmp_path, CONFIG),
        ):
            with pytest.raises(CommandError, match="in use by another process"):
                attempt()
    assert [row["examples"] for row in read_metrics(tmp_path)] == [0]


def test_resuming_cuts_off_what_the_checkpoint_does_not_cover(tmp_path: Path) -> None:
    finished_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"examples": 7, "los')
    run, checkpoint = RunDirectory.resume(tmp_path, resumable(tmp_path, {}))
    with run:
        assert checkpoint is not None
        assert [row["examples"] for row in read_metrics(tmp_path)] == [0]
        assert not (tmp_path / "summary.json").exists()
        run.write_row({"examples": 6})
        run.save_checkpoint({"examples": 0})
    assert [row["examples"] for row in read_metrics(tmp_path)] == [0, 6]
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["metrics_bytes"] == (tmp_path / "metrics.jsonl").stat().st_size


def test_resuming_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.write_row({"examples": 0})
    run, checkpoint = RunDirectory.resume(tmp_path, CONFIG)
    with run:
        assert checkpoint is None
    assert list(read_metrics(tmp_path)) == []


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to resume"):
        resumable(tmp_path / "nowhere", {})


def test_lost_rows_are_noticed(tmp_path: Path) -> None:
    finished_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(CommandError, match="rows were lost"):
        RunDirectory.resume(tmp_path, CONFIG)


def test_changed_rows_are_noticed(tmp_path: Path) -> None:
    finished_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"examples": 0, "a longer row": 1}\n')
    with pytest.raises(CommandError, match=r"metrics\.jsonl was changed: .* amid a row"):
        RunDirectory.resume(tmp_path, CONFIG)


def test_what_a_run_killed_at_its_start_leaves_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json.part").write_bytes(b"{")
    with RunDirectory.create(tmp_path, CONFIG):
        assert read_config(tmp_path) == CONFIG
    assert not (tmp_path / "config.json.part").exists()


def test_metrics_that_are_not_rows_are_named_by_line(tmp_path: Path) -> None:
    finished_run(tmp_path)
    for wrong in ("nonsense", "[1]", '{"step": 3}'):
        (tmp_path / "metrics.jsonl").write_text('{"examples": 0}\n' + wrong + "\n")
        with pytest.raises(CommandError, match=r"metrics\.jsonl, line 2"):
            list(read_metrics(tmp_path))


def test_config_is_plain_json(tmp_path: Path) -> None:
    finished_run(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["problem"] == "digits"
    assert content["format"] == 1
