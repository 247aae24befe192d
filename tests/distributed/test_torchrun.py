"""``torchrun … -m cabs train`` as people start it, and what becomes of it when something happens."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import crewed
from cabs.experiments.runs import session
from cabs.experiments.runs.metrics import read_metrics
from gloo import PATIENCE
from test_crew import same_runs

MISHAP = str(Path(__file__).with_name("mishap.py"))
QUIET = Console(quiet=True)
OPTIONS = (
    *("--rule", "norm-test", "--theta", "0.6", "--lr", "0.2", "--min-batch-size", "2", "--max-batch-size", "64"),
    *("--examples", "700", "--eval-every", "300", "--checkpoint-every", "150", "--log-every", "1", "--threads", "1"),
)


def torchrun(processes: int, *command: str) -> tuple[int, str]:
    """The exit code of torchrun, and all that it and its processes have said."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    with subprocess.Popen(
        [*launcher, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except BaseException:
            process.terminate()  # torchrun takes its processes along
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            process.kill()
            raise
    return process.returncode, output


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    session.train(crewed.config(), path, QUIET)
    return path


def test_two_processes_make_the_run_of_one_process(reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    code, output = torchrun(2, "-m", "cabs", "train", "digits", "--out", str(path), *OPTIONS)
    assert code == 0, output
    assert output.count("test accuracy ") == 5, output  # four evaluations and the summary, from one process
    assert "Grad strides" not in output
    same_runs(reference, path)
    assert {item.name for item in path.iterdir()} == {item.name for item in reference.iterdir()}
    assert json.loads((path / "config.json").read_text()) == json.loads((reference / "config.json").read_text())
    assert json.loads((path / "summary.json").read_text())["environment"]["processes"] == 2


def test_a_process_that_dies_ends_the_job_and_others_go_on(reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    code, output = torchrun(2, MISHAP, "1", "25", "die", "train", "digits", "--out", str(path), *OPTIONS)
    assert code != 0
    assert output.count("another process has ended") == 1, output
    assert f"torchrun --nproc-per-node 2 -m cabs train digits --out {path} --resume" in output
    assert "SIGKILL" in output
    assert (path / "checkpoint.pt").exists()
    code, output = torchrun(3, MISHAP, "0", "35", "die", "train", "--out", str(path), "--resume")
    assert code != 0
    assert "the run resumes from" in output, output
    assert "another process has ended" in output, output
    assert session.resume(path, {}, QUIET)["status"] == "finished"
    same_runs(reference, path)


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    code, output = torchrun(2, "-m", "cabs", "train", "digits", "--out", str(tmp_path / "run"), "--theta", "0.5")
    assert code != 0
    assert output.count("--theta goes with --rule norm-test") == 1, output
    assert output.count("exitcode  : 2") >= 1
    assert not (tmp_path / "run").exists()


def test_a_signal_leaves_a_run_to_go_on_with(reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    code, output = torchrun(2, MISHAP, "1", "20", "SIGINT", "train", "digits", "--out", str(path), *OPTIONS)
    assert code != 0
    assert output.count("resume with") == 1, output
    assert json.loads((path / "summary.json").read_text())["status"] == "interrupted"
    steps = [row["step"] for row in read_metrics(path)]
    assert steps[-1] == 20
    assert session.resume(path, {}, QUIET)["status"] == "finished"
    same_runs(reference, path)
