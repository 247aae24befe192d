"""Every example runs as its first lines say, and takes less than a minute where nothing else runs."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PATIENCE = int(os.environ.get("CABS_TEST_PATIENCE", "240"))  # seconds, on a machine with much else to do


def command(example: Path) -> list[str]:
    """The command in an example's docstring, with this Python."""
    words = ast.get_docstring(ast.parse(example.read_text("utf-8"))) or ""
    found = re.search(rf"^ *((?:python|torchrun) .*examples/{re.escape(example.name)}.*)$", words, re.MULTILINE)
    assert found, f"{example.name} does not say how it is run"
    program, *rest = shlex.split(found[1])
    return [sys.executable, *(["-m", "torch.distributed.run"] if program == "torchrun" else []), *rest]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # what it writes stays out of the repository
    done = subprocess.run(command(example), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_hides_a_package(example: Path) -> None:
    """A script's folder comes first where Python looks for packages."""
    assert example.stem not in {"accelerate", "cabs", "lightning", "torch", "transformers", *sys.stdlib_module_names}


def test_there_are_examples() -> None:
    assert EXAMPLES
