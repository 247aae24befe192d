"""Measure, smooth, apply the rule, round and clip, hand the size to the loader: Algorithm 1 around a user's loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cabs import checks, rules
from cabs.checks import HasBatchSize
from cabs.distributed import team_of
from cabs.loader import AdaptiveLoader
from cabs.microbatches import find_microbatch_size
from cabs.observing import Observation, Observer
from cabs.rules import Estimates, Rule, round_and_clip
from cabs.smoothing import ExponentialAverage
from cabs.variance import GradientVariance

STATE_VERSION = 1

AUTO_EVERY = 5
"""How many steps share a measurement where measuring costs; docs/variance.md has the evidence."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step showed and what followed from it, for logging.

    Attributes:
        examples: how many examples the step had.
        loss: F of the step.
        loss_average: F smoothed.
        variance: tr Σ of the step.
        variance_average: tr Σ smoothed.
        gradient_norm_squared: ‖g‖² of the step.
        raw_batch_size: what the rule asked for, neither rounded nor clipped.
        batch_size: the size chosen for the next step.
        clipped: the bound that decided, if one did.
    """

    examples: int
    loss: float
    loss_average: float
    variance: float
    variance_average: float
    gradient_norm_squared: float
    raw_batch_size: float
    batch_size: int
    clipped: Literal["min", "max"] | None


class BatchSizeScheduler:
    """Chooses the batch size of every step by a rule.

    A learning-rate scheduler moves ``optimizer.param_groups[…]["lr"]``; this one moves ``loader.batch_size``. Call
    ``step(loss)`` once a step, after ``loss.backward()``; or, for batches in pieces, ``backward(loss)`` for each piece
    and then ``step()``.

    A model in ``DistributedDataParallel`` or ``fully_shard`` makes its workers share every batch: the loader hands out
    this worker's part of it, gradients are weighed by their examples, and all workers choose the same size.

    Args:
        model: the module that is trained.
        optimizer: plain SGD; its learning rates are read at every step, so schedules may move them.
        loader: what has the ``batch_size`` to move, an ``AdaptiveLoader``; may be None if ``monitor_only``.
        rule: one of ``cabs.rules``, or your own.
        min_batch_size: the smallest size ever chosen; at least 2, since one example has no variance.
        max_batch_size: the largest size ever chosen.
        smoothing: μ of the moving averages.
        estimator: ``"exact"``, ``"paper"`` or ``"microbatch"``, see ``GradientVariance``.
        max_examples: measure only so many examples of each batch; None for all. By default all where that costs next
            to nothing and a few elsewhere, see ``GradientVariance``.
        measure_every: measure the variance at every so many steps and hold it in between, the loss being averaged
            at every step. By default every step where that costs next to nothing, else every fifth.
        monitor_only: measure and report, but leave the loader alone.
        assume_sgd: go ahead with an optimizer that is not plain SGD, taking its learning rate for SGD's.
        grad_scaler: the ``torch.amp.GradScaler`` in use, if one is; steps that it skips are skipped here too.
        multiple_of: choose only multiples of this, for even shapes or even shares.
        trial: the loss of a batch as the loop computes it, ``lambda batch: …``; with it the loader's
            ``max_microbatch_size="auto"`` is found here and now, by trying.
        check_owners: check on the first batch that examples are told apart as they should be, see ``GradientVariance``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: HasBatchSize | None,
        rule: Rule,
        *,
        min_batch_size: int = 16,
        max_batch_size: int = 2048,
        smoothing: float = 0.95,
        estimator: str = "exact",
        max_examples: int | Literal["auto"] | None = "auto",
        measure_every: int | Literal["auto"] = "auto",
        monitor_only: bool = False,
        assume_sgd: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        multiple_of: int = 1,
        trial: Callable[[Any], Tensor] | None = None,
        check_owners: bool = True,
    ) -> None:
        checks.check_bounds(min_batch_size, max_batch_size, smoothing, multiple_of)
        checks.check_rule(rule, min_batch_size, max_batch_size, multiple_of)
        checks.check_interval(measure_every)
        checks.check_loader(loader, min_batch_size, monitor_only)
        checks.check_optimizer(optimizer, model, assume_sgd)
        checks.check_trial(loader, trial)
        self.optimizer = optimizer
        self.loader = loader
        self.rule = rule
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        self.multiple_of = multiple_of
        self.smoothing = smoothing
        self.monitor_only = monitor_only
        self.measure_every = measure_every
        self.last: Step | None = None
        self._averages: ExponentialAverage | None = None
        self._steps = 0
        self._held: Observation | None = None
        self._unmeasured = 0
        """How many more steps go by with the variance held."""
        self.variance: GradientVariance | None = None
        if rule.measures:
            self.variance = GradientVariance(
                model,
                estimator,
                max_examples=max_examples,
                groups=self._groups(),
                grad_scaler=grad_scaler,
                check_owners=check_owners,
            )
        team = team_of(model, self._groups())
        checks.check_team(team, loader, monitor_only, estimator)
        self._observer = Observer(loader, self.variance, team, grad_scaler)
        if self.variance is not None:
            self.variance.attach()
        first = rule.batch_size if isinstance(rule, rules.Constant) else getattr(loader, "batch_size", min_batch_size)
        self.last_batch_size = round_and_clip(first, min_batch_size, max_batch_size, multiple_of)
        self._set_batch_size()
        if trial is not None and isinstance(loader, AdaptiveLoader) and loader.max_microbatch_size == "auto":
            loader.max_microbatch_size = find_microbatch_size(model, trial, loader, max_batch_size, team=team)
            self._observer.forget()

    def backward(self, loss: Tensor) -> None:
        """Calls ``backward`` on the loss of one piece of a batch, weighed by its share of the batch's examples.

        Gradients of the pieces add up to those of the whole batch, and so does what is measured. Workers exchange
        gradients with the last piece.

        Args:
            loss: the mean loss of the piece, or the losses of its examples.
        """
        self._observer.backward(loss)

    def step(self, loss: Tensor | float | None = None) -> int:
        """Takes the loss of the step just made and sets the size of the next.

        Args:
            loss: the mean loss without penalties, or the losses of the single examples; of this worker's examples, if
                there are several workers. Left out if the losses went through ``backward``.

        Returns:
            The size chosen.

        Raises:
            ValueError: the loss or the gradients are not finite, or the loss is not above the rule's floor. Nothing
                has changed then, and training may go on.
        """
        observed = self._observer.observe(loss, self._held)
        if observed is not None:
            self._decide(observed)
        return self.last_batch_size

    def _plan_next_measurement(self) -> None:
        if self.variance is None:
            return
        if self._unmeasured:
            self._unmeasured -= 1
        else:
            every = self.measure_every
            if every == "auto":
                every = 1 if self.variance.cheap else AUTO_EVERY
            self._unmeasured = every - 1
        self._observer.measure(self._unmeasured == 0)

    def _decide(self, observed: Observation) -> None:
        self._check_loss(observed.loss)
        groups = len(observed.variances)
        if self.rule.measures and groups != len(self.optimizer.param_groups):
            raise RuntimeError(
                "the optimizer's parameter groups have changed since the scheduler was made: make a new scheduler"
            )
        numbers = (observed.loss, *observed.variances, *observed.norms, *observed.true_norms)
        averages = self._averages or ExponentialAverage.zeros(len(numbers))
        averages = averages.update(numbers, self.smoothing)
        loss, *rest = averages.mean
        estimates = Estimates(
            loss=loss,
            learning_rates=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            variances=tuple(rest[:groups]),
            gradient_norms_squared=tuple(rest[groups : 2 * groups]),
            true_gradient_norms_squared=tuple(rest[2 * groups :]),
        )
        raw = self.rule(estimates)
        size = round_and_clip(raw, self.min_batch_size, self.max_batch_size, self.multiple_of)
        clipped: Literal["min", "max"] | None = None
        if raw >= self.max_batch_size + 0.5:
            clipped = "max"
        elif raw < self.min_batch_size - 0.5:
            clipped = "min"
        self._averages = averages
        self._held = observed
        self._plan_next_measurement()
        self._steps += 1
        self.last_batch_size = size
        self.last = Step(
            examples=observed.examples,
            loss=observed.loss,
            loss_average=loss,
            variance=sum(observed.variances),
            variance_average=sum(estimates.variances),
            gradient_norm_squared=sum(observed.norms),
            raw_batch_size=raw,
            batch_size=size,
            clipped=clipped,
        )
        self._set_batch_size()

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss}: training has diverged; lower the learning rate")
        floor = self.rule.loss_floor
        if floor is not None and loss <= floor:
            if floor == 0:
                raise ValueError(
                    f"the loss is {loss:g}, and m = α tr Σ / F needs a positive one: give the rule a lower bound of "
                    "your loss, rules.CABS(loss_floor=…), and leave penalties out of what you pass to step()"
                )
            raise ValueError(f"the loss is {loss:g}, at or below loss_floor = {floor:g}: give a floor that is below it")

    def _set_batch_size(self) -> None:
        if not self.monitor_only:
            assert self.loader is not None
            self.loader.batch_size = self.last_batch_size

    def _groups(self) -> list[list[Tensor]]:
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def close(self) -> None:
        """Takes every hook out of the model."""
        self._observer.close()
        if self.variance is not None:
            self.variance.detach()

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, in plain numbers."""
        return {
            "version": STATE_VERSION,
            "steps": self._steps,
            "last_batch_size": self.last_batch_size,
            "averages": None if self._averages is None else list(self._averages.values),
            "weight": 0.0 if self._averages is None else self._averages.weight,
            "held": None if self._held is None else self._held.to_list(),
            "unmeasured": self._unmeasured,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` left off, the loader's batch size included.

        Raises:
            ValueError: the state is not one of this class, or of other parameter groups. Nothing has changed then.
        """
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise ValueError(f"not the state of a BatchSizeScheduler: it has no {', '.join(sorted(missing))}")
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"the state is of version {state['version']}, this is {STATE_VERSION}: use the cabs it was saved with"
            )
        averages = state["averages"]
        expected = 1 + (3 * len(self.optimizer.param_groups) if self.rule.measures else 0)
        if averages is not None and len(averages) != expected:
            raise ValueError("the state was saved with other parameter groups or another kind of rule")
        if not self.min_batch_size <= state["last_batch_size"] <= self.max_batch_size:
            raise ValueError(
                f"the state's batch size {state['last_batch_size']} is outside of the bounds "
                f"{self.min_batch_size} to {self.max_batch_size}: make the scheduler with bounds that hold it"
            )
        self._steps = int(state["steps"])
        self._averages = None if averages is None else ExponentialAverage(tuple(averages), float(state["weight"]))
        self._held = Observation.of_list(state["held"])
        self._unmeasured = int(state["unmeasured"])
        if self.variance is not None:
            self._observer.measure(self._unmeasured == 0)
        self.last_batch_size = int(state["last_batch_size"])
        self._set_batch_size()


class CABS(BatchSizeScheduler):
    """Couples the batch size to the learning rate: m = α tr Σ / F at every step.

    Takes what ``BatchSizeScheduler`` takes but for the rule, and ``loss_floor``, a lower bound F_* of the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: HasBatchSize | None,
        *,
        loss_floor: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, loader, rules.CABS(loss_floor), **options)
