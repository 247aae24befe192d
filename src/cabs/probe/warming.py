"""Bringing a copy of the optimizer to where it has a P, before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cabs.couplings import Coupled
from cabs.probe.task import Task

STEPS = 32
"""v̂ of so many gradients makes P = 1/√v̂ too large by about 3/4 of one in so many, 2%."""
FEWEST = 8
EXAMPLES = 2048
"""Large batches make fewer steps than that, but for the fewest: about so many examples."""


def train(task: Task, optimizer: Any, examples: int, size: int) -> int:
    """Trains on about so many examples, in steps of so many; returns how many steps these were."""
    steps = math.ceil(examples / size)
    for _ in range(steps):
        task.backward(size)
        optimizer.step()
    return steps


def fill(task: Task, optimizer: Any, size: int, steps: int) -> int:
    """Lets the optimizer see gradients at weights that stay as they are, until it has seen enough for its P.

    Args:
        task: what is probed.
        optimizer: a copy.
        size: of the batches, on which v̂ depends.
        steps: how many it has made.

    Returns:
        How many more it has seen.
    """
    missing = max(0, max(FEWEST, min(STEPS, EXAMPLES // size)) - steps)
    with standing_still(optimizer):
        train(task, optimizer, missing * size, size)
    return missing


@contextmanager
def standing_still(optimizer: Any) -> Iterator[None]:
    """Makes steps with a learning rate of 0, which do all that steps do but move."""
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def has_p(coupled: Coupled, optimizer: Any) -> bool:
    """Whether there is a P, be it 1."""
    parameters = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return not coupled.diagonal or any(coupled.weights(p) is not None for p in parameters)
