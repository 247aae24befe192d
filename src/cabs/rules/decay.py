"""Batches that grow where a learning rate would decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal, cast

import torch

from cabs.clocks import factors_of
from cabs.rules.amounts import some_examples_of
from cabs.rules.base import require_positive
from cabs.rules.schedules import Amount, Schedule

LRScheduler = torch.optim.lr_scheduler.LRScheduler


@dataclass(frozen=True)
class DecayToBatch(Schedule):
    """m = start / s, where a schedule would have the learning rate at s times its first.

    SGD's noise depends on α/m, so the learning rate may stay where it is (Smith, Kindermans, Ying & Le 2017). Adam's
    depends on α/√m: there the learning rate still decays, by √s, and the batch grows by 1/s (Meterez et al. 2025).
    ``learning_rate_factor`` says what is left for the learning rate. Warm-ups stay with the learning rate: leave them
    out of the schedule.

    Args:
        schedule: a function of the examples seen that is proportional to the learning rate, or with ``every`` a torch
            scheduler, ``lambda optimizer: CosineAnnealingLR(optimizer, 100)``.
        start: the size where the schedule starts.
        optimizer: ``"sgd"`` or ``"adam"``: which of the two.
        every: the examples that count as one step of the torch scheduler.
    """

    schedule: Callable[[int], float] | Callable[[torch.optim.Optimizer], LRScheduler]
    start: float
    _: KW_ONLY
    optimizer: Literal["sgd", "adam"] = "sgd"
    every: Amount | None = None

    def __post_init__(self) -> None:
        require_positive("start", self.start)
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f'optimizer is {self.optimizer!r}: it must be "sgd" or "adam"')
        if not callable(self.schedule):
            raise TypeError(f"{self.schedule!r} is neither a function of examples nor one that makes a torch scheduler")
        if self.every is not None:
            object.__setattr__(self, "every", some_examples_of(self.every, "every"))
        require_positive("the schedule at 0 examples", self._rate(0))

    def decay(self, examples: int) -> float:
        """s: the learning rate after so many examples, relative to the first."""
        s = self._rate(examples) / self._rate(0)
        if not 0 <= s < math.inf:
            raise ValueError(f"the schedule says {s} after {examples} examples: learning rates are not negative")
        return s

    def learning_rate_factor(self, examples: int) -> float:
        """What to multiply the learning rate by: 1 for SGD, √s for Adam; fit for ``LambdaLR`` in ``ByExamples``."""
        return 1.0 if self.optimizer == "sgd" else math.sqrt(self.decay(examples))

    def at(self, examples: int) -> float:
        s = self.decay(examples)
        return self.start / s if s > 0 else math.inf

    def _rate(self, examples: int) -> float:
        if self.every is None:
            return float(cast(Callable[[int], float], self.schedule)(examples))
        make = cast(Callable[[torch.optim.Optimizer], LRScheduler], self.schedule)
        return factors_of(make, some_examples_of(self.every))(examples)
