"""Sweeps that come upon damaged runs: each is named and left alone, and the others are run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import made_up
import pytest
from rich.console import Console
from test_sweep import GRID, jobs_of, run, stand_in  # noqa: F401  (a fixture)

from cabs.experiments.errors import CommandError
from cabs.experiments.sweeps.progress import SweepDisplay
from cabs.experiments.sweeps.sweep import run_sweep

DAMAGES: dict[str, Callable[[Path], object]] = {
    "no configuration": lambda path: (path / "config.json").write_text("{}"),
    "a summary that is none": lambda path: (path / "summary.json").write_text('{"status": "perhaps"}'),
    "rows cut off": lambda path: (path / "metrics.jsonl").write_text(""),
    "a row of bytes": lambda path: (path / "metrics.jsonl").write_bytes(b"\xff\n"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run_does_not_stop_the_sweep(
    stand_in,  # noqa: F811
    tmp_path: Path,
    damage: Callable[[Path], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in({})
    job = jobs_of(tmp_path)[1]
    damage(made_up.write_run(job.path, job.config))
    before = {path: path.read_bytes() for path in job.path.iterdir()}
    with pytest.raises(CommandError, match=f"(?s)1 of 6 runs damaged:.*{job.name}"):
        run_sweep(GRID, tmp_path, Console(width=100), slots=2, retries=0, data=None, dry_run=False)
    assert f"left alone: {job.path}" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in job.path.iterdir()} == before
    runs = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert runs.pop(job.name) == "damaged"
    assert set(runs.values()) == {"finished"}


def test_a_run_that_is_damaged_while_it_runs(stand_in, tmp_path: Path) -> None:  # noqa: F811
    stand_in({"m64": "scribble"})
    jobs = jobs_of(tmp_path)
    run(jobs)
    assert sorted(job.status for job in jobs) == ["damaged"] * 2 + ["finished"] * 4


def test_a_run_that_cannot_be_started_is_named(stand_in, tmp_path: Path) -> None:  # noqa: F811
    stand_in({})
    (tmp_path / "precious").write_text("mine")
    first = jobs_of(tmp_path)[0]
    made_up.write_run(first.path, first.config, status="unfinished")
    (first.path / "train.log").symlink_to(tmp_path / "precious")
    jobs = jobs_of(tmp_path)
    run(jobs)
    assert [job.status for job in jobs] == ["failed"] + ["finished"] * 5
    assert "train.log cannot be written" in jobs[0].trouble
    assert (tmp_path / "precious").read_text() == "mine"


def test_rows_of_rubbish_do_not_trouble_the_display(tmp_path: Path) -> None:
    job = jobs_of(tmp_path)[0]
    path = made_up.write_run(job.path, job.config, status="unfinished")
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\n{"examples": "many", "test_accuracy": []}\n' + b"[" * 2000 + b"\n")
    console = Console(width=100, record=True, quiet=False)
    job.status = "running"
    with SweepDisplay(console, [job], "1 at a time") as display:
        console.print(display.render())
    assert "digits-cabs-lr0.1-seed0" in console.export_text()
