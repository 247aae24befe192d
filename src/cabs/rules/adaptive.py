"""Rules that look at the gradients: the paper's, and related ones. Equation names are those of the paper's source.

A rule answers one question: given what a step showed, how many examples should the next one take? It
knows nothing of models, loaders, rounding or bounds.

With several parameter groups the step is w_g ← w_g − α_g g_g. The sums over g below are what the paper's
derivations give for such a step; with one group they are the paper's equations to the letter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from cabs.rules.base import Estimates, Rule, dot, noise_scale, ratio, require_positive
from cabs.rules.horizon import Horizon, fit, forgetting, share_of_noise


@dataclass(frozen=True)
class CABS(Rule):
    """m = α tr Σ / F (eq:CABS_rule), or α tr Σ / (F − F_*) with a known floor (eq:CABS_with_bound).

    Options apply in this order; docs/theory.md derives each:

    - ρ = noise_share, or the horizon's ρ where there is a budget: m = α tr Σ / (4ρ(F − F_*)). A quarter is the paper's.
    - small data, M examples: m ← m / (1 + m/2M).
    - a step that costs c₀ + c₁m: m ← m/2 · (1 + √(1 + 2(c₀/c₁)/m)).
    - a budget: the next larger size of which a whole number fills what is left of it; and never above M.

    Args:
        loss_floor: F_*, a lower bound of the loss that training cannot get below.
        noise_share: ρ, the share of the loss that may be gradient noise: by default a quarter, as in the paper, and
            half with a measured cost. A budget moves it.
        budget: the examples that training will see. Past them, every step is taken for the last one.
        horizon: how ρ moves within the budget. By default the smaller of two is taken, whichever asks for less noise:
            what is measured, and ``Horizon()``, which goes by examples alone. ``"measured"`` is the first alone, for
            losses that go down to ``loss_floor``; a ``Horizon(...)`` of your own is used alone.
        cost: ``"examples"``, as in the paper; ``"measured"`` in seconds while training (by examples until c₀ and c₁
            are known, in the first steps 16 at least, with larger ones to tell them; tr Σ is free of bias
            then, no size is below c₀/4c₁, up to which examples cost next to nothing, and sizes recur); or (c₀, c₁)
            in any unit, and nothing but the formula.
        small_data: correct for batches drawn without replacement, where the loader knows M.
    """

    loss_floor: float = 0.0
    _: KW_ONLY
    noise_share: float | None = None
    budget: int | None = None
    horizon: Horizon | Literal["measured"] | None = None
    cost: Literal["examples", "measured"] | tuple[float, float] = "examples"
    small_data: bool = False
    coupled = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss_floor):
            raise ValueError(f"loss_floor is {self.loss_floor}: it must be a finite number below the loss")
        if self.noise_share is not None:
            require_positive("noise_share", self.noise_share, ", a quarter in the paper")
        if self.budget is not None:
            if isinstance(self.budget, bool) or not isinstance(self.budget, int) or self.budget < 1:
                raise ValueError(
                    f"budget is {self.budget!r}: it must be a positive number of examples, or None for no end"
                )
            if self.noise_share not in (None, PAPERS_SHARE):
                raise ValueError("a budget moves the noise share: give noise_share or budget, or a horizon of your own")
        if not (self.horizon in (None, "measured") or isinstance(self.horizon, Horizon)):
            raise ValueError(f'horizon is {self.horizon!r}: it must be a Horizon(...), "measured", or None for both')
        if self.horizon is not None and self.budget is None:
            raise ValueError("a horizon needs a budget, the examples that training will see: give budget as well")
        check_cost(self.cost)
        object.__setattr__(self, "times_steps", self.cost == "measured")
        # It takes the place of the least size, which kept batches so large that bias did not matter.
        object.__setattr__(self, "unbiased", self.cost == "measured")

    def __call__(self, estimates: Estimates) -> float:
        most = estimates.dataset_size if self.small_data else None
        signal = 4 * self.share(estimates) * (estimates.loss - self.loss_floor)
        m = ratio(dot(estimates.learning_rates, estimates.variances), signal)
        if most is not None:
            m = without_replacement(m, most)
        cost = estimates.step_cost if self.cost == "measured" else self.cost
        if isinstance(cost, tuple):
            m = per_cost(m, *cost)
            if self.cost == "measured":
                m = recurring(max(m, HARDLY_LONGER * cost[0] / cost[1]))
        elif self.cost == "measured" and estimates.trial_factor is not None:
            m = trial_size(m, estimates.trial_factor, *estimates.bounds)
        if most is not None:
            m = min(m, most)
        if self.budget is None:
            return m
        least, largest = estimates.bounds
        return fit(m, self.budget - estimates.examples_total, least, largest if most is None else min(largest, most))

    def remember(self, memory: Mapping[str, float] | None, estimates: Estimates) -> Mapping[str, float] | None:
        if self.budget is None or isinstance(self.horizon, Horizon):
            return None
        return forgetting(memory, estimates, self.loss_floor, self.budget)

    def share(self, estimates: Estimates) -> float:
        """ρ, the share of the loss that may be noise in the next step."""
        if self.budget is None:
            share = SHARE_BY_SECONDS if self.cost == "measured" else PAPERS_SHARE
            return share if self.noise_share is None else self.noise_share
        spent = estimates.examples_total / self.budget
        if isinstance(self.horizon, Horizon):
            return self.horizon.share(spent)
        averages = estimates.memory or self.remember(None, estimates) or {}
        rate = ratio(averages["decrease"], 2 * averages["loss"])
        measured = share_of_noise(rate, estimates.batch_size, self.budget - estimates.examples_total, self.budget)
        # Where the loss has a floor that nobody gave, what is measured allows too much noise until the very end.
        return measured if self.horizon == "measured" else min(measured, Horizon().share(spent))

    def extended(self, budget: int) -> CABS:
        """The same with another budget; where it is larger, noise may come back until the new end is near."""
        return dataclasses.replace(self, budget=budget)


def without_replacement(m: float, dataset_size: int) -> float:
    """The best size where the variance of a batch is Σ/m · (M − m)/(M − 1), given the best where it is Σ/m."""
    return m / (1 + m / (2 * dataset_size)) if math.isfinite(m) else 2.0 * dataset_size


def per_cost(m: float, c0: float, c1: float) -> float:
    """The best size where a step costs c₀ + c₁m, given the best where it costs m."""
    if m <= 0 or math.isinf(m):
        return m
    return m / 2 * (1 + math.sqrt(1 + 2 * (c0 / c1) / m)) if c1 > 0 else math.inf


PAPERS_SHARE, SHARE_BY_SECONDS = 1 / 4, 1 / 2
"""Noise that is soon forgotten, as in steep directions, does not hold a run back by what it costs the next step."""

HARDLY_LONGER = 1 / 4
"""With a measured cost steps are never so small that a smaller one would take less than four fifths of the time.

