"""``cabs bench``: found in ``benchmarks/`` of a checkout, which is not part of the installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

import cabs
from cabs.experiments.errors import CommandError

_WHERE = """cabs bench is not part of the installed package: it is in the folder benchmarks/ of the repository.
In a checkout, install the package in place, then run the command again:
  pip install -e ".[experiments]\""""


def add_to(app: typer.Typer) -> None:
    """Adds the benchmark's command if the package is that of a checkout, else one that says where it is."""
    folder = Path(cabs.__file__).resolve().parents[2] / "benchmarks"
    if not (folder / "cabs_bench" / "command.py").is_file():
        # Whatever the options, the answer is the same.
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("bench", context_settings=settings)(_elsewhere)
        return
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    app.command("bench")(importlib.import_module("cabs_bench.command").bench)


def _elsewhere() -> None:
    """Time the gradient variance. This command runs in a checkout of the repository only."""
    raise CommandError(_WHERE)
