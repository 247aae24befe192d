"""``GradientVariance``: tr Σ, the variance of single examples' gradients, measured in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from cabs.hooks import Attached
from cabs.torch_internals import scale_of
from cabs.variance import operations as _formulas  # noqa: F401  registers the formulas
from cabs.variance.accumulated import Accumulated
from cabs.variance.arguments import check_arguments, chosen_examples
from cabs.variance.backward import SQUARES, BackwardPass
from cabs.variance.dots import Dots
from cabs.variance.inputs import ExamplesOf
from cabs.variance.meter import Meter
from cabs.variance.microbatch import MicrobatchMeter
from cabs.variance.parameters import Parameters
from cabs.variance.passes import Passes
from cabs.variance.reading import Readings
from cabs.variance.verification import Verifiable
from cabs.variance.weights import Lookup, Weights, lookup_of


class GradientVariance(Attached, Readings, Verifiable):
    """Measures the gradients of single examples while ordinary code trains.

    Used as a context manager, or with ``attach`` and ``detach``::

        with GradientVariance(model) as variance:
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
        variance.trace()

    Several backward passes before a reading are one batch, if their gradients add up in ``.grad``: scale the losses so
    that together they are the mean over all examples. A pass whose gradients were cleared (``zero_grad``) before the
    next one does not count.

    Args:
        model: the module whose parameters are measured.
        estimator: ``"exact"``, the definition (eq:sample_variance summed over coordinates), or ``"paper"``, which
            squares before it sums over positions, as the code behind the paper's curves did, or ``"microbatch"``, which
            compares the gradients of the backward passes that are accumulated for a batch, at least two, and works for
            any model at all.
        reduction: how the loss that ``backward`` is called on puts the examples together: ``"mean"`` or
            ``"sum"`` (``losses.backward(torch.ones_like(losses))`` is a sum).
        max_examples: measure only this many examples of a batch, evenly spaced; None for all. ``"auto"`` takes all
            where that costs next to nothing (linear layers on vectors), and a few elsewhere.
        groups: parameters in groups to be told apart, as in an optimizer's ``param_groups``; by default one
            group of all the model's trained parameters.
        weights: a non-negative tensor P of its shape for each parameter: every square of a gradient's element is
            multiplied by it, so that ``trace()`` is tr(PΣ), and ``squared_norms()`` is Σ_j P_j g_ij². It is read in
            every backward pass, so that its tensors may change in between.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does.
        batch_dim: which dimension of the model's inputs runs over the examples: 1 for (time, batch, features).
        count_examples: the number of examples, given the tensors the model is called with, where their shapes do not
            tell (bags of tokens with offsets, say).
        owners: which example each row is, given the tensors the model is called with: a tensor of numbers from 0 to
            m − 1. For inputs that have no dimension for the examples, such as the nodes of a batch of graphs.
        check_owners: whether to check, on the first batch, that a change of one example moves only what is known to be
            its own; two forward passes, once.
    """

    def __init__(
        self,
        model: nn.Module,
        estimator: str = "exact",
        *,
        reduction: str = "mean",
        max_examples: int | Literal["auto"] | None = None,
        groups: Sequence[Iterable[Tensor]] | None = None,
        weights: Mapping[Tensor, Tensor] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        batch_dim: int = 0,
        count_examples: Callable[..., int] | None = None,
        owners: Callable[..., Tensor] | None = None,
        check_owners: bool = False,
    ) -> None:
        check_arguments(model, estimator, reduction, max_examples)
        self.model, self.estimator, self.reduction = model, estimator, reduction
        self.max_examples = max_examples
        groups = [list(model.parameters())] if groups is None else [list(group) for group in groups]
        self._parameters = Parameters(model, groups)
        self._count = len(groups)
        self._weights: Weights | None = None
        if weights is not None:
            self.weigh(lookup_of(weights, model, self._parameters), trusted=False)
        self._grad_scaler = grad_scaler
        self._examples_of = ExamplesOf(batch_dim, count_examples, owners)
        self._check_owners, self._attached = check_owners, False
        self._meter: Meter | MicrobatchMeter | None = None
        self._log: Passes | None = None
        self._share = 1.0
        self._weight: float | None = None
        self._measured: list[BackwardPass] = []
        self._accumulated = Accumulated()

    # -- measuring

    def attach(self) -> Self:
        """Starts measuring."""
        if not self._attached:
            self._attached = True
            log = Passes(self.model.parameters(), self._parameters.sharded)
            if self.estimator == "microbatch":
                self._meter = MicrobatchMeter(self.model, self._begin, self._wants_more, self._examples_of, log)
            else:
                choices = self._choose, self._choose_beside
                self._meter = Meter(
                    self.model, self._begin, *choices, self._parameters, self._examples_of, self._check_owners, log
                )
            self._log = log
        return self

    def weigh(self, lookup: Lookup, *, trusted: bool) -> None:
        """Multiplies squares by weights that are looked up in the backward pass, one parameter at a time.

        Args:
            lookup: a parameter's weights, or None if it has none yet: a pass that needs them is ``unweighed`` then.
            trusted: do without the check that they are finite and not negative.
        """
        self._weights = Weights(lookup, self.model, self._parameters, trusted)

    def detach(self) -> None:
        """Stops measuring and takes every hook out of the model; readings stay."""
        if self._meter is not None and self._log is not None:
            self._meter.remove()
            self._log.remove()
        self._attached = False

    def expect(
        self, batch: Any, examples: int, *, share: float = 1.0, weight: float | None = None, rows: bool = False
    ) -> None:
        """Tells what the next passes are about: what a loader has handed out.

        Args:
            batch: the tensors, in any nesting.
            examples: how many examples they hold.
            share: which part of a batch they are: as large a part of ``max_examples`` is measured.
            weight: the factor of one example's gradient in the gradient of the step; by default 1/m, for a mean.
            rows: whether all tensors of the batch have a row for each example; else those that may not are left out.
        """
        self._share, self._weight = share, weight
        if self._meter is not None and self._attached:
            self._meter.expect(batch, examples, rows)

    def pause(self, paused: bool = True) -> None:
        """Lets passes go by unmeasured, at no cost, until ``pause(False)``."""
        if self._meter is not None:
            self._meter.pause(paused)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For passes that are no part of the step: what happens inside is neither measured nor counted."""
        meter, log, block = self._meter, self._log, object()
        if meter is None or log is None or not self._attached:
            yield
            return
        try:
            log.ignored_in.add(block)
            meter.look_away()
            yield
        finally:
            try:
                log.ignored_in.discard(block)
            finally:  # once more, should Ctrl-C have come just then
                log.ignored_in.discard(block)
            meter.look_again()

    @property
    def cheap(self) -> bool:
        """Whether what was measured so far costs next to nothing for all examples: linear layers, unweighted."""
        return self._weights is None and (self._meter is None or self._meter.cheap)

    def reset(self) -> None:
        """Forgets what was measured; the next backward pass begins a new batch."""
        self._drop()
        if self._log is not None:
            self._log.forget()

    def give_up(self) -> None:
        """The same for a batch that is not going to be stepped on; ``leftover`` tells if its gradients are anyway."""
        self._drop()
        if self._log is not None:
            self._log.give_up()

    def _drop(self) -> None:
        self._measured, self._accumulated = [], Accumulated()
        if self._weights is not None:
            self._weights.forget()
        if self._meter is not None:
            self._meter.forget()

    @property
    def leftover(self) -> int:
        """How many backward passes of batches that were given up are in the gradients of this one."""
        return 0 if self._log is None else self._log.leftover

    @property
    def passes(self) -> int:
        """How many backward passes the batch has had, measured or not, whose gradients have not been cleared."""
        return 0 if self._log is None else len(self._log)

    def tasks(self) -> set[int] | None:
        """Autograd's numbers of these passes; None if nobody can know, since parameters are sharded."""
        return None if self._log is None or self._parameters.sharded else self._log.tasks()

    def losses(self) -> list[Tensor]:
        """What ``backward`` was called on in the passes that were measured, as far as it was seen."""
        return [root for one in self._passes for root in one.roots]

    def discard_last_pass(self) -> None:
        """Discards the last backward pass, whose loss was multiplied by 0."""
        del self._measured[-1:]

    def check(self) -> None:
        """Refuses to go on if gradients reached parameters by a way that cannot be seen."""
        if self._meter is not None:
            self._meter.check()

    def __enter__(self) -> Self:
        self.reset()
        return self.attach()

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def _begin(self, examples: int, task: int) -> BackwardPass:
        """The record of a new backward pass."""
        assert self._log is not None
        if not self._log.joins(task):
            self._measured, self._accumulated = [], Accumulated()
        scale = scale_of(self._grad_scaler)
        one = BackwardPass(
            task,
            examples,
            SQUARES.get(self.estimator),
            self._parameters.groups,
            weight=self._weight,
            scale=None if scale is None else scale.clone(),
            accumulated=self._accumulated,
            accumulates=bool(self._measured),
            weights=self._weights,
            dots=Dots() if self.measures_dots else None,
        )
        self._measured.append(one)
        return one

    def _choose(self, examples: int, cheap: bool) -> slice:
        return chosen_examples(examples, self.max_examples, self._share, cheap, self._weights is not None)

    def _choose_beside(self, examples: int) -> slice | None:
        if self.max_examples is None or self.measures_dots:  # of all examples, or with what sums they are part of
            return None
        return chosen_examples(examples, self.max_examples, self._share, cheap=False, costly=True, least=2)

    def _wants_more(self) -> bool:
        """Whether to square another pass: two at least, and examples up to the maximum."""
        return not isinstance(self.max_examples, int) or len(self._measured) < 2 or self.examples < self.max_examples

    def _apart(self, groups: Sequence[Iterable[Tensor]]) -> GradientVariance:
        """Another measurement of the same kind, with other groups."""
        other = GradientVariance(self.model, reduction=self.reduction, groups=groups)
        other._examples_of = self._examples_of
        return other

    # -- what Readings reads

    @property
    def _passes(self) -> list[BackwardPass]:
        log = self._log
        return self._measured if log is None else [one for one in self._measured if log.counts(one.task)]

    @property
    def examples(self) -> int:
        """m: the examples of the batch, measured or not; 0 before any backward pass."""
        passes = self._passes
        if not passes and self._log is not None:
            return self._log.examples
        return sum(one.examples for one in passes)

    def _readable(self, least: int = 1) -> list[BackwardPass]:
        passes = self._passes
        if not passes:
            if self._meter is not None:
                self._meter.check()
            raise RuntimeError("nothing was measured: call backward on a loss of this model first")
        if self.examples < least:
            raise RuntimeError(f"the batch had {self.examples} example, and a variance takes at least {least}")
        if any(one.unmeasured for one in passes):
            raise RuntimeError("compiled code could not be measured, see the warning: measure the next step instead")
        for one in passes:
            one.finish()
        if self._meter is not None:
            self._meter.check()
        return passes
