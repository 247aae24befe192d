"""Batch sizes by the examples seen: nothing is measured, no hook goes into the model.

Every schedule is a function of the number of examples seen so far, so that it says the same whatever sizes came before,
and on a run that was resumed.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from cabs.rules.amounts import examples_of, some_examples_of
from cabs.rules.base import Estimates, Rule, require_positive

Amount = int | float | str
"""A number of examples: 5000, ``"5k"``, ``"1.5M"``."""


class Schedule(Rule):
    """A batch size that depends on the examples seen and nothing else."""

    measures = False

    @abstractmethod
    def at(self, examples: int) -> float:
        """The size of the step that comes after so many examples."""

    def first_batch_size(self) -> float | None:
        return self.at(0)

    def __call__(self, estimates: Estimates) -> float:
        return self.at(estimates.examples_total)


@dataclass(frozen=True)
class Constant(Schedule):
    """The same batch size at every step: what most people use, and the baseline to beat."""

    batch_size: int

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size!r}: it must be a positive integer")

    def at(self, examples: int) -> float:
        return float(self.batch_size)


@dataclass(frozen=True)
class Steps(Schedule):
    """Sizes that hold from some number of examples on.

    Args:
        sizes: ``"0:32 100k:64 1M:256"``, or a mapping ``{0: 32, "100k": 64, "1M": 256}``. The first must be at 0.
    """

    sizes: str | Mapping[Amount, int]

    def __post_init__(self) -> None:
        table = _table(self.sizes)
        if not table or table[0][0] != 0:
            raise ValueError(f"{self.sizes!r} does not say the size at 0 examples: begin with 0:size")
        if any(left[0] >= right[0] for left, right in pairwise(table)):
            raise ValueError(f"{self.sizes!r} is not in order: the examples must grow from one entry to the next")
        # A string says the same as its mapping, is hashable, and goes into a file.
        object.__setattr__(self, "sizes", " ".join(f"{start}:{size}" for start, size in table))

    def at(self, examples: int) -> float:
        assert isinstance(self.sizes, str)
        return float([size for start, size in _parsed(self.sizes) if start <= examples][-1])


@dataclass(frozen=True)
class Ramp(Schedule):
    """From one size to another over so many examples, then constant.

    A size that grows by the factor γ at every step, as in Friedlander & Schmidt (2012), grows by γ − 1 with every
    example: it is this line, of slope γ − 1.

    Args:
        start: the size at 0 examples.
        end: the size from ``examples`` on; may be the smaller one.
        examples: the length of the ramp.
        shape: ``"linear"``, ``"cosine"`` (slow at both ends), or ``"geometric"`` (a constant factor per example).
        power: of the linear shape: x^power of the way after the part x.
    """

    start: float
    end: float
    examples: Amount
    shape: Literal["linear", "cosine", "geometric"] = "linear"
    power: float = 1.0

    def __post_init__(self) -> None:
        require_positive("start", self.start)
        require_positive("end", self.end)
        require_positive("power", self.power)
        if self.shape not in ("linear", "cosine", "geometric"):
            raise ValueError(f'shape is {self.shape!r}: it must be "linear", "cosine" or "geometric"')
        if self.power != 1 and self.shape != "linear":
            raise ValueError('power is for shape="linear"')
        object.__setattr__(self, "examples", some_examples_of(self.examples))

    def at(self, examples: int) -> float:
        x = min(1.0, examples / some_examples_of(self.examples))
        if self.shape == "geometric":
            return self.start * (self.end / self.start) ** x
        way = (1 - math.cos(math.pi * x)) / 2 if self.shape == "cosine" else x**self.power
        return self.start + (self.end - self.start) * way


@dataclass(frozen=True)
class Geometric(Schedule):
    """m = start · factor^(n / every) after n examples: sizes that grow geometrically.

    By examples, not by steps: for a factor per step see ``Ramp``.

    Args:
        start: the size at 0 examples.
        factor: what the size is multiplied by ...
        every: ... every so many examples.
        stairs: all at once every so many examples, rather than little by little.
    """

    start: float
    factor: float
    every: Amount
    stairs: bool = False

    def __post_init__(self) -> None:
        require_positive("start", self.start)
        require_positive("factor", self.factor)
        object.__setattr__(self, "every", some_examples_of(self.every, "every"))

    def at(self, examples: int) -> float:
        times = examples / some_examples_of(self.every)
        exponent = math.floor(times) if self.stairs else times
        try:
            return self.start * self.factor**exponent
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Function(Schedule):
    """A function of your own from examples seen to batch size."""

    function: Callable[[int], float]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"{self.function!r} is no function from examples to a batch size")

    def at(self, examples: int) -> float:
        size = float(self.function(examples))
        if math.isnan(size) or size <= 0:
            raise ValueError(f"{self.function!r} says {size} after {examples} examples: sizes must be positive")
        return size


@dataclass(frozen=True)
class Sequential(Schedule):
    """Schedules one after another, each with its own clock that starts when its turn comes.

    Args:
        schedules: in order.
        milestones: the examples at which the second, third, … takes over: one fewer than schedules.
    """

    schedules: Sequence[Schedule]
    milestones: Sequence[Amount]

    def __post_init__(self) -> None:
        milestones = tuple(some_examples_of(n, "a milestone") for n in self.milestones)
        if not all(isinstance(schedule, Schedule) for schedule in self.schedules):
            raise TypeError("only schedules by examples can be put in sequence: Constant, Steps, Ramp, …")
        if len(self.schedules) != len(milestones) + 1:
            raise ValueError(f"{len(self.schedules)} schedules need {len(self.schedules) - 1} milestones")
        if any(left >= right for left, right in pairwise(milestones)):
            raise ValueError(f"the milestones {milestones} must grow")
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "milestones", milestones)

    def at(self, examples: int) -> float:
        turn = sum(examples_of(n) <= examples for n in self.milestones)
        start = examples_of(self.milestones[turn - 1]) if turn else 0
        return self.schedules[turn].at(examples - start)


@dataclass(frozen=True)
class Repeat(Schedule):
    """A schedule that starts again every so many examples: cycles, warm restarts.

    Args:
        schedule: what is repeated.
        every: the length of the first cycle.
        stretch: each cycle is so many times as long as the one before, and its schedule that much slower.
    """

    schedule: Schedule
    every: Amount
    stretch: float = 1.0

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)
        if not 1 <= self.stretch < math.inf:
            raise ValueError(f"stretch is {self.stretch}: it must be at least 1")
        object.__setattr__(self, "every", some_examples_of(self.every, "every"))

    def at(self, examples: int) -> float:
        start, length = 0.0, float(some_examples_of(self.every))
        slower = 1.0
        if self.stretch == 1:
            start = length * (examples // length)
        while self.stretch > 1 and examples >= start + length:
            start, length, slower = start + length, length * self.stretch, slower * self.stretch
        return self.schedule.at(math.floor((examples - start) / slower))


@dataclass(frozen=True)
class BySteps(Rule):
    """A schedule whose clock counts steps of the optimizer in place of examples.

    For schedules that are given by steps elsewhere. Steps are no measure of progress when sizes move: examples are.

    Args:
        schedule: what to follow; wherever it says examples, steps are meant.
    """

    schedule: Schedule
    measures = False

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)

    def first_batch_size(self) -> float | None:
        return self.schedule.at(0)

    def remember(self, memory: Mapping[str, float] | None, estimates: Estimates) -> Mapping[str, float] | None:
        return {"steps": 1.0 if memory is None else memory["steps"] + 1}

    def __call__(self, estimates: Estimates) -> float:
        return self.schedule.at(0 if estimates.memory is None else int(estimates.memory["steps"]))


def _check_schedule(schedule: object) -> None:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"{schedule!r} is no schedule by examples: Constant, Steps, Ramp, …")


@functools.lru_cache(maxsize=64)
def _parsed(sizes: str) -> tuple[tuple[int, int], ...]:
    """A table as ``Steps`` writes it; asked for at every step, so it is read but once."""
    return tuple(_table(sizes))


def _table(sizes: str | Mapping[Amount, int]) -> list[tuple[int, int]]:
    entries: list[tuple[Amount, Amount, str]]
    if isinstance(sizes, Mapping):
        entries = [(start, size, f"{start}: {size}") for start, size in sizes.items()]
    elif isinstance(sizes, str):
        entries = []
        for entry in sizes.replace(",", " ").split():
            start, colon, size = entry.partition(":")
            if not colon:
                raise ValueError(f"{entry!r} in {sizes!r} is no examples:size, such as 100k:64")
            entries.append((start, size, entry))
    else:
        raise TypeError(f'{sizes!r} is no schedule: write "0:32 100k:64", or a mapping from examples to sizes')
    return [
        (examples_of(start, f"the start of {entry!r}"), some_examples_of(size, f"the size of {entry!r}"))
        for start, size, entry in entries
    ]
