"""Checkpoints with a valid seal that no run has written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import Command, content, trained

from cabs.experiments.runs.checkpoints import sealed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return trained(tmp_path_factory.mktemp("whole") / "run")


def without(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {name: value for name, value in state.items() if name not in names}


def with_(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, **values}


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda state: [state],
    "a tensor": lambda state: torch.zeros(3),
    "nothing": lambda state: {},
    "no config": without("config"),
    "a config that is none": with_(config=[1]),
    "a tensor in the config": lambda state: {**state, "config": {**state["config"], "lr": torch.zeros(3)}},
    "no count of rows": without("metrics_bytes"),
    "a count of rows that is none": with_(metrics_bytes="many"),
    "a negative count": with_(metrics_bytes=-5),
    "a count beyond the file": with_(metrics_bytes=10**9),
    "no network": without("network"),
    "a network that is none": with_(network=5),
    "another network": with_(network={"0.weight": torch.zeros(1)}),
    "no optimizer": without("optimizer"),
    "an optimizer that is none": with_(optimizer="SGD"),
    "a learning rate that is none": lambda state: {
        **state,
        "optimizer": {
            **state["optimizer"],
            "param_groups": [{**group, "lr": "fast"} for group in state["optimizer"]["param_groups"]],
        },
    },
    "a scheduler that is none": with_(scheduler=None),
    "a loader that is none": with_(loader={"epoch": "first"}),
    "no random numbers": without("random"),
    "random numbers that are none": with_(random={"torch": torch.zeros(3), "augmentation": 4}),
    "examples that are none": with_(examples="lots"),
    "steps that are none": with_(step=None),
    "seconds that are none": with_(seconds=float("nan")),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_checkpoint_with_a_valid_seal(cabs: Command, whole: Path, tmp_path: Path, forge) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    (path / "checkpoint.pt").write_bytes(sealed(forge(state)))
    before = content(path)
    code, _, words = cabs("train", "--out", str(path), "--resume", "--examples", "2000")
    assert code == 1
    assert str(path) in words
    assert "Traceback" not in words
    assert content(path) == before  # it can be looked into, and gone on with from the one before
    assert cabs("train", "--out", str(path), "--resume", "--from-previous")[0] == 0


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("malice",))


def test_a_forged_checkpoint_runs_nothing(
    cabs: Command, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    (path / "checkpoint.pt").write_bytes(sealed({"config": Malicious()}))
    code, _, words = cabs("train", "--out", str(path), "--resume")
    assert code == 1
    assert "checkpoint.pt: not a checkpoint that can be read safely" in words
    assert not (tmp_path / "malice").exists()
