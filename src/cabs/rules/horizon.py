"""The noise that a run with a known end may carry on its way; docs/theory.md derives it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cabs.rules.base import Estimates, dot


@dataclass(frozen=True)
class Horizon:
    """A noise share ρ that goes by the part x of the budget that is spent, and by nothing else.

    ρ = start until x = until, then it falls geometrically to end at x = 1. Noise in steep directions is forgotten in a
    few steps, so most of the way may carry more of it, and make more steps from the same examples. Past the budget
    ρ stays at ``end``.

    Args:
        start: at most 1. At ρ = 1 the noise is all there is: from there on batches do not grow, and where tr Σ falls
            with F (no noise at the minimum) SGD does not converge.
        until: the part of the budget where ρ begins to fall.
        end: the share at the end of the budget.
    """

    start: float = 0.6
    until: float = 0.6
    end: float = 1 / 8

    def __post_init__(self) -> None:
        if not 0 < self.end <= self.start <= 1:
            raise ValueError(f"the horizon goes from {self.start} to {self.end}: shares are in (0, 1] and fall")
        if not 0 <= self.until < 1:
            raise ValueError(f"until is {self.until}: it is a part of the budget, in [0, 1)")

    def share(self, spent: float) -> float:
        """ρ after the part ``spent`` of the budget."""
        fallen = (min(max(spent, self.until), 1.0) - self.until) / (1 - self.until)
        return self.start * (self.end / self.start) ** fallen


WINDOW = 1 / 5
"""The part of the budget over which ‖∇F‖² and F are averaged: one step's ‖∇F‖² is mostly noise."""


def forgetting(memory: Mapping[str, float] | None, estimates: Estimates, floor: float, budget: int) -> dict[str, float]:
    """Averages of α‖∇F‖² and F − F_*, whose quotient is twice αh: the part of the loss that a step forgets.

    For a quadratic ‖∇F‖²/2F is the mean of the curvatures, weighted by their parts of the loss. Both averages start at
    0, which cancels.
    """
    if not estimates.true_gradient_norms_squared:
        raise ValueError(
            "a budget needs ‖∇F‖², which is not known here: give a Horizon, whose ρ goes by examples alone"
        )
    before = memory or {}
    kept = math.exp(-max(estimates.batch_size, 1) / (WINDOW * budget))
    decrease = dot(estimates.learning_rates, estimates.true_gradient_norms_squared)
    return {
        "decrease": kept * before.get("decrease", 0.0) + (1 - kept) * decrease,
        "loss": kept * before.get("loss", 0.0) + (1 - kept) * (estimates.loss - floor),
    }


def share_of_noise(rate: float, size: int, left: float, budget: int) -> float:
    """ρ that noise may have with ``left`` examples to go: noise / signal = ∛(αh · steps left · part left).

    Args:
        rate: αh. Measured too small, it is taken as that which forgets once in the whole budget.
        size: m of the step just made: there are left/m more of these.
        left: what is left of the budget; past it, every step is taken for the last.
        budget: all of it.
    """
    size = max(size, 1)
    rate = min(max(rate, size / budget), 1.0)
    left = max(left, size)
    odds = (rate * left / size * min(left / budget, 1.0)) ** (1 / 3)
    # At rest all is noise, and ρ is 1 − αh/2: that is the share of which this is a part.
    return odds / (1 + odds) * (1 - rate / 2)


def fit(size: float, left: float, least: float = 1, most: float = math.inf) -> float:
    """The least size from ``size`` on of which a whole number fills what is left of a budget; else what is left.

    A tiny last batch would end the run with the noise of a tiny batch. Only sizes between ``least`` and ``most`` count:
    as many steps are left as make one of these, if any number does.
    """
    if left <= 0 or size <= 0 or math.isinf(left):
        return size
    steps = max(math.floor(left / size), math.ceil(left / most))
    return left / max(1, min(steps, math.floor(left / least)))
