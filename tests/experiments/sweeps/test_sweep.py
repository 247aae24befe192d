"""Sweeps: many processes, each of which may finish, diverge, crash, hang or be interrupted.

The processes are small stand-ins for training runs, so that the tests are about the sweep.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import made_up
import pytest
from rich.console import Console

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.runs.directory import RunDirectory
from cabs.experiments.runs.signals import PARENT, StopRequest
from cabs.experiments.sweeps import jobs as sweep
from cabs.experiments.sweeps.grid import Grid
from cabs.experiments.sweeps.jobs import Job, command_of, last_words, plan, run_all
from cabs.experiments.sweeps.sweep import run_sweep

GRID = Grid(problem="digits", lrs=(0.1, 0.2), sizes=(32, 64), rules=("cabs", "constant"), examples=1000)

STAND_IN = """
import json, os, pathlib, signal, sys, time
path, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(path / "started", "a") as file:
    file.write(os.environ["OMP_NUM_THREADS"] + "\\n")
attempts = len((path / "started").read_text().split())

def end(status, code):
    row = {"examples": 1000, "step": 10, "seconds": 1.0}
    rows = [{**row, "train_loss": 0.1, "test_loss": 0.1, "test_accuracy": 0.9}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (path / "summary.json").write_text(json.dumps({"status": status}))
    print("the end")
    sys.exit(code)

if behaviour == "crash once" and attempts == 1 or behaviour == "crash":
    print("a bug")
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "wait":
    signal.signal(signal.SIGINT, lambda *_: end("interrupted", 130))
    (path / "waiting").touch()
    time.sleep(60)
if behaviour == "scribble":
    (path / "summary.json").write_text("[]")
    sys.exit(0)
if behaviour == "diverge":
    end("diverged", 1)
end("finished", 0)
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Let processes behave as told, by a part of the run's name."""

    def prepare(behaviours: dict[str, str]) -> None:
        def command(job: Job) -> list[str]:
            behaviour = next((value for part, value in behaviours.items() if part in job.name), "finish")
            return [sys.executable, "-c", textwrap.dedent(STAND_IN), str(job.path), behaviour]

        monkeypatch.setattr(sweep, "command_of", command)
        monkeypatch.setattr(sweep, "_POLL", 0.01)

    return prepare


def jobs_of(out: Path) -> list[Job]:
    return plan(GRID.configs(1, None), out)


def run(jobs: list[Job], stop: Callable[[], bool] = lambda: False, slots: int = 2, retries: int = 1) -> list[str]:
    seen: list[str] = []
    run_all(jobs, slots, retries, stop, lambda job: seen.append(f"{job.name} {job.status}") if job else None)
    return seen


def starts(job: Job) -> int:
    started = job.path / "started"
    return len(started.read_text().split()) if started.exists() else 0


def test_all_runs_are_run_once(stand_in, tmp_path: Path) -> None:
    stand_in({})
    jobs = jobs_of(tmp_path)
    seen = run(jobs)
    assert len(jobs) == 6
    assert {job.status for job in jobs} == {"finished"}
    assert {starts(job) for job in jobs} == {1}
    assert len(seen) == 12


def test_no_more_processes_than_asked_for(stand_in, tmp_path: Path) -> None:
    stand_in({})
    jobs = jobs_of(tmp_path)
    most = 0

    def changed(_: Job | None) -> None:
        nonlocal most
        most = max(most, sum(job.status == "running" for job in jobs))

    run_all(jobs, 3, 0, lambda: False, changed)
    assert most == 3


def test_finished_and_diverged_runs_are_skipped(stand_in, tmp_path: Path) -> None:
    stand_in({"m32": "diverge"})
    run(jobs_of(tmp_path))
    again = jobs_of(tmp_path)
    assert all(job.skipped for job in again)
    assert sorted(job.status for job in again) == ["diverged"] * 2 + ["finished"] * 4
    assert run(again) == []
    assert {starts(job) for job in again} == {1}


def test_a_crash_is_tried_again_and_given_up(stand_in, tmp_path: Path) -> None:
    stand_in({"cabs-lr0.1": "crash once", "m64-lr0.2": "crash"})
    jobs = jobs_of(tmp_path)
    run(jobs, retries=2)
    by_name = {job.name: job for job in jobs}
    once, always = by_name["digits-cabs-lr0.1-seed0"], by_name["digits-constant-m64-lr0.2-seed0"]
    assert (once.status, starts(once)) == ("finished", 2)
    assert (always.status, starts(always)) == ("failed", 3)
    assert last_words(always) == "a bug"
    assert sum(job.status == "finished" for job in jobs) == 5


class Lost:
    """A process whose machine is gone."""

    returncode = sweep.LOST

    def poll(self) -> int:
        return self.returncode


@pytest.mark.parametrize(("losses", "status"), [(3, "finished"), (1000, "failed")])
def test_a_machine_lost_is_not_the_runs_fault(losses: int, status: str, stand_in, tmp_path: Path) -> None:
    stand_in({})
    job, *_ = jobs_of(tmp_path)
    begun = 0

    def start(job: Job) -> sweep.Process:
        nonlocal begun
        begun += 1
        process = sweep.start_here(job)
        if begun <= losses:
            process.wait()
            (job.path / "summary.json").unlink()
            return Lost()
        return process

    run_all([job], 1, 0, lambda: False, lambda _: None, start)
    assert (job.status, job.crashes) == (status, 0)
    assert begun == min(losses, sweep._LOSSES) + 1


def test_stopping_asks_the_runs_and_waits_for_them(stand_in, tmp_path: Path) -> None:
    stand_in({"lr0.1": "wait"})
    jobs = jobs_of(tmp_path)
    run(jobs, stop=lambda: len(list(tmp_path.glob("*/waiting"))) == 2)
    assert sorted(job.status for job in jobs) == ["interrupted"] * 2 + ["waiting"] * 4
    assert all(job.process is None for job in jobs)
    stand_in({})
    again = jobs_of(tmp_path)
    run(again)
    assert {job.status for job in again} == {"finished"}


def test_a_run_that_will_not_stop_is_ended(stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in({"lr0.1": "wait"})
    monkeypatch.setattr(sweep, "_PATIENCE", 0.2)
    monkeypatch.setattr(sweep.signal, "SIGINT", signal.SIGCONT)  # a signal that the stand-in does not hear
    jobs = jobs_of(tmp_path)
    processes = []

    def stop() -> bool:
        processes[:] = [job.process.pid for job in jobs if job.process is not None]
        return len(list(tmp_path.glob("*/waiting"))) == 2

    run(jobs, stop=stop)
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_exception_leaves_no_process_behind(stand_in, tmp_path: Path) -> None:
    stand_in({"": "wait"})
    jobs = jobs_of(tmp_path)

    def changed(job: Job | None) -> None:
        if job is None and list(tmp_path.glob("*/waiting")):
            raise RuntimeError("a bug in the display")

    with pytest.raises(RuntimeError):
        run_all(jobs, 2, 0, lambda: False, changed)
    assert all(job.process is None or job.process.poll() is not None for job in jobs)


def test_a_directory_with_another_run_is_refused(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path)
    other = Grid(problem="digits", lrs=(0.1,), rules=("cabs",), examples=5000).configs(1, None)[0]
    RunDirectory.create(jobs[0].path, other).close()
    with pytest.raises(UsageError, match="holds a run with examples = 5000, not 1000"):
        jobs_of(tmp_path)


def test_other_threads_are_the_same_run(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path)
    made_up.write_run(jobs[0].path, jobs[0].config)
    assert plan(GRID.configs(7, "/elsewhere"), tmp_path)[0].status == "finished"


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    path = jobs_of(tmp_path)[0].path
    path.mkdir()
    (path / "precious").write_text("mine")
    with pytest.raises(UsageError, match="is not a run of cabs"):
        jobs_of(tmp_path)


def test_the_command_goes_on_with_the_prepared_run(tmp_path: Path) -> None:
    job = plan(GRID.configs(1, "/data"), tmp_path)[0]
    assert command_of(job)[1:] == [
        *("-m", "cabs", "train", "digits"),
        *("--resume", "--data", "/data", "--out", str(job.path)),
    ]


def test_a_sweep_records_what_came_of_it(stand_in, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in({"m32": "diverge"})
    run_sweep(GRID, tmp_path / "out", Console(width=100), slots=2, retries=0, data=None, dry_run=False)
    content = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert content["grid"]["lrs"] == [0.1, 0.2]
    assert sorted(content["runs"].values()) == ["diverged"] * 2 + ["finished"] * 4
    assert set(content["best"]) == {"CABS", "Constant 64"}
    assert content["best"]["CABS"]["test_accuracy"] == 0.9
    shown = capsys.readouterr().out
    assert "6 runs; 2 at a time" in shown
    assert "[6/6]" in shown
    assert "diverged" in shown
    assert f"cabs report {tmp_path / 'out'}" in shown


def test_failed_runs_make_the_sweep_fail_after_all_others_ran(stand_in, tmp_path: Path) -> None:
    stand_in({"m64-lr0.1": "crash"})
    with pytest.raises(CommandError, match="1 of 6 runs failed"):
        run_sweep(GRID, tmp_path, Console(quiet=True), slots=2, retries=1, data=None, dry_run=False)
    assert sorted(json.loads((tmp_path / "sweep.json").read_text())["runs"].values()) == ["failed"] + ["finished"] * 5


def test_ctrl_c_reaches_every_run(stand_in, tmp_path: Path) -> None:
    stand_in({"": "wait"})

    def press() -> None:
        while len(list(tmp_path.glob("*/waiting"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(CommandError, match="same command again") as caught:
        run_sweep(GRID, tmp_path, Console(quiet=True), slots=2, retries=0, data=None, dry_run=False)
    thread.join()
    assert caught.value.exit_code == 130
    runs = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert sorted(runs.values()) == ["interrupted"] * 2 + ["waiting"] * 4


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_sweep(GRID, tmp_path / "out", Console(), slots=2, retries=0, data=None, dry_run=True)
    assert len(capsys.readouterr().out.split("waiting")) == 7
    assert not (tmp_path / "out").exists()


def test_runs_stop_when_their_sweep_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, str(os.getppid()))
    assert not StopRequest()()
    monkeypatch.setenv(PARENT, "1234567")
    request = StopRequest()
    assert request()
    assert request.signal_number == signal.SIGTERM
