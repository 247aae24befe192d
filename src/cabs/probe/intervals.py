"""95% intervals from a few tens of batches, by leaving one of them out at a time (the jackknife)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, fmean

LEVEL = 0.95
"""How often an interval holds the true value, over many probes."""


@dataclass(frozen=True)
class Interval:
    """An estimate and what it may be: with 95% confidence between ``low`` and ``high``, which may be infinite."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """The same in another unit."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def jackknife(of: Callable[[int | None], float], count: int) -> Interval:
    """The interval of a number that can be had from all batches but one.

    Args:
        of: the number, without the batch of this index; of all batches for None.
        count: how many batches there are.
    """
    value, others = of(None), [of(left_out) for left_out in range(count)]
    mean = fmean(others)
    error = math.sqrt((count - 1) / count * sum((other - mean) ** 2 for other in others))
    reach = student(count - 1) * error
    return Interval(value, value - reach, value + reach)


def positive(of: Callable[[int | None], float], count: int) -> Interval:
    """The same for a number that cannot be negative: the interval is one of its logarithm."""
    if min(of(left_out) for left_out in (None, *range(count))) <= 0:  # no noise at all, say
        found = jackknife(of, count)
        return Interval(found.value, max(0.0, found.low), max(0.0, found.high))
    found = jackknife(lambda left_out: math.log(of(left_out)), count)
    return Interval(math.exp(found.value), math.exp(found.low), math.exp(found.high))


def inverse(found: Interval) -> Interval:
    """The interval of 1/x, for an x that is positive but may look negative: then 1/x has no upper end."""
    reach = found.high - found.value
    return Interval(_over(found.value), _over(max(found.high, reach)), _over(found.low))


def _over(x: float) -> float:
    return 1 / x if x > 0 else math.inf


def student(freedom: int) -> float:
    """The quantile of Student's t that belongs to the level, by the expansion in 1/freedom (from 4 on within 0.5%)."""
    z, n = NormalDist().inv_cdf((1 + LEVEL) / 2), freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / n**power for power, term in enumerate(terms))
