"""The description of the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from cabs import hardware


def test_everything_is_there_and_fit_for_json() -> None:
    told = json.loads(json.dumps(hardware.describe()))
    assert list(told) == ["processor", "cores", "memory_gib", "system", "python", "torch", "threads"]
    assert told["torch"] == torch.__version__
    assert told["threads"] == torch.get_num_threads()
    assert 1 <= told["cores"] <= (os.cpu_count() or 1)
    assert told["processor"]
    assert hardware.describe(threads=7)["threads"] == 7


def test_processor_comes_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor : 0\nmodel name\t: Fast: One @ 3 GHz\n")
    assert hardware.processor() == "Fast: One @ 3 GHz"


def test_systems_that_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", silent)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "")
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert hardware.processor() == "unknown"
    assert hardware.memory_gib() is None
    assert hardware.cores() == (os.cpu_count() or 1)
