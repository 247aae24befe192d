"""What people see of runs and sweeps."""

from __future__ import annotations

import io
from pathlib import Path

import made_up
import pytest
from rich.console import Console

from cabs.experiments.problems import DIGITS
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.display import Evaluation, LivePanel, PlainLines, Rate, display_for, sparkline
from cabs.experiments.runs.metrics import latest
from cabs.experiments.sweeps.jobs import Job
from cabs.experiments.sweeps.progress import SweepDisplay
from cabs.experiments.wording import duration

CONFIG = RunConfig.make(DIGITS, {"examples": 10_000})
EVALUATION = Evaluation(train_loss=0.123456, test_loss=0.2, score=0.98765)


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 5, ""),
        ([3.0], 5, "▁"),
        ([1, 2, 3, 4, 5, 6, 7, 8], 8, "▁▂▃▄▅▆▇█"),
        ([1, 1, 8, 8], 2, "▁█"),
        ([5, 5, 5], 3, "▁▁▁"),
    ],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_sparkline_is_never_wider_than_asked() -> None:
    for count in range(1, 60):
        assert len(sparkline([float(k) for k in range(count)], 10)) == min(10, count)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.2, "0 s"), (59.4, "59 s"), (59.7, "1:00"), (247, "4:07"), (3729, "1:02:09")]
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_rate_forgets_what_is_long_ago() -> None:
    rate = Rate(window=10)
    assert rate.per_second() == 0
    rate.mark(0, 0.0)
    assert rate.per_second() == 0
    rate.mark(100, 1.0)
    assert rate.per_second() == 100
    rate.mark(100, 50.0)
    rate.mark(600, 55.0)
    assert rate.per_second() == pytest.approx(100)


def test_plain_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    display = display_for(console, CONFIG)
    assert isinstance(display, PlainLines)
    with display:
        display.evaluation(0, EVALUATION)
        display.step(64, 0.5, 64)
        display.evaluation(100, EVALUATION)  # too soon for another line
        display.evaluation(5_000, EVALUATION)
        display.evaluation(10_000, EVALUATION)
    lines = text_of(console).splitlines()
    assert lines[0] == "digits · CABS · α = 0.1 · seed 0"
    assert len(lines) == 4
    assert "5,000 / 10,000   train loss 0.1235   test accuracy 98.77%   batch size    64" in lines[2]
    assert "examples/s" in lines[2]
    assert "\x1b" not in text_of(console)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display_for(terminal(), CONFIG), PlainLines)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_live_panel(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = terminal(width)
    display = display_for(console, CONFIG)
    assert isinstance(display, LivePanel)
    with display:
        for step in range(1, 101):
            display.step(step * 50, 0.5, 50 + step)
        display.evaluation(5_000, EVALUATION)
    shown = text_of(console)
    for part in ("5,000 / 10,000", "150", "█", "98.77%", "left"):
        assert part in shown
    assert max(len(line) for line in shown.splitlines()) < width + 30  # control sequences take some


def test_names_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setenv("TERM", "xterm")
    console = terminal()
    with display_for(console, replace(CONFIG, problem="imagefolder:[red]x[/red]")):
        pass
    assert "[red]x[/red]" in text_of(console)


def test_latest_values_of_a_run(tmp_path: Path) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    values = latest(path)
    assert values["examples"] == 10_000
    assert {"loss", "test_accuracy", "batch_size"} <= values.keys()
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"examples": 99')
    assert latest(path) == values
    assert latest(tmp_path / "nowhere") == {}


def test_sweep_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    statuses = ("finished", "running", "waiting", "failed")
    jobs = [Job(CONFIG, made_up.write_run(tmp_path / status, CONFIG), status) for status in statuses]
    console = terminal()
    with SweepDisplay(console, jobs, "2 at a time") as display:
        for job in jobs:
            display.changed(job)
    shown = text_of(console)
    for part in ("4 runs; 2 at a time", "finished", "running", "1 waiting", "10,000", "batch size"):
        assert part in shown


def test_sweep_lines(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    job = Job(CONFIG, made_up.write_run(tmp_path / "run", CONFIG), "finished", skipped=True)
    with SweepDisplay(console, [job], "1 at a time") as display:
        display.changed(job)
        job.status = "failed"
        (job.path / "train.log").write_text("words\nlast words\n")
        display.changed(job)
    lines = text_of(console).splitlines()
    assert lines[0] == "1 run, 1 of them done before; 1 at a time"
    assert lines[1].startswith("[1/1] run: finished, test accuracy 9")
    assert lines[2] == "[1/1] run: failed: last words"
