"""``cabs probe`` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cabs import cli

MODULE = """
import torch, torch.nn.functional as F
from torch.utils.data import TensorDataset

model = torch.nn.Linear(6, 3)
dataset = TensorDataset(torch.randn(100, 6), torch.randint(0, 3, (100,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def parts():
    return model, dataset, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer


def other():
    return model, dataset


def fails():
    return {}["weights"]


def fails_later():
    return model, dataset, lambda batch: F.cross_entropy(model(batch["x"]), batch[1]), optimizer


def wants(size):
    return parts()


def swapped():
    return parts()[::-1]


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        pass


def uncoupled():
    return *parts()[:3], Muon(model.parameters())


number = 3
"""

QUICK = ("--seconds", "5", "--examples", "128", "--max-batch-size", "64", "--threads", "1")


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, without a new process."""
    monkeypatch.setattr(sys, "argv", ["cabs", "probe", *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    try:
        code = cli.main()
    except SystemExit as end:
        code = int(str(end.code or 0))
    return code, *capsys.readouterr()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "new" / "probe"
    arguments = ("digits", "--lr", "0.2", "--optimizer", "momentum", "--after", "640", "--out", str(out), *QUICK)
    code, text, errors = run(capsys, monkeypatch, *arguments)
    assert (code, errors) == (0, "")
    assert "Digits · SGD, lr 0.2, after 640 examples" in text
    assert "Recommended: m =" in text
    assert sorted(path.name for path in out.iterdir()) == ["probe.json", "probe.png", "probe.txt"]
    numbers = json.loads((out / "probe.json").read_text())
    assert numbers["fits"] == {"size": 64, "bound": "max_batch_size"}
    assert numbers["noise"]["trace"]["low"] < numbers["noise"]["trace"]["high"]
    assert "tr Σ" in (out / "probe.txt").read_text()
    assert (out / "probe.png").read_bytes().startswith(b"\x89PNG")


def test_a_function(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    code, text, errors = run(capsys, monkeypatch, f"{module}:parts", "--batch-size", "48", *QUICK)
    assert (code, errors) == (0, "")
    assert "AdamW, lr 0.01, before training, dataset of 100" in text
    assert "noise share at m = 48" in text


MISTAKES = {
    "nothing": (("nothing",), 2, "no problem is called 'nothing'"),
    "no module": (("no_such_module:parts",), 2, "there is no module no_such_module"),
    "no function": (("{}:nothing",), 2, "has no function 'nothing'"),
    "no callable": (("{}:number",), 2, "something else than a function"),
    "relative": ((".{}:parts",), 2, "is no name of a module"),
    "arguments": (("{}:wants",), 2, "needs arguments"),
    "other": (("{}:other",), 2, "returned a tuple of 2: it must return (model, dataset, loss, optimizer)"),
    "swapped": (("{}:swapped",), 1, "model is a AdamW: the arguments are (model, dataset, loss, optimizer)"),
    "fails": (("{}:fails",), 1, "KeyError: 'weights'"),
    "fails later": (("{}:fails_later",), 1, "line 23)"),
    "uncoupled": (("{}:uncoupled",), 1, "Muon is not known to make such"),
    "options of problems": (("{}:parts", "--lr", "0.1"), 2, "makes model, data and optimizer itself"),
    "threads": (("{}:parts", "--threads", "0"), 2, "--threads 0"),
    "lr": (("digits", "--lr", "0"), 2, "a learning rate is a positive number"),
    "optimizer": (("digits", "--optimizer", "lion"), 2, "no optimizer is called 'lion'"),
    "count": (("digits", "--after", "many"), 2, "not a number of examples"),
    "size": (("digits", "--batch-size", "5000"), 1, "the dataset has 1438 examples"),
    "out": (("digits", "--out", "{}.py"), 2, "is a file"),
    "diverged": (("digits", "--lr", "1e9", "--after", "3k", *QUICK), 1, "is nan"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    arguments, expected, words = MISTAKES[case]
    code, _, errors = run(capsys, monkeypatch, *(argument.format(module) for argument in arguments))
    assert code == expected, errors
    assert words in " ".join(errors.split())
    assert "Traceback" not in errors


def test_without_a_coupling_sgd_can_be_assumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    assert run(capsys, monkeypatch, f"{module}:uncoupled", "--assume-sgd", *QUICK)[0] == 0


def test_the_library_needs_torch_alone(tmp_path: Path) -> None:
    """Without the packages of the command, a probe runs and prints; its picture says what to install."""
    script = """
import sys
for name in ("matplotlib", "rich", "typer", "numpy", "scipy"):
    sys.modules[name] = None
import torch, torch.nn.functional as F
from cabs import probe
model = torch.nn.Linear(6, 3)
dataset = torch.utils.data.TensorDataset(torch.randn(100, 6), torch.randint(0, 3, (100,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
report = probe(model, dataset, lambda b: F.cross_entropy(model(b[0]), b[1]), optimizer, seconds=0.05, examples=64)
print(report)
try:
    report.picture("probe.png")
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Recommended: m =" in done.stdout
    assert 'pip install "torch-cabs[experiments]"' in done.stdout
