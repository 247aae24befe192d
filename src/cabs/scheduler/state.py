"""All that the next steps depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cabs.scheduler.costs import StepCosts
from cabs.scheduler.requirements import check_state
from cabs.scheduler.smoothing import ExponentialAverage
from cabs.scheduler.step import Measurement

VERSION = 3


@dataclass(frozen=True, kw_only=True)
class State:
    """What a scheduler knows after a step; replaced as a whole, so that no step is ever half made.

    Attributes:
        batch_size: the size of the next step.
        steps: how many steps were made.
        examples_total: how many examples they had.
        averages: F, and tr Σ, ‖g‖² and ‖∇F‖² of each parameter group, smoothed.
        held: the last measurement.
        unmeasured: how many more steps go by with it held.
        memory: what the rule remembers.
        costs: what steps of different sizes took.
    """

    batch_size: int
    steps: int = 0
    examples_total: int = 0
    averages: ExponentialAverage | None = None
    held: Measurement | None = None
    unmeasured: int = 0
    memory: Mapping[str, float] | None = None
    costs: StepCosts = field(default_factory=StepCosts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "version": VERSION,
            "steps": self.steps,
            "examples_total": self.examples_total,
            "last_batch_size": self.batch_size,
            "averages": None if self.averages is None else list(self.averages.values),
            "weight": 0.0 if self.averages is None else self.averages.weight,
            "held": None if self.held is None else self.held.state_dict(),
            "unmeasured": self.unmeasured,
            "memory": None if self.memory is None else dict(self.memory),
            "costs": self.costs.state_dict(),
        }

    @classmethod
    def from_dict(cls, state: Any, numbers: int, least: int, most: int) -> State:
        """The inverse of ``to_dict``.

        Args:
            state: what ``to_dict`` gave.
            numbers: how many numbers are averaged.
            least: the smallest size it may hold.
            most: the largest.

        Raises:
            ValueError: it is not a scheduler's state, or that of another kind of run.
        """
        check_state(state, VERSION, set(cls(batch_size=0).to_dict()), numbers, least, most)
        averages = state["averages"]
        return cls(
            batch_size=int(state["last_batch_size"]),
            steps=int(state["steps"]),
            examples_total=int(state["examples_total"]),
            averages=None if averages is None else ExponentialAverage(tuple(averages), float(state["weight"])),
            held=None if state["held"] is None else Measurement.of_state(state["held"]),
            unmeasured=int(state["unmeasured"]),
            memory=None if state["memory"] is None else dict(state["memory"]),
            costs=StepCosts.of_state(state["costs"]),
        )
