"""Checkpoints: whole or not there, two of them, and none believed that is not what was written."""

from __future__ import annotations

import os
import random
import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cabs.experiments.errors import UsageError
from cabs.experiments.problems import DIGITS
from cabs.experiments.runs import checkpoints, session
from cabs.experiments.runs.checkpoints import CheckpointError, Checkpoints, sealed, unsealed
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.directory import RunDirectory

CONFIG = RunConfig.make(DIGITS, {"examples": 1000, "threads": 1})
QUIET = Console(quiet=True)
NAMES = ("checkpoint.pt", "checkpoint-previous.pt", "checkpoint-set-aside.pt", "checkpoint.pt.part")


def state(examples: int = 0) -> dict[str, Any]:
    return {"examples": examples, "network": {"weight": torch.arange(6.0)}, "metrics_bytes": 0}


def saved(path: Path, *counts: int) -> Checkpoints:
    kept = Checkpoints(path, CONFIG)
    for count in counts:
        kept.save(state(count))
    return kept


def examples_in(path: Path) -> dict[str, int]:
    return {name: torch.load(path / name, weights_only=True)["examples"] for name in NAMES if (path / name).exists()}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    kept = saved(tmp_path, 5)
    loaded = kept.load()
    assert loaded is not None
    assert loaded["examples"] == 5
    assert loaded["version"] == checkpoints.VERSION
    assert torch.equal(loaded["network"]["weight"], torch.arange(6.0))
    assert Checkpoints(tmp_path / "elsewhere", CONFIG).load() is None


def test_any_program_can_read_it(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    for mmap in (False, True):
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True, mmap=mmap)["examples"] == 5
    with zipfile.ZipFile(tmp_path / "checkpoint.pt") as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"cabs checkpoint, version ")


def test_the_previous_one_is_kept(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1, 2, 3)
    assert examples_in(tmp_path) == {"checkpoint.pt": 3, "checkpoint-previous.pt": 2}
    previous = kept.load(from_previous=True)
    assert previous is not None
    assert previous["examples"] == 2


def test_one_wrong_byte_anywhere_is_found() -> None:
    content = sealed({**state(), "version": checkpoints.VERSION})
    assert unsealed(content)["examples"] == 0
    choice = random.Random(0)
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= choice.randrange(1, 256)
        with pytest.raises(ValueError, match=r"damaged"):
            unsealed(bytes(damaged))


def test_a_byte_too_few_or_too_many_is_found() -> None:
    content = sealed({**state(), "version": checkpoints.VERSION})
    for length in (0, 1, 22, len(content) // 2, len(content) - 64, len(content) - 1):
        with pytest.raises(ValueError, match="not a complete checkpoint"):
            unsealed(content[:length])
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        unsealed(content + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        unsealed(b"\0" + content)


@pytest.mark.parametrize("content", [b"", b"rubbish", b"PK\x03\x04 half a zip file"])
def test_what_cannot_be_read_is_named_with_a_way_out(tmp_path: Path, content: bytes) -> None:
    kept = saved(tmp_path, 1, 2)
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.pt: not a complete .*; resume .* --resume --from-previous$"
    ):
        kept.load()
    (tmp_path / "checkpoint-previous.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint-previous\.pt: not a complete .*; start the run again"):
        kept.load(from_previous=True)
    (tmp_path / "checkpoint-previous.pt").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: not a complete .*; start the run again with --force$"):
        kept.load()
    with pytest.raises(UsageError, match="no such checkpoint; leave out --from-previous"):
        kept.load(from_previous=True)


def test_files_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = saved(tmp_path, 1)
    torch.save(state(), tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="written by another program"):
        kept.load()
    monkeypatch.setattr(checkpoints, "VERSION", 77)
    kept.save(state())
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=rf"version 77, and this cabs reads version {checkpoints.VERSION}"):
        kept.load()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"another run: its seed is 0, this run's is 4; start"):
        Checkpoints(tmp_path, replace(CONFIG, seed=4)).load()
    assert Checkpoints(tmp_path, replace(CONFIG, examples=5000, data="/elsewhere")).load() is not None


