"""The rows of ``metrics.jsonl``: read one by one; a row that no run can have written is an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cabs.experiments.errors import CommandError
from cabs.experiments.files import open_reading, parse_json

METRICS = "metrics.jsonl"

_COUNTS = ("examples", "step", "batch_size")
_NUMBERS = (
    *("seconds", "loss", "variance", "noise_share", "lr"),
    *("train_loss", "test_loss", "test_accuracy", "test_perplexity"),
)
_MAY_BE_NONE = ("variance", "noise_share")
_TAIL = 1 << 15


def parse_row(line: bytes) -> dict[str, Any]:
    """A row of metrics.

    Raises:
        ValueError: If the line is not one.
    """
    row = parse_json(line)
    if not isinstance(row, dict) or "examples" not in row:
        raise ValueError("it tells no examples")
    for name in row.keys() & {*_COUNTS, *_NUMBERS}:
        value = row[name]
        if value is None and name in _MAY_BE_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, int if name in _COUNTS else int | float):
            raise ValueError(f"{name} is no number")
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise ValueError(f"{name} is not finite")
        if name in _COUNTS and value < 0:
            raise ValueError(f"{name} is negative")
    return row


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of the run in a directory; a last line that is still being written is left out.

    Raises:
        CommandError: If there is something else among them, or they are not in order.
    """
    before = 0
    with open_reading(path / METRICS) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_row(line)
                if row["examples"] < before:
                    raise ValueError("fewer examples than in the row before")
            except ValueError as error:
                raise CommandError(f"{path / METRICS}, line {number}: not a row of metrics: {error}") from error
            before = row["examples"]
            yield row


def latest(path: Path) -> dict[str, Any]:
    """The newest value of everything that the run in a directory has measured, from the end of its metrics."""
    try:
        with open_reading(path / METRICS) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    values: dict[str, Any] = {}
    for line in lines:
        try:
            values.update(parse_row(line))
        except ValueError:  # the first line of the tail, or one still being written
            continue
    return values
