"""What a step costs: the seconds c₀ + c₁m of a step of m examples, measured while training.

Steps are put into bins by their size, a quarter of an octave wide, and each bin keeps its last few times. A line goes
through the *medians* of the bins, so what happens now and then (a pause, a breakpoint, a compilation, another program)
does not count, whatever it took. Steps that measure the variance take longer than those that do not: both kinds have a
line of the same slope, and c₀ is the mean of the two as often as they come.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from cabs.parallel import Team

WARM_UP = 5
"""The first steps, of a run and after a resume, are not counted."""
KEPT = 15
"""How many times a bin keeps."""
FEWEST = 3
"""How many it needs, so that one that is out of line does not matter."""
MEMORY = 2000
"""Bins without a step for so many steps are forgotten: the machine may have changed since."""
TRIALS = 60
"""At most so many steps in ``MEMORY`` are made with other sizes, to tell c₁."""
AGREED = 8
"""How many steps several processes agree on at a time."""
CERTAIN = 3.0
"""The times of the smallest and the largest sizes must differ by so many times their error, to tell a first line."""
ROUNDING = 1e-9
"""Times that grow by less do not grow."""
SPREAD = 1.4
"""And these sizes at least by this factor."""
REFIT = 20
"""The line is fitted anew after every tenth of the steps so far, at the latest after so many: each fit takes time."""


@dataclass(frozen=True)
class Sample:
    """The time of one step."""

    examples: int
    seconds: float
    measured: bool


@dataclass(frozen=True)
class Bin:
    """Steps of about the same size and kind: their sizes and times, and which step was the last."""

    sizes: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    last: int = 0

    def with_one(self, size: float, seconds: float, step: int) -> Bin:
        return Bin((*self.sizes, size)[-KEPT:], (*self.seconds, seconds)[-KEPT:], step)


@dataclass(frozen=True)
class StepCosts:
    """What is known of the cost of a step; replaced as a whole, like the scheduler's state.

    Attributes:
        bins: by kind (0, or 1 where the variance was measured) and number of the bin.
        steps: how many steps were timed.
        counts: how many of each kind, of late.
        line: c₀ and c₁; None where they cannot be told.
        fitted: after how many steps the line was fitted.
    """

    bins: Mapping[tuple[int, int], Bin] = field(default_factory=dict)
    steps: int = 0
    counts: tuple[float, float] = (0.0, 0.0)
    line: tuple[float, float] | None = None
    fitted: int = 0

    def add(self, samples: Sequence[Sample]) -> StepCosts:
        """The same with more steps; times that cannot be are left out."""
        bins, steps, counts = dict(self.bins), self.steps, list(self.counts)
        for sample in samples:
            steps += 1
            if not 0 < sample.seconds < math.inf or sample.examples < 1:
                continue
            kind = int(sample.measured)
            counts = [count * (1 - 1 / MEMORY) for count in counts]
            counts[kind] += 1
            key = (kind, round(4 * math.log2(sample.examples)))
            bins[key] = bins.get(key, Bin()).with_one(sample.examples, sample.seconds, steps)
        if not samples:
            return self
        kept = {key: one for key, one in bins.items() if steps - one.last < MEMORY}
        line, fitted = self.line, self.fitted
        if steps - fitted >= min(steps // 10, REFIT) or len(kept) < len(bins):
            # A line that was told once stays for as long as times grow: a doubt is no reason to forget the cost.
            line, fitted = line_through(kept, counts, CERTAIN if self.line is None else 0.0), steps
        return StepCosts(kept, steps, (counts[0], counts[1]), line, fitted)

    def trial_factor(self, longer_by: int = 0) -> float | None:
        """What to multiply the next size by; None but for a few steps while the cost is not known.

        Sizes go up in turn: once, twice, four times, and further up the longer nothing can be told.
        """
        turn = (self.steps + longer_by) % MEMORY
        if self.line is not None or turn >= TRIALS:
            return None
        return float(2 ** (turn % (3 + turn // 20)))

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "bins": [[*key, one.last, list(one.sizes), list(one.seconds)] for key, one in self.bins.items()],
            "steps": self.steps,
            "counts": list(self.counts),
            "line": None if self.line is None else list(self.line),
            "fitted": self.fitted,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> StepCosts:
        """The inverse of ``state_dict``.

        Raises:
            ValueError: it is not one.
        """
        try:
            bins = {
                (int(kind), int(number)): Bin(tuple(map(float, sizes)), tuple(map(float, seconds)), int(last))
                for kind, number, last, sizes, seconds in state["bins"]
            }
            counts = (float(state["counts"][0]), float(state["counts"][1]))
            whole = all(
                len(one.sizes) == len(one.seconds) > 0 and all(0 < x < math.inf for x in (*one.sizes, *one.seconds))
                for one in bins.values()
            )
            if not whole or not all(0 <= count < math.inf for count in counts):
                raise ValueError("times that cannot be")
            steps = int(state["steps"])
            if "line" not in state:  # of a version that fitted it at every step
                return cls(bins, steps, counts, line_through(bins, counts), steps)
            line = None if state["line"] is None else (float(state["line"][0]), float(state["line"][1]))
            if line is not None and not (0 <= line[0] < math.inf and 0 < line[1] < math.inf):
                raise ValueError("a line that cannot be")
            return cls(bins, steps, counts, line, int(state["fitted"]))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError("the state's costs are not made of times of steps: it is damaged") from error


def line_through(
    bins: Mapping[tuple[int, int], Bin], counts: Sequence[float], certain: float = CERTAIN
) -> tuple[float, float] | None:
    """c₀ and c₁, or None where they cannot be told: all sizes are alike, or the times do not grow with them.

    Args:
        bins: the times.
        counts: how many steps of each kind there were, of late.
        certain: by how many times its error they must grow.
    """
    points = [
        (kind, median(one.sizes), median(one.seconds), len(one.sizes))
        for (kind, _), one in bins.items()
        if len(one.sizes) >= FEWEST
    ]
    # Times err in proportion: the line is the one that is nearest in percent.
    sums = {kind: [0.0] * 5 for kind in (0, 1)}
    for kind, m, t, n in points:
        weight = n / t**2
        for at, value in enumerate((1.0, m, t, m * m, m * t)):
            sums[kind][at] += weight * value
    xx = xy = 0.0
    for w, x, y, x2, x_y in sums.values():
        if w > 0:
            xx, xy = xx + x2 - x * x / w, xy + x_y - x * y / w
    same_kind = [[m for k, m, _, _ in points if k == kind] for kind in (0, 1)]
    if xx <= 0 or max((max(ms) / min(ms) for ms in same_kind if ms), default=1.0) < SPREAD:
        return None
    slope = xy / xx
    intercepts = {kind: (y - slope * x) / w for kind, (w, x, y, _, _) in sums.items() if w > 0}
    growth = slope * math.sqrt(xx)  # from size to size, in parts of the times
    if slope <= 0 or growth < max(ROUNDING, certain * _scatter(bins, slope, intercepts)):
        return None
    total = sum(counts[kind] for kind in intercepts)
    mean = sum(counts[kind] * c for kind, c in intercepts.items()) / total if total > 0 else min(intercepts.values())
    return max(0.0, mean), slope


def _scatter(bins: Mapping[tuple[int, int], Bin], slope: float, intercepts: Mapping[int, float]) -> float:
    """By how much single times are off the line, in parts of themselves: the usual deviation, not that of outliers."""
    errors = [
        abs(t - intercepts[kind] - slope * m) / t
        for (kind, _), one in bins.items()
        if kind in intercepts
        for m, t in zip(one.sizes, one.seconds, strict=True)
    ]
    return 1.48 * median(errors)


class Stopwatch:
    """Takes the time of steps, from the moment the loader is asked for a batch to the end of ``scheduler.step``.

    What happens between a step and the next request (evaluation, checkpoints) is no part of either. Where the loader
    does not tell when it is asked, a step begins where the last one ended.

    Args:
        team: the processes that share the batches; the least of their times counts, since the others may have waited
            for one that evaluated.
        clock: seconds, from any moment on.
    """

    def __init__(self, team: Team | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._team, self._clock = team, clock
        self.on = False
        """Whether anybody wants to know."""
        self._asked: float | None = None
        self._began: float | None = None
        self._waiting: list[Sample] = []
        self._skips = WARM_UP

    def asked(self) -> None:
        """The loader is asked for a batch."""
        if self.on:
            self._asked = self._clock()

    def begin(self) -> None:
        """The batch that was asked for last is the first of a step."""
        if self._asked is not None:
            self._began = self._asked

    def end(self, examples: int, measured: bool) -> None:
        """The step is made; it had so many examples."""
        if not self.on:
            return
        now, began = self._clock(), self._began
        self._began = None if self._asked is not None else now
        if self._skips:
            self._skips -= 1
            return
        self._waiting.append(Sample(examples, -1.0 if began is None else now - began, measured))

    def give_up(self) -> None:
        """The step is not going to be made."""
        self._began = None

    def restart(self) -> None:
        """Begins anew: the state was loaded."""
        self._began, self._waiting, self._skips = None, [], WARM_UP

    def costs(self, before: StepCosts, tries: bool) -> tuple[StepCosts, float | None]:
        """What steps cost, and what to multiply the next size by in order to find out, if that may be tried."""
        if not self.on:
            return before, None
        costs = before.add(self._taken())
        return costs, costs.trial_factor(len(self._waiting)) if tries else None

    def _taken(self) -> list[Sample]:
        """The steps since the last call, the same for all processes."""
        samples = self._waiting
        if self._team is None:
            self._waiting = []
            return samples
        if len(samples) < AGREED:
            return []
        self._waiting = []
        # −1 is the least of all, and no time: what one process cannot tell, none can.
        least = self._team.least(torch.tensor([s.seconds if math.isfinite(s.seconds) else -1.0 for s in samples]))
        return [
            dataclasses.replace(sample, seconds=seconds)
            for sample, seconds in zip(samples, least.tolist(), strict=True)
        ]