The formula would save that fifth where α tr Σ / F is below 1, as on the first plateau of a network, whose F is large
and whose gradients are small; but there F says little of them, and the noise of a few examples can undo the network.
"""

SIZES_AN_OCTAVE = 8


def recurring(m: float) -> float:
    """The nearest of the sizes 2^(k/8): a batch whose shapes were there before takes less time than one of new shapes.

    Kernels are set up for each new shape, and what is known of owners goes by shapes. The gain per second is flat about
    its maximum: a sixteenth of an octave beside it, no more than a fifth of a percent is lost.
    """
    if m <= 0 or math.isinf(m):
        return m
    return float(2 ** (round(SIZES_AN_OCTAVE * math.log2(m)) / SIZES_AN_OCTAVE))


UNTOLD = 16
"""The least size in trials: the paper's, which guards against steps that are too small to pay."""


def trial_size(m: float, factor: float, least: float, most: float) -> float:
    """A size that is ``factor`` times as large as the one that would be chosen, or as small where that is too large."""
    chosen = min(max(m, least, UNTOLD), most)
    return chosen * factor if chosen * factor <= most else max(chosen / factor, least)


def check_cost(cost: object) -> None:
    if cost in ("examples", "measured"):
        return
    numbers = (
        isinstance(cost, tuple)
        and len(cost) == 2
        and all(isinstance(c, int | float) and 0 <= c < math.inf for c in cost)
    )
    if not numbers or cost == (0, 0):
        raise ValueError(
            f'cost is {cost!r}: it must be "examples", "measured", or (c0, c1) with a step of m examples costing '
            "c0 + c1·m, neither negative"
        )


