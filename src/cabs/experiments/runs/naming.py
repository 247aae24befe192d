"""What runs are called: on disk, and in a line for people."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from cabs.experiments.runs.config import RunConfig

# The path of an image folder may be longer than any file name may be.
_LONGEST = 80


def default_directory(config: RunConfig) -> Path:
    """Where a run goes that was given no directory: one name for one configuration of rule, rate and seed."""
    return Path("runs") / run_name(config)


def run_name(config: RunConfig) -> str:
    """A file name that tells the method, the learning rate and the seed."""
    estimator = f"-{config.estimator}" if config.estimator != "exact" and config.kind.measures else ""
    optimizer = f"-{config.variant}" if config.variant else ""
    decay = "" if config.lr_decay == "none" else f"-{config.lr_decay}"
    method = config.kind.short(vars(config)) + estimator + decay + optimizer
    return f"{file_name(config.problem)}-{method}-lr{config.lr:g}-seed{config.seed}"


def file_name(problem_name: str) -> str:
    """A problem's name as part of a file name; that of an image folder has a path in it."""
    plain = re.sub(r"[^\w.-]+", "_", problem_name)
    if len(plain.encode()) <= _LONGEST:
        return plain
    # The end of a path says most; a digest keeps different paths apart.
    end = plain.encode()[-_LONGEST + 20 :].decode(errors="ignore")
    return f"{plain[:11]}-{hashlib.sha256(problem_name.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}-{end}"


def headline(config: RunConfig) -> str:
    """What is run, in one line."""
    return f"{config.problem} · {config.method} · α = {config.lr:g} · seed {config.seed}"
