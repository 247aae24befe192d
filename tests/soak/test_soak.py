"""A few kills of what `soak.py` does by the hundred, and that it would notice a run that ends otherwise."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import soak

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds its processes in /proc, which this system does not have"
)


def test_killed_runs_and_sweeps_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    result = soak.soak(3, 1, 10, tmp_path, kills_a_run=2, planned=soak.works(1_500, sweep_rules="norm-test"))
    assert result["wrong"] == []
    assert (result["of_training"], result["of_sweeps"]) == (2, 1)
    assert result["runs_compared"] >= 2


def test_differences_are_noticed(tmp_path: Path) -> None:
    work = soak.works(1_000)["train"][0]
    whole, run = tmp_path / "whole", tmp_path / "run"
    whole.mkdir()
    row = {"examples": 5, "seconds": 1.25, "loss": 0.5}
    (whole / "metrics.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    (whole / "summary.json").write_text('{"status": "finished"}')
    torch.save({"network": {"weight": torch.ones(3)}}, whole / "checkpoint.pt")
    shutil.copytree(whole, run)
    (run / "metrics.jsonl").write_text(json.dumps({**row, "seconds": 2.5}, separators=(",", ":")) + "\n")
    assert soak.compare(work, run, whole) == []

    (run / "metrics.jsonl").write_text(json.dumps({**row, "loss": 0.25}, separators=(",", ":")) + "\n")
    (run / "summary.json").write_text('{"status": "interrupted"}')
    torch.save({"network": {"weight": torch.tensor([1.0, 1.0, 1.0 + 1e-6])}}, run / "checkpoint.pt")
    assert [line.partition(": ")[2].split(" ")[:2] for line in soak.compare(work, run, whole)] == [
        ["not", "finished"],
        ["other", "metrics"],
        ["other", "weights"],
    ]


def test_processes_are_found_by_their_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = soak.Lane(soak.random.Random(0), tmp_path, 0.0)
    work = soak.works(1_000)["train"][0]
    monkeypatch.setattr(soak.Work, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    process = lane.start(work, tmp_path / "run")
    assert list(soak.marked(lane.mark)) == [process.pid]
    lane.kill_all()
    assert process.wait(120) == -signal.SIGKILL
    assert list(soak.marked(lane.mark)) == []
