"""A batch that grows when the loss has stopped falling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from cabs.rules.amounts import examples_of, some_examples_of
from cabs.rules.base import Estimates, Rule, require_positive
from cabs.rules.schedules import Amount


@dataclass(frozen=True)
class OnPlateau(Rule):
    """Multiplies the size when nothing has improved for some examples: ReduceLROnPlateau for batches.

    An improvement is a loss below (1 − threshold) times the best, or the best less threshold where that is absolute.
    What is compared is the loss averaged over steps, or a metric of your own.

    Args:
        start: the first size.
        factor: what the size is multiplied by on a plateau.
        patience: how many examples without improvement make a plateau.
        threshold: the least improvement that counts.
        threshold_mode: ``"rel"`` or ``"abs"``.
        mode: ``"min"``, or ``"max"`` for a metric that should grow.
        cooldown: after the size has grown, so many examples go by before patience counts again.
        metric: what to compare instead of the loss, ``lambda estimates: …``; it may return a number measured elsewhere,
            such as the latest test accuracy; NaN as long as there is none.
    """

    start: float
    factor: float = 2.0
    patience: Amount = 10_000
    _: KW_ONLY
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    mode: Literal["min", "max"] = "min"
    cooldown: Amount = 0
    metric: Callable[[Estimates], float] | None = None
    measures = False

    def __post_init__(self) -> None:
        require_positive("start", self.start)
        require_positive("factor", self.factor)
        if self.factor == 1:
            raise ValueError("factor is 1: the size would never move")
        if not 0 <= self.threshold < math.inf:
            raise ValueError(f"threshold is {self.threshold}: it must not be negative")
        if self.mode not in ("min", "max") or self.threshold_mode not in ("rel", "abs"):
            raise ValueError('mode is "min" or "max", threshold_mode is "rel" or "abs"')
        object.__setattr__(self, "patience", some_examples_of(self.patience, "patience"))
        object.__setattr__(self, "cooldown", examples_of(self.cooldown, "cooldown"))

    def first_batch_size(self) -> float | None:
        return self.start

    def remember(self, memory: Mapping[str, float] | None, estimates: Estimates) -> Mapping[str, float] | None:
        value = estimates.loss if self.metric is None else self.metric(estimates)
        if self.mode == "max":
            value = -value
        now = float(estimates.examples_total)
        if memory is None:
            return {"best": value, "since": now, "size": self.start}
        best, since, size = memory["best"], memory["since"], memory["size"]
        least = self.threshold * (abs(best) if self.threshold_mode == "rel" else 1.0)
        unknown = not best < math.inf  # a metric that was not there yet: patience begins with its first number
        if unknown or value < best - least:
            return {"best": value, "since": max(now, since), "size": size}
        if now - since >= examples_of(self.patience):
            # "since" lies in the future while it cools down.
            return {"best": best, "since": now + examples_of(self.cooldown), "size": size * self.factor}
        return memory

    def __call__(self, estimates: Estimates) -> float:
        return self.start if estimates.memory is None else estimates.memory["size"]
