"""The noise that a run with a known end may carry on its way; docs/theory.md derives it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Horizon:
    """The noise share ρ as a function of the part x of the budget that is spent.

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


HORIZON = Horizon()
"""The best compromise over many noisy quadratics; docs/theory.md says how good it is."""


def fit(size: float, left: float, least: float = 1, most: float = math.inf) -> float:
    """The least size from ``size`` on of which a whole number fills what is left of a budget; else what is left.

    A tiny last batch would end the run with the noise of a tiny batch. Only sizes between ``least`` and ``most`` count:
    as many steps are left as make one of these, if any number does.
    """
    if left <= 0 or size <= 0 or math.isinf(left):
        return size
    steps = max(math.floor(left / size), math.ceil(left / most))
    return left / max(1, min(steps, math.floor(left / least)))
