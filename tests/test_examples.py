"""Every example runs as its first line says, warns of nothing, leaves nothing behind, and shows sizes that move."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}


def command_of(path: Path) -> str:
    """What comes after "Run:" in the docstring, or plain python."""
    told = re.search(r"\bRun: (.+)$", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE)
    return told[1].strip("`. ") if told else f"python examples/{path.name}"


def output_of(command: str, folder: Path) -> str:
    """Runs a command in a folder that has nothing but the examples."""
    (folder / "examples").symlink_to(EXAMPLES)
    program, *arguments = shlex.split(command)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        [*PROGRAMS[program], *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sizes_in(output: str) -> list[int]:
    return [int(size.replace(",", "")) for size in re.findall(r"batch size ([\d,]+)", output)]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    sizes = sizes_in(output_of(command_of(path), tmp_path))
    assert len(set(sizes)) > 1, f"no batch size moved in {path.name}"
    assert [file.name for file in tmp_path.iterdir()] == ["examples"]


@pytest.mark.slow
def test_two_processes_print_what_one_does(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    alone = output_of("python examples/ddp.py", one)
    assert output_of(command_of(EXAMPLES / "ddp.py"), two) == alone.replace("shared by 1", "shared by 2")


def test_the_table_has_every_command() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for path in FILES:
        assert f"`{command_of(path)}`" in table
