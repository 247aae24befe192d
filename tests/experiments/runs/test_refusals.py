"""What a run cannot be made of: said in words, before anything is written, removed or changed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from rich.console import Console
from short_runs import Command, content, trained

from cabs.experiments.errors import CommandError
from cabs.experiments.problems import DIGITS, MNIST
from cabs.experiments.runs import session
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.naming import file_name, run_name
from cabs.experiments.runs.training import Trainer

OPTIONS = ("--rule", "constant", "--batch-size", "32", "--examples", "640")


@pytest.mark.parametrize(
    "device",
    [
        "cuda:77",
        "tpu",
        "vulkan",
        "nonsense",
        "",
        "cpu:x",
        "meta",
        "-1",
        "cuda" if not torch.cuda.is_available() else "cuda:99",
    ],
)
def test_devices_that_are_not_there(cabs: Command, tmp_path: Path, device: str) -> None:
    code, _, words = cabs("train", "--out", str(tmp_path / "run"), *OPTIONS, "--device", device)
    assert code == 2
    assert words.startswith(f"cabs: --device {device}: cannot be used here (")
    assert words.endswith("the default is cpu\n")
    assert len(words) < 350
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", ["0", "-4", "1025", "100000", "99999999999999999999"])
def test_threads_that_no_machine_has(cabs: Command, tmp_path: Path, threads: str) -> None:
    code, _, words = cabs("train", "--out", str(tmp_path / "run"), *OPTIONS, "--threads", threads)
    assert code == 2
    assert f"--threads {threads}: must be at" in words
    assert list(tmp_path.iterdir()) == []


def test_the_most_threads_are_not_too_many(tmp_path: Path) -> None:
    """In a process of its own: what it guards against is a crash. One step starts them all; none spins while idle."""
    options = ["--rule", "constant", "--batch-size", "32", "--examples", "32", "--threads", "1024"]
    command = [sys.executable, "-m", "cabs", "train", "--out", "run", *options]
    idle = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=tmp_path, env=idle, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["environment"]["threads"] == 1024


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 300, "File name too long; choose a shorter name"),
        ("file/below", "a part of the path is a file: choose another"),
        ("loop/below", "it is a link: remove that"),
    ],
    ids=["long", "below a file", "a loop of links"],
)
@pytest.mark.parametrize("how", [[], ["--force"], ["--resume"]], ids=["new", "force", "resume"])
def test_directories_that_cannot_be(cabs: Command, tmp_path: Path, name: str, reason: str, how: list[str]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    code, _, words = cabs("train", "--out", str(tmp_path / name), *how, *([] if how == ["--resume"] else OPTIONS))
    assert code in (1, 2)
    assert reason in words or (how == ["--resume"] and "holds no run to resume" in words)
    assert "Traceback" not in words
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "loop"]


@pytest.mark.parametrize("command", ["report", "sweep"])
def test_other_commands_say_so_too(cabs: Command, tmp_path: Path, command: str) -> None:
    made_up.write_run(tmp_path / "runs" / "run", RunConfig.make(DIGITS, {"examples": 1000}))
    target = {"report": str(tmp_path / "runs"), "sweep": "digits"}[command]
    code, _, words = cabs(command, target, "--out", str(tmp_path / ("x" * 300)))
    assert code == 1
    assert "cannot be written: File name too long; choose a shorter name" in words
    assert [item.name for item in tmp_path.iterdir()] == ["runs"]


def test_names_of_runs_fit_a_file_system() -> None:
    long = [f"imagefolder:/{'/'.join([letter * 50] * 12)}" for letter in "abä"]
    names = [file_name(name) for name in long]
    assert all(len(name.encode()) <= 100 for name in names)
    assert len(set(names)) == 3
    config = RunConfig.make(DIGITS, {})
    assert run_name(config) == "digits-cabs-lr0.1-seed0"
    assert file_name("imagefolder:/a/b c") == "imagefolder_a_b_c"


def out_of_memory(*_: object) -> None:
    torch.empty(2**55)


def out_of_python_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("fail", [out_of_memory, out_of_python_memory])
@pytest.mark.parametrize("where", ["__init__", "make_step"])
def test_out_of_memory_leaves_nothing_behind(
    cabs: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[..., None], where: str
) -> None:
    monkeypatch.setattr(Trainer, where, fail)
    code, _, words = cabs("train", "--out", str(tmp_path / "run"), *OPTIONS)
    assert code == 1
    assert "there is not enough memory on cpu for the run; lower --batch-size, which is 32" in words
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    assert cabs("train", "--out", str(tmp_path / "mine"), *OPTIONS)[0] == 1
    assert content(tmp_path / "mine") == {}
    assert (tmp_path / "mine").is_dir()


def test_out_of_memory_late_leaves_what_can_be_gone_on_with(
    cabs: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.make_step

    def limited(trainer: Trainer, batches: Any) -> None:
        step(trainer, batches)
        if trainer.examples > 500:
            out_of_memory()

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "make_step", limited)
        code, _, words = cabs("train", "--out", str(tmp_path / "run"), *OPTIONS)
    assert code == 1
    assert "not enough memory" in words
    code, out, _ = cabs("train", "--out", str(tmp_path / "run"), "--resume")
    assert code == 0
    assert "resumes from" in out


def test_resuming_before_the_first_checkpoint_is_announced(cabs: Command, tmp_path: Path) -> None:
    path = trained(tmp_path / "run")
    for name in ("checkpoint.pt", "checkpoint-previous.pt", "summary.json"):
        (path / name).unlink()
    rows = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(b"".join(rows[:3]))
    code, out, _ = cabs("train", "--out", str(path), "--resume")
    assert code == 0
    assert "stopped before its first checkpoint: it starts over" in out


def test_a_run_whose_metrics_are_gone_is_left_as_it_is(cabs: Command, tmp_path: Path) -> None:
    path = trained(tmp_path / "run")
    (path / "metrics.jsonl").unlink()
    before = content(path)
    code, _, words = cabs("train", "--out", str(path), "--resume", "--examples", "2000")
    assert code == 1
    assert "metrics.jsonl is gone; put it back, or start the run again with --force" in words
    assert content(path) == before


@pytest.mark.parametrize("summary", [True, False])
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(cabs: Command, tmp_path: Path, summary: bool) -> None:
    path = trained(tmp_path / "run")
    (path / "checkpoint.pt").unlink()
    (path / "checkpoint-previous.pt").unlink()
    if not summary:
        (path / "summary.json").unlink()
    before = content(path)
    code, _, words = cabs("train", "--out", str(path), "--resume", "--examples", "2000")
    assert code == 1
    assert "got to 640 examples, and its checkpoints are gone; put checkpoint.pt back" in words
    assert content(path) == before


def test_a_problem_that_is_not_the_runs_is_refused(cabs: Command, tmp_path: Path) -> None:
    path = trained(tmp_path / "run")
    before = content(path)
    code, _, words = cabs("train", "mnist", "--out", str(path), "--resume")
    assert (code, words) == (
        2,
        "cabs: mnist: the run is of digits; resume it without naming a problem, or choose another --out\n",
    )
    assert cabs("train", "imagenet", "--out", str(path), "--resume")[0] == 2
    assert content(path) == before
    assert cabs("train", "digits", "--out", str(path), "--resume")[0] == 0


def test_an_optimizer_that_the_rule_cannot_go_with_is_refused_in_words(
    cabs: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("this optimizer makes another step")

    monkeypatch.setattr("cabs.experiments.runs.training.BatchSizeScheduler", refuse)
    code, _, words = cabs("train", "--optimizer", "adamw", "--out", str(tmp_path / "run"))
    assert (code, words) == (2, "cabs: --rule cabs with --optimizer adamw: this optimizer makes another step\n")
    assert list(tmp_path.iterdir()) == []


def test_what_the_system_says_of_a_file_is_no_traceback(
    cabs: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", "some/file")

    monkeypatch.setattr("cabs.experiments.runs.session.train", refuse)
    assert cabs("train", "--out", str(tmp_path / "run"))[::2] == (
        1,
        "cabs: some/file: Input/output error; fix it, then try again\n",
    )


def test_resume_in_words_when_the_data_is_gone(cabs: Command, tmp_path: Path) -> None:
    path = made_up.write_run(tmp_path / "run", RunConfig.make(MNIST, {"examples": 1000}))
    before = content(path)
    code, _, words = cabs("train", "--out", str(path), "--resume", "--data", str(tmp_path))
    assert code == 1
    assert "cabs data fetch mnist" in words
    assert content(path) == before


def test_nothing_of_it_is_a_warning(cabs: Command, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cabs("train", "--out", str(tmp_path / "run"), *OPTIONS)[0] == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["optimizer"] == "sgd"


def test_an_error_of_the_program_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are for what a person can see to; a bug keeps its traceback."""

    def bug(*_: object) -> None:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(Trainer, "make_step", bug)
    with pytest.raises(RuntimeError, match="size mismatch"):
        trained(tmp_path / "run")
    with pytest.raises(CommandError):
        session.resume(tmp_path / "nowhere", {}, Console(file=io.StringIO()))
