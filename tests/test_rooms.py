"""Rooms of the core: imports go only downwards, and no file is longer than a reader takes in at one sitting."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "cabs"
ROOMS = [
    "experiments",
    "integrations",
    "probe",
    "scheduler",
    "rules",
    "clocks",
    "couplings",
    "parallel",
    "loader",
    "variance",
    "norms",
    "pictures",
    "hooks",
    "torch_compiler",
    "torch_loading",
    "torch_internals",
    "interrupts",
    "hardware",
]
"""From the top: a room may import those after it, and itself."""
CORE = ROOMS[1:]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms that a file imports anything of, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cabs":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("cabs.")}
    return found & set(ROOMS)


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if room_of(path) in CORE]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path: Path) -> None:
    below = set(ROOMS[ROOMS.index(room_of(path)) :])
    assert imports(path) <= below


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


def test_rooms_are_all_there() -> None:
    assert {room_of(path) for path in FILES} == set(CORE)
