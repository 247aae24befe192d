"""What is kept of the runs that the results tell of."""

from __future__ import annotations

from pathlib import Path

import made_up
import pytest

import evidence
from cabs.experiments.problems import CIFAR10
from cabs.experiments.reports.comparison import compare
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.reader import read_run
from cabs.experiments.sweeps.grid import Grid, read_grid


def run(path: Path, seed: int, status: str = "finished") -> Path:
    config = RunConfig.make(CIFAR10, {"examples": 10_000, "threads": 1, "seed": seed})
    return made_up.write_run(path, config, status=status)


def test_a_kept_run_says_the_same_with_fewer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "STEP_ROWS", 10)
    whole = read_run(run(tmp_path / "run", 0))
    evidence.keep(tmp_path / "run", tmp_path / "kept")
    kept = read_run(tmp_path / "kept")
    assert len(kept.evaluations) == len(whole.evaluations)
    assert 10 <= len(kept.steps) <= 12 < len(whole.steps)
    assert kept.steps[-1]["examples"] == whole.steps[-1]["examples"]
    assert kept.final_loss == pytest.approx(whole.final_loss, rel=1e-5)
    [before], [after] = compare([whole]), compare([kept])
    assert after.rows[0].lr == before.rows[0].lr
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"config.json", "summary.json", "metrics.jsonl"}


def test_only_settled_runs_are_kept_and_kept_ones_count_as_made(tmp_path: Path) -> None:
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    run(runs / "a", 0)
    run(runs / "b", 1, "diverged")
    run(runs / "c", 2, "interrupted")
    assert [path.name for path in evidence.settled(runs)] == ["a", "b"]
    for path in evidence.settled(runs):
        evidence.keep(path, kept / path.name)
    again = tmp_path / "again"
    evidence.bring_back(kept, again)
    assert sorted(path.name for path in again.iterdir()) == ["a", "b"]
    assert read_run(again / "a").finished


@pytest.mark.parametrize("path", sorted((evidence.RESULTS / "grids").glob("*.yaml")), ids=lambda path: path.stem)
def test_grids_can_be_run_and_runs_that_are_kept_are_theirs(path: Path) -> None:
    grid = Grid.make(None, read_grid(path), {})
    theirs = {(c.sizes, c.optimizer, c.lr, c.seed, c.examples) for c in grid.configs(1, None)}
    kept = [read_run(run).config for run in evidence.settled(evidence.RESULTS / path.stem)]
    assert {(c.sizes, c.optimizer, c.lr, c.seed, c.examples) for c in kept} <= theirs
    assert all(config.data is None for config in kept)
