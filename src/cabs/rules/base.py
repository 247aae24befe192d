"""What a rule is given and what it answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """What is known after a step, smoothed over steps; tuples have one entry a parameter group.

    Attributes:
        loss: F, the objective without penalties.
        learning_rates: α of each group as the coupling has it: lr for SGD, lr/(1 − β) with momentum; lr where no
            coupling is known, which coupled rules do without.
        variances: tr Σ of each group, the variance of a single example's gradient; tr(PΣ) for coupled rules.
        gradient_norms_squared: ‖g‖² of each group: the mini-batch gradient; gᵀPg for coupled rules, and so below.
        true_gradient_norms_squared: ‖∇F‖² of each group, estimated as ‖g‖² less the part that is noise
            (eq:expectation_of_norm_g); may be negative when noise dominates.
        dot_variance: Var_i⟨g_i, g⟩ over the examples of a batch, all groups together; None where it is not measured.
        batch_size: m of the step just made.
        examples_total: the examples seen so far, this step's included: the clock of everything.
        dataset_size: M, the examples there are; None for a stream.
        step_cost: c₀ and c₁, the seconds of a step of m examples being c₀ + c₁ m; None where not (yet) measured.
        trial_factor: what rules that want it measured multiply their size by for now: steps of other sizes tell c₁.
            None where nothing is tried.
        bounds: the least and the largest size that can be chosen.
        memory: what the rule's ``remember`` returned.
    """

    loss: float
    learning_rates: tuple[float, ...]
    variances: tuple[float, ...]
    gradient_norms_squared: tuple[float, ...] = ()
    true_gradient_norms_squared: tuple[float, ...] = ()
    dot_variance: float | None = None
    batch_size: int = 0
    examples_total: int = 0
    dataset_size: int | None = None
    step_cost: tuple[float, float] | None = None
    trial_factor: float | None = None
    bounds: tuple[float, float] = (1, math.inf)
    memory: Mapping[str, float] | None = None


class Rule(ABC):
    """A rule for the batch size. Subclass it to try one of your own."""

    measures: bool = True
    """Whether the rule looks at the gradient variance; if not, nothing is measured and nothing is paid."""

    coupled: bool = False
    """Whether variances are those of the optimizer's step, tr(PΣ), as CABS wants them; else they are plain tr Σ."""

    measures_dots: bool = False
    """Whether the rule needs Var_i⟨g_i, g⟩, which norms do not tell."""

    times_steps: bool = False
    """Whether the rule wants the measured cost of a step."""

    unbiased: bool = False
    """Whether tr Σ is to be averaged free of bias; else it is the paper's, short by a factor (m − 1)/m."""

    budget: int | None = None
    """The examples that training will see, where the rule minds its end."""

    loss_floor: float | None = None
    """The value the loss must stay above for the rule to make sense; None where the loss plays no part."""

    def first_batch_size(self) -> float | None:
        """The size of the first step, before anything is known; None leaves it to the loader."""
        return None

    def remember(self, memory: Mapping[str, float] | None, estimates: Estimates) -> Mapping[str, float] | None:
        """What to keep for the next steps, given what was kept so far; rules themselves keep nothing.

        Called once a step before the rule is. The scheduler holds the answer, puts it into ``estimates.memory`` and
        saves it with its state.
        """
        return None

    @abstractmethod
    def __call__(self, estimates: Estimates) -> float:
        """The batch size, neither rounded nor clipped."""


def noise_share(estimates: Estimates, loss_floor: float = 0.0) -> float:
    """ρ = Σ α tr Σ / (4 m (F − F_*)): the share of the present loss that is gradient noise.

    Near a minimum, SGD hovers above it by about α tr Σ / 4m. A quarter is what CABS keeps; a constant size that has
    stopped improving is near 1; far below a quarter the batch is larger than the learning rate has use for.
    ``estimates`` are those of a coupled rule, and ``batch_size`` must be set.
    """
    if estimates.batch_size < 1:
        raise ValueError(f"batch_size is {estimates.batch_size}: the noise share needs the size of the step")
    return ratio(
        dot(estimates.learning_rates, estimates.variances), 4 * estimates.batch_size * (estimates.loss - loss_floor)
    )


def noise_scale(estimates: Estimates) -> float:
    """tr Σ / ‖∇F‖²: the simple noise scale of McCandlish, Kaplan, Amodei et al. (2018)."""
    return ratio(sum(estimates.variances), sum(estimates.true_gradient_norms_squared))


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


def dot(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def ratio(noise: float, signal: float) -> float:
    # No signal left in the noise asks for all the examples there are; no noise either asks for none.
    if signal > 0:
        return noise / signal
    return math.inf if noise > 0 else 0.0


def require_positive(what: str, value: float, hint: str = "") -> None:
    """Refuses what is not a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{what} is {value!r}: it must be a positive number{hint}")
