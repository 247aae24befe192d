"""Algorithm 1 around a user's loop: measure, smooth, apply the rule, round and clip, hand the size to the loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cabs.couplings import Coupling, unwrapped
from cabs.hooks import Attached
from cabs.interrupts import uninterrupted
from cabs.loader import AdaptiveLoader
from cabs.parallel import team_of
from cabs.rules import Rule, round_and_clip
from cabs.scheduler import requirements
from cabs.scheduler.deciding import Decider, Seen
from cabs.scheduler.microbatch_size import find_microbatch_size
from cabs.scheduler.observing import NotFinite, Observer
from cabs.scheduler.requirements import HasBatchSize
from cabs.scheduler.state import State
from cabs.scheduler.steering import OptimizerWatch, Steering, succeed
from cabs.scheduler.step import Step
from cabs.variance import GradientVariance

DOTS_OF = 64
"""Of how many examples ⟨g_i, g⟩ is measured: the same in all layers."""


def auto_every(examples: int) -> int:
    """How many steps of so many examples share a measurement where measuring costs; docs/variance.md has the evidence.

    A measured step of few examples costs the larger share of a step; up to 64 are measured whole.
    """
    return 10 if examples < 32 else 8 if examples <= 64 else 5


class BatchSizeScheduler(Attached):
    """Chooses the batch size of every step by a rule.

    A learning-rate scheduler moves ``optimizer.param_groups[…]["lr"]``; this one moves ``loader.batch_size``. Call
    ``step(loss)`` once a step, after ``optimizer.step()``; or, for batches in microbatches, ``backward(loss)`` for each
    of them and then ``step()``.

    A model in ``DistributedDataParallel`` or ``fully_shard`` makes its processes share every batch: the loader hands
    out this process's part of it, gradients are weighed by their examples, and all processes choose the same size.

    Args:
        model: the module that is trained.
        optimizer: SGD, with momentum or not, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, or one whose
            coupling is known (``cabs.couplings``); rules that do not go by its step take any. α is read at every step,
            so schedules may move learning rates.
        loader: what has the ``batch_size`` to move, an ``AdaptiveLoader``; may be None if ``monitor_only``.
        rule: one of ``cabs.rules``, or your own.
        min_batch_size: the smallest size ever chosen; at least 2 if the rule measures: one example has no variance.
        max_batch_size: the largest size ever chosen.
        smoothing: μ of the moving averages.
        estimator: ``"exact"``, ``"paper"`` or ``"microbatch"``, see ``GradientVariance``.
        max_examples: measure only so many examples of each batch; None for all. By default all where that costs next
            to nothing and a few elsewhere, see ``GradientVariance``.
        measure_every: measure the variance at every so many steps and hold it in between, the loss being averaged
            at every step. By default every step where that costs next to nothing, else every fifth, every
            eighth of batches up to 64, and every tenth below 32.
        accumulation: how many batches of the loader make a step of the optimizer, if the loop accumulates gradients as
            ``(loss / accumulation).backward()``. The step has the size that the rule asks for, a multiple of this, and
            ``loader.batch_size`` is one part of it.
        monitor_only: measure and report, but leave the loader alone.
        assume_sgd: take any optimizer for plain SGD: α is its learning rate, and P is 1.
        coupling: what a step of the optimizer does with a gradient, where its class does not tell.
        grad_scaler: the ``torch.amp.GradScaler`` in use, if one is; steps that it skips are skipped here too.
        multiple_of: choose only multiples of this, for even shapes or even shares.
        trial: the loss of a batch as the loop computes it, ``lambda batch: …``; with it the loader's
            ``max_microbatch_size="auto"`` is found here and now, by trying.
        check_owners: check on the first batch that examples are told apart as they should be, see ``GradientVariance``.
        keep_half_lives: the batch size that the optimizer's momentum or betas are meant for. With it they are set anew
            before every step, so that averages forget as much per example whatever the size, see ``cabs.clocks``.

    Attributes:
        last: the record of the step just made, None before the first.
        last_batch_size: the size chosen for the next step.
        variance: what measures; None if the rule needs no measurement.
    """

    INSTEAD = "save its state_dict(), and load that into one made for the copies"

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
        accumulation: int = 1,
        monitor_only: bool = False,
        assume_sgd: bool = False,
        coupling: Coupling | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        multiple_of: int = 1,
        trial: Callable[[Any], Tensor] | None = None,
        check_owners: bool = True,
        keep_half_lives: int | None = None,
    ) -> None:
        requirements.check_kinds(model, optimizer, loader)
        self.accumulation = requirements.integer("accumulation", accumulation, 1)
        self.monitor_only = requirements.boolean("monitor_only", monitor_only)
        requirements.boolean("assume_sgd", assume_sgd)
        requirements.boolean("check_owners", check_owners)
        least, most, multiple_of = requirements.bounds(min_batch_size, max_batch_size, multiple_of, rule)
        multiple_of = math.lcm(multiple_of, self.accumulation)
        requirements.bounds(least, most, multiple_of, rule)
        requirements.check_smoothing(smoothing)
        requirements.check_rule(rule, least, most, multiple_of)
        requirements.check_interval(measure_every)
        requirements.check_grad_scaler(grad_scaler)
        requirements.check_loader(loader, least, monitor_only, self.accumulation)
        self._optimizer = unwrapped(optimizer)
        requirements.check_parameters(self.optimizer, model)
        self._coupled = requirements.coupled(self.optimizer, rule, coupling, assume_sgd, monitor_only)
        self._coupled.alphas()
        requirements.check_trial(loader, trial)
        self.loader, self.rule = loader, rule
        self.min_batch_size, self.max_batch_size, self.multiple_of = least, most, multiple_of
        self.smoothing, self.measure_every = smoothing, measure_every
        self.last: Step | None = None
        self._grad_scaler, self._closed = grad_scaler, False
        self.variance: GradientVariance | None = None
        if rule.measures:
            self.variance = GradientVariance(
                model,
                estimator,
                max_examples=DOTS_OF if rule.measures_dots and max_examples == "auto" else max_examples,
                groups=self._groups(),
                grad_scaler=grad_scaler,
                check_owners=check_owners,
            )
            self.variance.measures_dots = rule.measures_dots
        weighted = rule.measures and rule.coupled and self._coupled.diagonal
        if weighted and self.variance is not None:
            self.variance.weigh(self._coupled.weights, trusted=self._coupled.built_in)
        self._team = team_of(model, self._groups())
        if weighted and self._team is not None:
            self._team.weights = self._coupled.weights
        requirements.check_team(self._team, loader, monitor_only, estimator, self.accumulation)
        requirements.check_dots(rule, self._team, estimator)
        self._observer = observer = Observer(self.variance, self._team, grad_scaler, self.accumulation)
        observer.stopwatch.on = rule.times_steps
        self._steering = Steering(loader, observer, self._team, self.accumulation, monitor_only)
        first = self._steering.first_size(rule, *requirements.inner_bounds(least, most, multiple_of))
        self._state = State(batch_size=round_and_clip(first, least, most, multiple_of))
        succeed(self)
        if self.variance is not None:
            self.variance.attach()
        self._steering.take_over(rule, compares_microbatches=rule.measures and estimator == "microbatch")
        self._steering.set_size(self._state.batch_size)
        self._optimizer_watch = watch = OptimizerWatch(
            self.optimizer, observer.note_step, expects_steps=not monitor_only, scaled=grad_scaler is not None
        )
        watch.keep_half_lives(keep_half_lives, lambda: observer.record.examples() or self._state.batch_size)
        if trial is not None and isinstance(loader, AdaptiveLoader) and loader.max_microbatch_size == "auto":
            loader.max_microbatch_size = find_microbatch_size(model, trial, loader, most, team=self._team)
            self._observer.begin()

    def __repr__(self) -> str:
        after = f"next {self.last_batch_size}, after {self._state.examples_total:,} examples"
        bounds, state = f"{self.min_batch_size} to {self.max_batch_size}", "closed" if self._closed else after
        return f"<{type(self).__name__}: {self.rule!r}, sizes {bounds}, {state}>"

    @property
    def optimizer(self) -> Any:
        """The optimizer, for good: with another one, make a scheduler and load this one's ``state_dict()``."""
        return self._optimizer

    @property
    def last_batch_size(self) -> int:
        """The size chosen for the next step."""
        return self._state.batch_size

    def backward(self, loss: Tensor) -> None:
        """Calls ``backward`` on the loss of one microbatch, weighed by its share of the step's examples.

        Gradients of the microbatches add up to those of the whole batch, and so does what is measured. Processes
        exchange gradients with the last microbatch.

        Args:
            loss: the mean loss of the microbatch, or the losses of its examples.
        """
        self._check_open()
        self._observer.backward(loss)

    def step(self, loss: Tensor | float | None = None) -> int:
        """Takes the loss of the step just made and sets the size of the next.

        Args:
            loss: the mean loss without penalties, or the losses of the single examples; of this process's examples, if
                there are several processes. Left out if the losses went through ``backward``.

        Returns:
            The size chosen.

        Raises:
            ValueError: the loss or the gradients are not finite, or the loss is not above the rule's floor. Nothing
                has changed then, and training may go on.
        """
        self._check_open()
        record, measures = self._observer.record, self._observer.measures
        try:
            examples, loss, measured = self._observer.observe(loss, self._state.steps + 1)
        except NotFinite:
            if self._grad_scaler is None:
                raise
            return self.last_batch_size  # the scaler found the same and skips the step
        finally:
            self._observer.begin()
        if self._optimizer_watch.missed(record.optimizer_stepped):
            return self.last_batch_size  # the scaler skipped the step
        costs, trial_factor = self._observer.stopwatch.costs(self._state.costs, tries=not self.monitor_only)
        seen = Seen(
            examples=examples,
            loss=loss,
            held=measured or self._state.held,
            measured=measured is not None,
            alphas=self._coupled.alphas(),
            shares=self.rule.coupled or self._coupled.plain,
            dataset_size=self._steering.dataset_size(),
            costs=costs,
            trial_factor=trial_factor,
        )
        # One example alone has no variance, and an optimizer without state no P: the size stays what it is.
        kept = self.variance is not None and ((measures and measured is None) or seen.held is None)
        decider = Decider(  # of what the attributes are now: a rule may be extended, and bounds moved
            rule=self.rule,
            least=self.min_batch_size,
            most=self.max_batch_size,
            multiple_of=self.multiple_of,
            smoothing=self.smoothing,
        )
        state, last = (decider.keep if kept else decider)(self._state, seen)
        if not kept:
            state = replace(state, unmeasured=self._steps_until_measurement(examples))
        with uninterrupted():
            self._state, self.last = state, last
            self._observer.measure(state.unmeasured == 0)
            self._steering.set_size(state.batch_size)
        self._observer.stopwatch.end(examples, measured is not None)
        return self.last_batch_size

    def _steps_until_measurement(self, examples: int) -> int:
        """How many steps, of about so many examples, go by with the variance held before the next is measured."""
        if self._state.unmeasured:
            return self._state.unmeasured - 1
        every = self.measure_every
        if every == "auto":
            every = 1 if self.variance is None or self.variance.cheap else auto_every(examples)
        return every - 1

    def _groups(self) -> list[list[Tensor]]:
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the scheduler is closed, by close() or by one that was made after it: use that one")

    def close(self) -> None:
        """Takes every hook out of the model, the optimizer and the loader; the scheduler is of no use afterwards."""
        self._closed = True
        self._steering.let_go()
        self._optimizer_watch.close()
        if self._team is not None:
            self._team.close()
        if self.variance is not None:
            self.variance.detach()

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, in plain numbers."""
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` left off, the loader's batch size included.

        Raises:
            ValueError: the state is not one of this class, or of other parameter groups. Nothing has changed then.
        """
        numbers = 3 * len(self.optimizer.param_groups) + self.rule.measures_dots if self.rule.measures else 0
        loaded = State.from_dict(state, 1 + numbers, self.min_batch_size, self.max_batch_size)
        requirements.check_seen(self.rule, loaded.examples_total, self.min_batch_size)
        self._observer.give_up()
        self._observer.stopwatch.restart()
        with uninterrupted():
            self._state = loaded
            self._observer.measure(loaded.unmeasured == 0)
            self._steering.set_size(loaded.batch_size)
