"""The exponential moving average of Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExponentialAverage:
    """ξ ← μ ξ + (1 − μ) x, starting at 0, for a vector of numbers averaged alike.

    Starting at 0 makes the early averages too small, all by the same factor 1 − μᵏ, which is why Algorithm 1
    need not correct them: its ratio ξ / F_avg is free of it. ``weight`` is that factor, so that ``mean``
    is the same average without it: fit to be looked at, and to have a floor subtracted from.
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
