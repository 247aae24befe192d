"""The paper's rules for the batch size, as pure functions of a few smoothed numbers.

A rule answers one question: given what a step showed, how many examples should the next one take? It
knows nothing of models, loaders, rounding or bounds. Equation names are those of the paper's source.

With several parameter groups the step is w_g ← w_g − α_g g_g. The sums over g below are what the paper's
derivations give for such a step; with one group they are the paper's equations to the letter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """What is known after a step, smoothed over steps; tuples have one entry a parameter group.

    Attributes:
        loss: F, the objective without penalties.
        learning_rates: α of each group.
        variances: tr Σ of each group: the variance of a single example's gradient.
        gradient_norms_squared: ‖g‖² of each group: the mini-batch gradient.
        true_gradient_norms_squared: ‖∇F‖² of each group, estimated as ‖g‖² less the part that is noise
            (eq:expectation_of_norm_g); may be negative when noise dominates.
    """

    loss: float
    learning_rates: tuple[float, ...]
    variances: tuple[float, ...]
    gradient_norms_squared: tuple[float, ...] = ()
    true_gradient_norms_squared: tuple[float, ...] = ()


class Rule(ABC):
    """A rule for the batch size. Subclass it to try one of your own."""

    measures = True
    """Whether the rule looks at the gradient variance; if not, nothing is measured and nothing is paid."""

    loss_floor: float | None = None
    """The value the loss must stay above for the rule to make sense; None where the loss plays no part."""

    @abstractmethod
    def __call__(self, estimates: Estimates) -> float:
        """The batch size, neither rounded nor clipped."""


@dataclass(frozen=True)
class CABS(Rule):
    """m = α tr Σ / F (eq:CABS_rule), or α tr Σ / (F − F_*) with a known floor (eq:CABS_with_bound).

    Args:
        loss_floor: F_*, a lower bound of the loss that training cannot get below.
    """

    loss_floor: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss_floor):
            raise ValueError(f"loss_floor is {self.loss_floor}: it must be a finite number below the loss")

    def __call__(self, estimates: Estimates) -> float:
        return _dot(estimates.learning_rates, estimates.variances) / (estimates.loss - self.loss_floor)


@dataclass(frozen=True)
class NormTest(Rule):
    """m = tr Σ / (θ² ‖g‖²) (eq:noisy_grad_norm_rule): the paper's Competitor, blind to the learning rate.

    Args:
        theta: the noise tolerated, relative to the gradient; the paper tries 0.6, 0.8 and 1.0.
    """

    theta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise ValueError(f"theta is {self.theta}: it must be a positive number (the paper tries 0.6 to 1)")

    def __call__(self, estimates: Estimates) -> float:
        return _ratio(sum(estimates.variances), self.theta**2 * sum(estimates.gradient_norms_squared))


@dataclass(frozen=True)
class GainPerCost(Rule):
    """m = 2Lα / (2 − Lα) · tr Σ / ‖∇F‖² (eq:lipschitz_bound_rule): the most expected gain per example.

    Args:
        lipschitz: L, the Lipschitz constant of the gradient (eq:lipschitz_property).
    """

    lipschitz: float

    def __post_init__(self) -> None:
        if not 0 < self.lipschitz < math.inf:
            raise ValueError(f"lipschitz is {self.lipschitz}: it must be a positive number")

    def __call__(self, estimates: Estimates) -> float:
        L = self.lipschitz
        if any(L * alpha >= 2 for alpha in estimates.learning_rates):
            raise ValueError(
                f"the learning rate {max(estimates.learning_rates)} is at or above 2/L = {2 / L:g}, where no "
                "batch is large enough for a step that gains (eq:alpha_max_with_noise): lower it, or lipschitz"
            )
        # U(m) = gain/m − noise/m² is greatest at m = 2 noise / gain (the paper's appendix).
        noise = sum(
            L * alpha**2 / 2 * v for alpha, v in zip(estimates.learning_rates, estimates.variances, strict=True)
        )
        gain = sum(
            (alpha - L * alpha**2 / 2) * n
            for alpha, n in zip(estimates.learning_rates, estimates.true_gradient_norms_squared, strict=True)
        )
        return _ratio(2 * noise, gain)


@dataclass(frozen=True)
class Constant(Rule):
    """The same batch size at every step: what most people use, and the baseline to beat."""

    batch_size: int
    measures = False

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size!r}: it must be a positive integer")

    def __call__(self, estimates: Estimates) -> float:
        return float(self.batch_size)


def round_and_clip(size: float, minimum: int, maximum: int, multiple_of: int = 1) -> int:
    """Algorithm 1's last line: the nearest integer (halves go up), then into [minimum, maximum].

    With ``multiple_of`` only its multiples count, so that the bounds are the outermost of these.
    """
    least, most = -(-minimum // multiple_of), maximum // multiple_of
    if size >= most * multiple_of:
        return most * multiple_of
    if size <= least * multiple_of:
        return least * multiple_of
    return multiple_of * math.floor(size / multiple_of + 0.5)


def _dot(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _ratio(noise: float, signal: float) -> float:
    # No signal left in the noise asks for all the examples there are; no noise either asks for none.
    if signal > 0:
        return noise / signal
    return math.inf if noise > 0 else 0.0
