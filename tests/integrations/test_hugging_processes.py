"""Two processes, started by torchrun, make the trainings of one: the Trainer's, and a loop with accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hugging import same
from hugging_processes import trainings

pytestmark = pytest.mark.slow


def test_two_processes_get_the_sizes_of_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("hugging_processes.py")
    paths = [str(script.parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    alone = trainings(tmp_path / "alone", 1)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for name, history in alone.items():
        assert len({step[0] for step in history}) > 1, name
        same(first[name], history)