def test_a_state_that_cannot_be_saved_leaves_the_others(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1, 2)
    with pytest.raises(Exception, match="pickle"):
        kept.save({"function": lambda: None})
    assert examples_in(tmp_path) == {"checkpoint.pt": 2, "checkpoint-previous.pt": 1}


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lets the process end before its n-th system call from now on; nothing is done after that, not even tidying."""
    left = [10**9]

    def mortal(function: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*arguments, **named)

        return called

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync", "open"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        patch.setattr(Path, "unlink", mortal(Path.unlink))
        yield left


@pytest.mark.parametrize("calls", range(6))
def test_whenever_the_process_dies_the_last_good_one_is_there(tmp_path: Path, dying: list[int], calls: int) -> None:
    kept = saved(tmp_path, 1, 2)
    dying[0] = calls
    try:
        kept.save(state(3))
        done = True
    except Killed:
        done = False
    dying[0] = 10**9
    loaded = kept.load()
    assert loaded is not None
    assert loaded["examples"] == (3 if done or calls > 2 else 2)
    kept.save(state(4))
    again = kept.load()
    assert again is not None
    assert again["examples"] == 4
    assert kept.load(from_previous=True) is not None
    assert done == (calls == 5)


@pytest.mark.parametrize("calls", range(5))
def test_going_back_may_be_cut_short(tmp_path: Path, dying: list[int], calls: int) -> None:
    kept = saved(tmp_path, 1, 2)
    damaged = (tmp_path / "checkpoint.pt").read_bytes()[:-1]
    (tmp_path / "checkpoint.pt").write_bytes(damaged)
    dying[0] = calls
    try:
        kept.drop_newest()
        done = True
    except Killed:
        done = False
    dying[0] = 10**9
    assert done == (calls == 4)
    if calls == 0:
        with pytest.raises(CheckpointError, match="--from-previous"):
            kept.load()
        return
    loaded = kept.load()
    assert loaded is not None
    assert loaded["examples"] == 1
    assert (tmp_path / "checkpoint-set-aside.pt").read_bytes() == damaged


SCHEDULE = {"examples": 900, "eval_every": 300, "checkpoint_every": 150, "log_every": 40}
SHORT = {
    **SCHEDULE,
    "rule": "norm-test",
    "theta": 0.6,
    "lr": 0.2,
    "min_batch_size": 6,
    "max_batch_size": 64,
    "threads": 1,
}


def numbers(path: Path) -> str:
    return re.sub(r'"seconds":[0-9.e-]+', "", (path / "metrics.jsonl").read_text())


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path / "checkpoint.pt", weights_only=True)["network"]


def test_from_the_previous_one_the_run_ends_the_same(tmp_path: Path) -> None:
    settings = RunConfig.make(DIGITS, SHORT)
    session.train(settings, tmp_path / "whole", QUIET)
    session.train(settings, tmp_path / "run", QUIET)
    content = bytearray((tmp_path / "run" / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "run" / "checkpoint.pt").write_bytes(content)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"damaged: .* --from-previous"):
        session.resume(tmp_path / "run", {}, QUIET)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    assert (tmp_path / "run" / "summary.json").exists()

    run, checkpoint = RunDirectory.resume(tmp_path / "run", settings, from_previous=True)  # and the process is killed
    run.close()
    assert checkpoint is not None
    assert len((tmp_path / "run" / "metrics.jsonl").read_bytes()) == checkpoint["metrics_bytes"] < len(metrics)
    assert (tmp_path / "run" / "checkpoint-set-aside.pt").read_bytes() == content

    assert session.resume(tmp_path / "run", {}, QUIET)["status"] == "finished"
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weight, weights(tmp_path / "run")[name])


def test_a_checkpoint_holds_everything(tmp_path: Path) -> None:
    session.train(RunConfig.make(DIGITS, {**SHORT, "examples": 200}), tmp_path / "run", QUIET)
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    wanted = {"network", "optimizer", "scheduler", "loader", "random", "examples", "step", "version", "config"}
    assert wanted <= content.keys()
    assert content["examples"] >= 200
    assert content["config"]["lr"] == 0.2
