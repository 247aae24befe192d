"""Two processes of Lightning choose the batch sizes of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process did, and each of two."""
    directory = tmp_path_factory.mktemp("processes")
    for devices in (1, 2):
        command = [sys.executable, str(HERE / "lightning_processes.py"), str(devices), str(directory)]
        done = subprocess.run(
            command, cwd=directory, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}


@pytest.mark.parametrize("case", ["sgd", "adamw", "manual", "clipped", "schedule", "resumed"])
def test_two_processes_choose_the_sizes_of_one(case: str, found: dict[str, Any]) -> None:
    alone, first, second = (found[name][case] for name in ("1-0", "2-0", "2-1"))
    assert len(set(alone["steps"])) > 2
    assert first["steps"] == second["steps"] == alone["steps"]
    assert [a + b for a, b in zip(first["shares"], second["shares"], strict=True)] == alone["steps"]
    assert first["weights"] == second["weights"]
    torch.testing.assert_close(torch.tensor(first["weights"]), torch.tensor(alone["weights"]), rtol=1e-3, atol=1e-4)
    assert first["validated_after"] == alone["validated_after"]


def test_two_processes_go_on_with_the_checkpoint_of_one(found: dict[str, Any]) -> None:
    assert found["2-0"]["of one"]["steps"] == found["1-0"]["resumed"]["steps"] == found["1-0"]["sgd"]["steps"][10:]
