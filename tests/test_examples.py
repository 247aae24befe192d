"""Every example runs as its docstring says, shows what it promises, and leaves nothing behind."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FRAMEWORKS = {"accelerate", "lightning", "transformers"}
PATIENCE = int(os.environ.get("CABS_TEST_PATIENCE", "240"))  # seconds, on a machine with much else to do


def command(example: Path) -> str:
    """The command in an example's docstring."""
    words = ast.get_docstring(ast.parse(example.read_text("utf-8"))) or ""
    found = re.search(rf"^ *((?:python|torchrun) .*examples/{re.escape(example.name)}.*)$", words, re.MULTILINE)
    assert found, f"{example.name} does not say how it is run"
    return found[1]


@functools.cache
def output(line: str) -> str:
    """What a command prints, run by this Python in a folder that has nothing but the examples."""
    program, *rest = shlex.split(line)
    words = [sys.executable, *(["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else []), *rest]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    (name,) = re.findall(r"examples/(\w+\.py)", line)
    if not FRAMEWORKS & set(
        re.findall(r"^(?:from|import) (\w+)", (ROOT / "examples" / name).read_text(), re.MULTILINE)
    ):
        environment["PYTHONWARNINGS"] = "error"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "examples").symlink_to(ROOT / "examples")
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        assert os.listdir(folder) == ["examples"], "an example leaves nothing behind"
    return "".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith("[Gloo]"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    printed = output(command(example))
    assert printed.strip(), "an example shows something"
    if "batch size {" in example.read_text("utf-8"):
        assert len(set(re.findall(r"batch size (\d+)", printed))) > 1, "batch sizes visibly move"


@pytest.mark.slow
def test_two_processes_print_what_one_does() -> None:
    alone = output("python examples/ddp.py")
    assert output(command(ROOT / "examples/ddp.py")) == alone.replace("shared by 1", "shared by 2")


@pytest.mark.slow
def test_the_resumed_run_is_the_same() -> None:
    assert output(command(ROOT / "examples/resume.py")).endswith("their sizes are the same: True\n")


@pytest.mark.slow
def test_the_budget_is_met_and_helps() -> None:
    without, within = output(command(ROOT / "examples/budget.py")).split("CABS with a budget of ")
    budget, *seen = re.findall(r"([\d,]+) examples:", within)
    assert seen[-1] == budget
    assert float(within.split()[-1]) < float(without.split()[-1])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_hides_a_package(example: Path) -> None:
    """A script's folder comes first where Python looks for packages."""
    assert example.stem not in {*FRAMEWORKS, "cabs", "torch", *sys.stdlib_module_names}


def test_the_table_has_every_command() -> None:
    table = (ROOT / "examples" / "README.md").read_text("utf-8")
    for example in EXAMPLES:
        assert f"`{command(example)}`" in table
