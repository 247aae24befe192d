"""Algorithm 1, from the numbers of a step to the size of the next: smooth, apply the rule, round and clip."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cabs import rules
from cabs.rules import Estimates, Rule, round_and_clip
from cabs.scheduler import requirements
from cabs.scheduler.costs import StepCosts
from cabs.scheduler.smoothing import ExponentialAverage
from cabs.scheduler.state import State
from cabs.scheduler.step import Measurement, Step, bound_that_decided


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a step showed.

    Attributes:
        examples: how many it had.
        loss: F.
        held: the last measurement, of this step or an earlier one.
        measured: whether it is of this step.
        alphas: α of each parameter group.
        shares: whether α times the measured variance is the noise of a step, as ``noise_share`` wants it.
        dataset_size: M, where it is known.
        costs: what steps take.
        trial_factor: how many times larger the next step is to be, to tell that; None for a step like any other.
    """

    examples: int
    loss: float
    held: Measurement | None
    measured: bool
    alphas: tuple[float, ...]
    shares: bool
    dataset_size: int | None
    costs: StepCosts
    trial_factor: float | None


@dataclass(frozen=True, kw_only=True)
class Decider:
    """Algorithm 1.

    Attributes:
        rule: for the size.
        least: the smallest size.
        most: the largest.
        multiple_of: sizes are multiples of this.
        smoothing: μ.
    """

    rule: Rule
    least: int
    most: int
    multiple_of: int
    smoothing: float

    def __call__(self, before: State, seen: Seen) -> tuple[State, Step]:
        """The state after a step, and the record of it."""
        requirements.check_loss(seen.loss, self.rule)
        held, examples = seen.held, seen.examples
        variances, norms, true_norms, dots = held.numbers(self.rule.unbiased) if held else ((), (), (), ())
        groups = len(variances)
        if held is not None and groups != len(seen.alphas):
            raise RuntimeError(
                "the optimizer's parameter groups have changed since the scheduler was made: make a new scheduler"
            )
        # Smooth: F_avg and ξ.
        numbers = (seen.loss, *variances, *norms, *true_norms, *dots)
        total = before.examples_total + examples
        averages = (before.averages or ExponentialAverage.zeros(len(numbers))).update(numbers, self.smoothing)
        loss_average, *rest = averages.mean
        estimates = Estimates(
            loss=loss_average,
            learning_rates=seen.alphas,
            variances=tuple(rest[:groups]),
            gradient_norms_squared=tuple(rest[groups : 2 * groups]),
            true_gradient_norms_squared=tuple(rest[2 * groups : 3 * groups]),
            dot_variance=rest[3 * groups] if dots else None,
            batch_size=examples,
            examples_total=total,
            dataset_size=seen.dataset_size,
            step_cost=seen.costs.line,
            trial_factor=seen.trial_factor,
            bounds=requirements.inner_bounds(self.least, self.most, self.multiple_of),
        )
        memory = self.rule.remember(before.memory, estimates)
        estimates = estimates if memory is None else replace(estimates, memory=memory)
        # Apply the rule, round, clip.
        raw = requirements.size_from(self.rule, self.rule(estimates))
        size = round_and_clip(raw, self.least, self.most, self.multiple_of)
        shares = held is not None and seen.shares
        last = Step(
            examples=examples,
            examples_total=total,
            loss=seen.loss,
            loss_average=loss_average,
            variance=sum(held.variances) if held else math.nan,
            variance_average=sum(estimates.variances) if held else math.nan,
            gradient_norm_squared=sum(norms) if held else math.nan,
            measured=seen.measured,
            noise_share=rules.noise_share(estimates, self.rule.loss_floor or 0.0) if shares else math.nan,
            noise_scale=rules.noise_scale(estimates) if held else math.nan,
            raw_batch_size=raw,
            batch_size=size,
            clipped=bound_that_decided(raw, size, self.multiple_of),
            step_cost=estimates.step_cost,
        )
        after = replace(
            before,
            batch_size=size,
            steps=before.steps + 1,
            examples_total=total,
            averages=averages,
            held=held,
            memory=memory,
            costs=seen.costs,
        )
        return after, last

    def keep(self, before: State, seen: Seen) -> tuple[State, Step]:
        """The same for a step that could not be measured: the size stays, and nothing is averaged."""
        requirements.check_loss(seen.loss, self.rule)
        total, held = before.examples_total + seen.examples, before.held
        loss_average, *rest = (seen.loss,) if before.averages is None else before.averages.mean
        last = Step(
            examples=seen.examples,
            examples_total=total,
            loss=seen.loss,
            loss_average=loss_average,
            variance=sum(held.variances) if held else math.nan,
            variance_average=sum(rest[: len(held.variances)]) if held else math.nan,
            gradient_norm_squared=sum(held.norms) if held else math.nan,
            measured=False,
            noise_share=math.nan,
            noise_scale=math.nan,
            raw_batch_size=float(before.batch_size),
            batch_size=before.batch_size,
            clipped=None,
        )
        return replace(before, examples_total=total, costs=seen.costs), last
