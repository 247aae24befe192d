"""What a step showed: a measurement of its gradients, and the record that users log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """tr Σ and ‖g‖² as one step's gradients showed them, by parameter group.

    Attributes:
        step: which step, counted from 1.
        examples: how many examples that step had.
        variances: tr Σ of each group.
        norms: ‖g‖² of each group.
        biased: whether tr Σ is the paper's estimate, which is short by a factor (m − 1)/m, or free of bias.
        dots: Var_i⟨g_i, g⟩ of all groups together, alone in a tuple; empty where it is not measured.
    """

    step: int
    examples: int
    variances: tuple[float, ...]
    norms: tuple[float, ...]
    biased: bool = True
    dots: tuple[float, ...] = ()

    @property
    def true_norms(self) -> tuple[float, ...]:
        """‖∇F‖² of each group: E‖g‖² = ‖∇F‖² + tr Σ / m, with the unbiased tr Σ."""
        count = self.examples - 1 if self.biased else self.examples
        return tuple(norm - variance / count for norm, variance in zip(self.norms, self.variances, strict=True))

    @property
    def unbiased_variances(self) -> tuple[float, ...]:
        """tr Σ of each group, free of bias: of two examples it is twice the paper's."""
        if not self.biased or self.examples < 2:
            return self.variances
        return tuple(variance * self.examples / (self.examples - 1) for variance in self.variances)

    def numbers(self, unbiased: bool = False) -> tuple[tuple[float, ...], ...]:
        """What is averaged: tr Σ, ‖g‖² and ‖∇F‖² of each group, and Var_i⟨g_i, g⟩ if it is measured."""
        return self.unbiased_variances if unbiased else self.variances, self.norms, self.true_norms, self.dots

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "variances": list(self.variances), "norms": list(self.norms), "dots": list(self.dots)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Measurement:
        """The inverse of ``state_dict``."""
        return cls(
            step=int(state["step"]),
            examples=int(state["examples"]),
            variances=tuple(map(float, state["variances"])),
            norms=tuple(map(float, state["norms"])),
            biased=bool(state["biased"]),
            dots=tuple(map(float, state["dots"])),
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """The step just made, and what followed from it, for logging.

    Attributes:
        examples: how many examples the step had, on all processes together.
        examples_total: how many all steps so far had, this one included.
        loss: F of the step.
        loss_average: F smoothed.
        variance: tr Σ as last measured; NaN if the rule measures nothing.
        variance_average: tr Σ smoothed; without the paper's bias in small batches where the cost of a step is measured.
        gradient_norm_squared: ‖g‖² as last measured.
        measured: whether these were measured at this very step, or are held from an earlier one.
        noise_share: α tr Σ / (4 m F), the share of the present loss that is gradient noise; NaN if nothing is measured.
        noise_scale: tr Σ / ‖∇F‖², both smoothed: batches far above it gain little by more examples; NaN if nothing is
            measured. Of a coupled rule both are weighted by P, as everything it measures; infinite where the gradient
            is lost in the noise.
        raw_batch_size: what the rule asked for, neither rounded nor clipped.
        batch_size: the size chosen for the next step.
        clipped: the bound that decided, if one did.
        step_cost: c₀ and c₁ of a step's seconds c₀ + c₁m, where the rule wants to know and it could be measured.
    """

    examples: int
    examples_total: int
    loss: float
    loss_average: float
    variance: float
    variance_average: float
    gradient_norm_squared: float
    measured: bool
    noise_share: float
    noise_scale: float
    raw_batch_size: float
    batch_size: int
    clipped: Literal["min", "max"] | None
    step_cost: tuple[float, float] | None = None


def bound_that_decided(raw: float, size: int, multiple_of: int) -> Literal["min", "max"] | None:
    """Which bound made a size what it is, if it is not the multiple nearest to what the rule asked for."""
    if abs(raw - size) <= multiple_of / 2:
        return None
    return "min" if raw < size else "max"