@dataclass(frozen=True)
class NormTest(Rule):
    """m = tr Σ / (θ² ‖g‖²) (eq:noisy_grad_norm_rule): the paper's Competitor, blind to the learning rate.

    Args:
        theta: the noise tolerated, relative to the gradient; the paper tries 0.6, 0.8 and 1.0.
    """

    theta: float = 1.0

    def __post_init__(self) -> None:
        require_positive("theta", self.theta, " (the paper tries 0.6 to 1)")

    def __call__(self, estimates: Estimates) -> float:
        return ratio(sum(estimates.variances), self.theta**2 * sum(estimates.gradient_norms_squared))


@dataclass(frozen=True)
class GainPerCost(Rule):
    """m = 2Lα / (2 − Lα) · tr Σ / ‖∇F‖² (eq:lipschitz_bound_rule): the most expected gain per example.

    Args:
        lipschitz: L, the Lipschitz constant of the gradient (eq:lipschitz_property); with an optimizer whose P is not
            1, that of P^{1/2} ∇F in the coordinates P^{-1/2} w, of which all else here is then too.
    """

    lipschitz: float
    coupled = True

    def __post_init__(self) -> None:
        require_positive("lipschitz", self.lipschitz)

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
        return ratio(2 * noise, gain)


@dataclass(frozen=True)
class NoiseScale(Rule):
    """m = tr Σ / ‖∇F‖²: the simple noise scale of McCandlish, Kaplan, Amodei et al. (2018).

    Twice the examples of this size make nearly twice the progress per step below it, and hardly any more above it. Both
    numbers are averaged over steps before the quotient is taken; ‖∇F‖² is ‖g‖² without its noise.
    """

    def __call__(self, estimates: Estimates) -> float:
        return noise_scale(estimates)


@dataclass(frozen=True)
class InnerProductTest(Rule):
    """m = Var_i⟨g_i, g⟩ / (θ²‖g‖⁴): Bollapragada, Byrd & Nocedal (2018), with the variance of the sample.

    Asks only that g be a direction of descent, where the norm test bounds its whole length. With ν the size is also
    at least (tr Σ − Var_i⟨g_i, g⟩/‖g‖²) / (ν²‖g‖²), their orthogonality test: the rest of the variance.

    Norms alone do not tell Var_i⟨g_i, g⟩. All they say is that it is at most ‖g‖² tr Σ, which is the norm test.

    Args:
        theta: the deviation tolerated along the gradient; theirs is 0.9.
        nu: the deviation tolerated across it; theirs is 5.84 (tan 80°). None leaves that test out.
    """

    theta: float = 0.9
    nu: float | None = 5.84
    measures_dots = True

    def __post_init__(self) -> None:
        require_positive("theta", self.theta, " (the authors use 0.9)")
        if self.nu is not None:
            require_positive("nu", self.nu, " (the authors use 5.84), or None")

    def __call__(self, estimates: Estimates) -> float:
        along = estimates.dot_variance
        if along is None:
            raise ValueError("the inner product test needs Var⟨g_i, g⟩, which is not measured here: use NormTest")
        norm = sum(estimates.gradient_norms_squared)
        m = ratio(along, self.theta**2 * norm**2)
        if self.nu is not None:
            across = max(0.0, sum(estimates.variances) - ratio(along, norm))
            m = max(m, ratio(across, self.nu**2 * norm))
        return m
