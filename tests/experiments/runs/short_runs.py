"""Short runs of the digits, and what is in their directories."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from cabs.experiments.problems import DIGITS
from cabs.experiments.runs import session
from cabs.experiments.runs.config import RunConfig

SHORT = {"rule": "constant", "batch_size": 32, "examples": 640, "eval_every": 320, "checkpoint_every": 160}

Command = Callable[..., tuple[int, str, str]]


def trained(path: Path, **given: Any) -> Path:
    config = RunConfig.make(DIGITS, {**SHORT, "threads": 1, **given})
    session.train(config, path, Console(file=io.StringIO()))
    return path


def content(path: Path) -> dict[str, bytes]:
    return {str(item.relative_to(path)): item.read_bytes() for item in path.rglob("*") if item.is_file()}
