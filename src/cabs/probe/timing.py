"""The seconds of a step of m examples, c₀ + c₁m, and the largest m that fits into memory: both by trying."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

from cabs.loader import AdaptiveLoader
from cabs.probe.task import Task
from cabs.scheduler.costs import FEWEST, KEPT, Sample, StepCosts
from cabs.scheduler.microbatch_size import Memory, find_microbatch_size, memory_of
from cabs.scheduler.observing import mean_loss

SLOWER = 0.8
"""Where the largest batches have less than this of the most throughput, time is no straight line up to there."""
FIRST = 32
"""The size that tells, before larger ones are tried, how long these would take."""

Bound = Literal["memory", "dataset", "max_batch_size", "seconds", "unknown"]
"""What kept the probe from trying a larger size; unknown where the system does not tell how much memory there is."""


@dataclass(frozen=True)
class Fits:
    """The largest size that was tried and fits into memory, and why nothing larger was."""

    size: int
    bound: Bound


def largest(task: Task, optimizer: Any, *, most: int, seconds: float, memory: Memory | None = None) -> Fits:
    """The largest size whose forward and backward pass fit into memory, up to a bound.

    Args:
        task: what is probed.
        optimizer: a copy of the optimizer, with the memory that it needs.
        most: the largest size of interest.
        seconds: about how long this may take; sizes that would take longer are not tried.
        memory: where it must fit; by default that of the model's device.
    """
    bound: Bound = "max_batch_size"
    if len(task.dataset) < most:
        most, bound = len(task.dataset), "dataset"
    first = min(FIRST, most)
    loader = AdaptiveLoader(task.dataset, batch_size=2, collate_fn=task.collate_fn)

    def find(most: int) -> int:
        return find_microbatch_size(task.model, task.loss, loader, most, memory=memory)

    step_seconds(task, optimizer, task.batch(min(2, most)))  # the optimizer's state takes memory too
    try:
        memory = memory or memory_of(task.model)
        found = find(first)
    except (RuntimeError, OSError) as error:  # neither a CUDA device nor a Linux that tells
        if isinstance(error, RuntimeError) and "max_microbatch_size" not in str(error):
            raise
        return Fits(first, "unknown")
    if found < first:
        return Fits(found, "memory")
    # The sizes tried add up to twice the largest.
    affordable = int(first * seconds / 2 / seconds_of(task, optimizer, first))
    if affordable < most:
        most, bound = max(first, 1 << max(0, affordable.bit_length() - 1)), "seconds"
    if most > first and (found := find(most)) < most:
        bound = "memory"
    return Fits(found, bound)


def seconds_of(task: Task, optimizer: Any, size: int) -> float:
    """Of one step, after one that warms up."""
    step_seconds(task, optimizer, task.batch(size))
    return step_seconds(task, optimizer, task.batch(size))


def step_seconds(task: Task, optimizer: Any, batch: Any) -> float:
    """Of one step of the optimizer on a batch that is there already."""
    wait = torch.accelerator.synchronize if next(task.model.parameters()).device.type != "cpu" else int
    wait()
    start = time.perf_counter()
    optimizer.zero_grad()
    mean_loss(task.loss(batch)).backward()
    optimizer.step()
    wait()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Times:
    """What steps take.

    Attributes:
        measured: sizes, and the seconds of a step of that size: the median of the faster half.
        line: c₀ and c₁; None where they cannot be told, as the times do not grow with the sizes.
        rounds: how often each size was timed.
        fitted: the largest size that the line is about. Where larger batches are slower per example (they no longer fit
            into a cache, say), it ends at the size with the most throughput.
    """

    measured: tuple[tuple[int, float], ...]
    line: tuple[float, float] | None
    rounds: int
    fitted: int

    @property
    def reckoned(self) -> tuple[float, float] | None:
        """c₀ and c₁ to reckon with: those of the line, or c₁ = 0 where steps of all sizes take the same time."""
        if self.line is not None:
            return self.line
        seconds = [t for _, t in self.measured]
        wide = self.measured[-1][0] >= 4 * self.measured[0][0]
        return (median(seconds), 0.0) if wide and max(seconds) < 1.3 * min(seconds) else None

    @property
    def fastest(self) -> tuple[int, float]:
        """The size with the most examples per second, of those timed, and how many these are."""
        return max(((m, m / t) for m, t in self.measured), key=lambda one: one[1])

    @property
    def most(self) -> float | None:
        """The most examples per second: 1/c₁, or what was timed where the line ends before the largest size."""
        if self.line is None:
            return None
        return 1 / self.line[1] if self.fitted == self.measured[-1][0] else self.fastest[1]

    @property
    def saturation(self) -> float | None:
        """The m from which on throughput is 90% of the most: 9 c₀/c₁ where that is 1/c₁."""
        if self.line is None or self.most is None:
            return None
        (c0, c1), rate = self.line, 0.9 * self.most
        reached = rate * c0 / (1 - rate * c1) if rate * c1 < 1 else math.inf
        return reached if self.fitted == self.measured[-1][0] else min(reached, self.fitted)

    @property
    def misfit(self) -> float:
        """By how much the line is off the times where it is furthest from them, in parts of these."""
        if self.line is None:
            return 0.0
        c0, c1 = self.line
        return max(abs(c0 + c1 * m - t) / t for m, t in self.measured if m <= self.fitted)


def time_steps(task: Task, optimizer: Any, sizes: Sequence[int], seconds: float) -> Times:
    """Times steps of several sizes, for about so many seconds.

    Sizes take turns, so that a machine whose speed drifts treats all of them alike. The first round warms up and does
    not count. Of a size's times the faster half counts: what else the machine does makes a step slower, and none
    faster. Data is loaded before the clock starts.

    Args:
        task: what is probed.
        optimizer: a copy of the optimizer; it steps the model.
        sizes: from the smallest on.
        seconds: how long to go on once each size was timed a few times.
    """
    batches = {size: task.batch(size) for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    end = time.perf_counter() + seconds
    for turn in range(2 * KEPT + 1):
        for size in sizes if turn % 2 else reversed(sizes):
            # A copy, since loops take batches apart (``batch.pop("labels")``) and write into them.
            taken = step_seconds(task, optimizer, copy.deepcopy(batches[size]))
            if turn:
                found[size].append(taken)
        if turn >= 2 * FEWEST and time.perf_counter() > end:
            break
    faster = {size: sorted(times)[: (turn + 1) // 2] for size, times in found.items()}
    measured = tuple((size, median(times)) for size, times in faster.items())
    fitted = straight(measured)
    samples = [Sample(size, taken, False) for size, times in faster.items() if size <= fitted for taken in times]
    return Times(measured, StepCosts().add(samples).line, turn, fitted)


def straight(measured: Sequence[tuple[int, float]]) -> int:
    """The largest size that a line can be about: times may grow faster than sizes beyond."""
    (fastest, least), (largest, taken) = min(measured, key=lambda one: one[1] / one[0]), measured[-1]
    return fastest if largest / taken < SLOWER * fastest / least and fastest >= 4 * measured[0][0] else largest


def timed_sizes(present: int, fits: int) -> list[int]:
    """Powers of two, the largest that fits, and the present size: as far as these fit."""
    powers = [2**power for power in range(1, fits.bit_length()) if 2**power <= fits]
    return sorted({*powers, fits, *([present] if present <= fits else [])})
