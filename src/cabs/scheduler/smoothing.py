"""The exponential moving average of Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExponentialAverage:
    """ξ ← μ ξ + (1 − μ) x, starting at 0, for a vector of numbers averaged alike.

    Starting at 0 makes the early averages too small by a factor 1 − μᵏ. Algorithm 1 need not correct that, because it
    cancels in the ratio ξ / F_avg. ``weight`` is the factor, and ``mean`` the average without it, for display and for
    subtracting a floor.
    """

    values: tuple[float, ...]
    weight: float = 0.0

    @classmethod
    def zeros(cls, length: int) -> ExponentialAverage:
        return cls((0.0,) * length)

    def update(self, observations: tuple[float, ...], mu: float) -> ExponentialAverage:
        values = tuple(mu * value + (1 - mu) * x for value, x in zip(self.values, observations, strict=True))
        return ExponentialAverage(values, mu * self.weight + (1 - mu))

    @property
    def mean(self) -> tuple[float, ...]:
        if self.weight == 0:
            raise ValueError("nothing has been averaged yet")
        return tuple(value / self.weight for value in self.values)
