"""One file alone reaches into PyTorch, one into each framework, and the versions that are declared are those tried."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import cabs

PACKAGE = Path(cabs.__file__).parent
ROOT = PACKAGE.parents[1]
TREES = {path.relative_to(PACKAGE): ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Private names that the package gives itself."""
    found = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "part"):
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return {name for name in found if is_private(name)}


def reached_into(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.lineno}: {name}" for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            of_python = isinstance(node.value, ast.Name) and node.value.id in ("os", "sys")
            if not of_python:
                yield f"{node.lineno}: {node.attr}"


REACH_IN = (
    "torch_internals.py",
    "torch_compiler.py",
    "torch_loading.py",
    "integrations/lightning/loop.py",
    "integrations/transformers/trainer.py",
)


def test_one_file_reaches_into_torch_and_one_into_each_framework() -> None:
    own = own_names()
    found = {path.as_posix(): list(reached_into(tree, own)) for path, tree in TREES.items()}
    for path in REACH_IN:
        assert found.pop(path)
    assert {path: names for path, names in found.items() if names} == {}


def test_it_imports_next_to_nothing_of_the_package() -> None:
    names = {node.module for node in ast.walk(TREES[Path("torch_internals.py")]) if isinstance(node, ast.ImportFrom)}
    assert {name for name in names if name and name.startswith("cabs")} == {"cabs.interrupts"}


def test_the_range_is_what_is_tried() -> None:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("installed without its repository")
    (torch,) = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (tried,) = re.findall(r"^TORCHES \?= (\S+) (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    oldest, newest = (tuple(map(int, version.split(".")[:2])) for version in tried)
    assert torch == f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    page = (ROOT / "docs" / "versions.md").read_text("utf-8")
    assert all(version in page for version in tried)
