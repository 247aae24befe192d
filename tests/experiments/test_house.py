"""The rooms: which may know of which, and what stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cabs.experiments
from cabs.experiments.problems import PROBLEMS
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.runs.rules import RULES

ROOT = Path(cabs.experiments.__file__).parent
# From the bottom to the top; each may import those before it, and itself.
ROOMS = ("shared", "problems", "runs", "reports", "sweeps", "commands")


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else "shared"


def imports_of(path: Path) -> set[str]:
    """The modules of the experiments that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {f"{node.module}.{item.name}" for item in node.names}
    return {name for name in found if name.startswith("cabs.experiments.")}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    own = ROOMS.index(room_of(path))
    for name in imports_of(path):
        part = name.split(".")[2]
        assert ROOMS.index(part if part in ROOMS else "shared") <= own, name


@pytest.mark.parametrize("folder", [ROOT, Path(__file__).parent], ids=["source", "tests"])
def test_files_are_read_at_one_sitting(folder: Path) -> None:
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 300} == {}


@pytest.mark.parametrize("room", ROOMS[1:-1])
def test_the_tests_mirror_the_rooms(room: str) -> None:
    assert list((Path(__file__).parent / room).glob("test_*.py"))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_the_tables_are_compared_nowhere(path: Path) -> None:
    names = {*RULES, *OPTIMIZERS, *PROBLEMS} - {"cabs"}  # the package is called so too
    compared = {
        node.value
        for comparison in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(comparison, ast.Compare)
        for node in ast.walk(comparison)
        if isinstance(node, ast.Constant)
    }
    assert names & compared == set()


NAMING = """
from cabs.experiments.problems import problem
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.naming import run_name
assert run_name(RunConfig.make(problem("shakespeare"), {})) == "shakespeare-cabs-lr0.001-seed0"
"""
TABLE = """
import sys
from pathlib import Path
from cabs.experiments.reports.comparison import compare
from cabs.experiments.reports.tables import markdown
from cabs.experiments.runs.reader import find_runs
assert "CABS" in markdown(compare(find_runs([Path(sys.argv[1])]).runs))
"""


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (NAMING, ("cabs.experiments.runs.training", "matplotlib", "rich", "ray", "plotly")),
        (TABLE, ("cabs.experiments.runs.training", "matplotlib", "rich", "ray", "plotly")),
    ],
    ids=["naming a run", "making a table"],
)
def test_light_things_stay_light(program: str, heavy: tuple[str, ...], tmp_path: Path) -> None:
    from made_up import write_run

    from cabs.experiments.problems import DIGITS
    from cabs.experiments.runs.config import RunConfig

    write_run(tmp_path / "run", RunConfig.make(DIGITS, {"examples": 1000}))
    check = f"import sys\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{check}", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
