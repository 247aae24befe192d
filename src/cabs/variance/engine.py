"""``GradientVariance``: tr Σ, the variance of single examples' gradients, measured in the backward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from cabs.variance import microbatch
from cabs.variance import operations as _rules  # noqa: F401  registers the rules
from cabs.variance.backward import SQUARES, Accumulated, BackwardPass
from cabs.variance.inputs import ExamplesOf
from cabs.variance.meter import Meter
from cabs.variance.microbatch import MicrobatchMeter
from cabs.variance.parameters import Parameters
from cabs.variance.torch_internals import unseen
from cabs.variance.verification import Verification, verify

AUTO_EXAMPLES = 32
"""How many examples of a batch are measured in layers where each of them costs; docs/variance.md has the evidence."""

AUTO_ALL = 64
"""Up to this size a batch is measured whole: convolutions then find the gradient along with the norms, for less."""

ESTIMATORS = (*SQUARES, "microbatch")
REDUCTIONS = ("mean", "sum")


P = ParamSpec("P")
R = TypeVar("R")


def _unseen(method: Callable[P, R]) -> Callable[P, R]:
    """Lets a method compute without being looked at itself."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with unseen():
            return method(*args, **kwargs)

    return call


class GradientVariance:
    """Measures the gradients of single examples while ordinary code trains.

    Used as a context manager, or with ``attach`` and ``detach``::

        with GradientVariance(model) as variance:
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
        variance.trace()

    Several backward passes before a reading are one batch: gradients accumulate, and so do the examples.

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
        grad_scaler: torch.amp.GradScaler | None = None,
        batch_dim: int = 0,
        count_examples: Callable[..., int] | None = None,
        owners: Callable[..., Tensor] | None = None,
        check_owners: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}: it must be a torch.nn.Module")
        if estimator not in ESTIMATORS:
            raise ValueError(f"unknown estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")
        if reduction not in REDUCTIONS:
            raise ValueError(f"unknown reduction {reduction!r}: choose one of {', '.join(REDUCTIONS)}")
        if max_examples not in (None, "auto") and (not isinstance(max_examples, int) or max_examples < 2):
            raise ValueError(f"max_examples is {max_examples!r}: it must be an integer of at least 2, 'auto' or None")
        self.model = model
        self.estimator = estimator
        self.reduction = reduction
        self.max_examples = max_examples
        groups = [list(model.parameters())] if groups is None else [list(group) for group in groups]
        self._parameters = Parameters(model, groups)
        self._count = len(groups)
        self._grad_scaler = grad_scaler
        self._examples_of = ExamplesOf(batch_dim, count_examples, owners)
        self._check_owners = check_owners
        self._attached = False
        self.loss_weight = 1.0
        """A factor that the mean loss of the batch was multiplied by."""
        self.batch_share = 1.0
        """Which part of the batch the next backward pass has: as large a part of ``max_examples`` is measured."""
        self._meter: Meter | MicrobatchMeter | None = None
        self._passes: list[BackwardPass] = []
        self._accumulated = Accumulated()

    # -- measuring

    def attach(self) -> Self:
        """Starts measuring."""
        if not self._attached:
            self._attached = True
            self._meter = self._new_meter()
        return self

    def _new_meter(self) -> Meter | MicrobatchMeter:
        if self.estimator == "microbatch":
            return MicrobatchMeter(self.model, self._begin, self._wants_more, self._examples_of)
        return Meter(self.model, self._begin, self._measured, self._parameters, self._examples_of, self._check_owners)

    def detach(self) -> None:
        """Stops measuring and takes every hook out of the model; readings stay."""
        if self._meter is not None:
            self._meter.remove()
        self._attached = False

    def expect(self, batch: Any, examples: int) -> None:
        """Tells which examples the next passes are about, and how many they are: what a loader handed out."""
        if self._meter is not None:
            self._meter.expect(batch, examples)

    def pause(self, paused: bool = True) -> None:
        """Lets passes go by unmeasured, at no cost, until ``pause(False)``."""
        if self._meter is not None:
            self._meter.pause(paused)

    @property
    def cheap(self) -> bool:
        """Whether what was measured so far costs next to nothing for all examples: linear layers on vectors."""
        return self._meter is None or self._meter.cheap

    def reset(self) -> None:
        """Forgets what was measured; the next backward pass begins a new batch."""
        self._passes = []
        self._accumulated = Accumulated()
        if self._meter is not None:
            self._meter.forget()

    def drop_last_pass(self) -> None:
        """Takes the last backward pass, of a loss that was multiplied by 0, for not having been."""
        del self._passes[-1:]

    def __enter__(self) -> Self:
        self.reset()
        return self.attach()

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def _begin(self, examples: int) -> BackwardPass:
        scale = getattr(self._grad_scaler, "_scale", None)
        one = BackwardPass(
            examples,
            SQUARES.get(self.estimator),
            self._parameters.groups,
            scale=None if scale is None else scale.clone(),
            accumulated=self._accumulated,
            accumulates=bool(self._passes),
        )
        self._passes.append(one)
        return one

    def _measured(self, examples: int, cheap: bool) -> slice:
        """Which examples to measure: evenly spaced, so that an order within batches does no harm."""
        limit = self.max_examples
        if limit == "auto":
            few = examples <= AUTO_ALL * self.batch_share
            limit = None if cheap or few else AUTO_EXAMPLES
        most = examples if limit is None else math.ceil(limit * self.batch_share)
        if examples <= most:
            return slice(None)
        stride = examples // most
        return slice(0, stride * most, stride)

    def _wants_more(self) -> bool:
        """Whether to square another pass: two at least, and examples up to the maximum."""
        return not isinstance(self.max_examples, int) or len(self._passes) < 2 or self.examples < self.max_examples

    def verify(
        self,
        loss: Callable[[Any], Tensor],
        batch: Any,
        *,
        split: Callable[[Any, int], Any] | None = None,
        tolerance: float = 1e-4,
    ) -> Verification:
        """Compares what is measured with a loop over single examples, for one batch and loss, parameter by parameter.

        Slow, and certain: for a new model, once. Dropout is off within; gradients, buffers and random numbers are as
        before afterwards.

        Args:
            loss: the mean loss of a batch, ``lambda batch: F.cross_entropy(model(batch[0]), batch[1])``.
            batch: what the loss takes: tensors in tuples, dictionaries or dataclasses.
            split: the batch of example i alone, where that is not one entry of each tensor along ``batch_dim``.
            tolerance: the largest relative error that counts as rounding.

        Returns:
            The comparison: ``exact``, ``wrong``, and a table when printed.
        """
        if self.estimator != "exact":
            raise ValueError(f"the estimator {self.estimator} does not give what a loop over single examples does")
        attached = self._attached
        self.detach()
        try:
            return verify(self.model, self._apart, loss, batch, split, self._examples_of.dim, tolerance)
        finally:
            if attached:
                self.attach()

    def _apart(self, groups: Sequence[Iterable[Tensor]]) -> GradientVariance:
        """Another measurement of the same kind, with other groups."""
        other = GradientVariance(self.model, reduction=self.reduction, groups=groups)
        other._examples_of = self._examples_of
        return other

    # -- reading

    @property
    def examples(self) -> int:
        """m: the examples of the batch, measured or not; 0 before any backward pass."""
        return sum(one.examples for one in self._passes)

    @_unseen
    def squared_norms(self) -> Tensor:
        """‖g_i‖², one for each example measured."""
        if self.estimator == "microbatch":
            raise RuntimeError("the estimator microbatch does not see single examples: read trace()")
        self._check(least=1)
        norms = []
        for one in self._passes:
            parts = [part for parts in one.squares.values() for part in parts]
            if len({part.shape for part in parts}) > 1:
                raise RuntimeError(
                    "different numbers of examples were measured in different layers: set max_examples to a number, or "
                    "to None for all"
                )
            norms.append(torch.stack(parts).sum(0) * self._scale(one))
        return torch.cat(norms)

    @_unseen
    def traces(self) -> Tensor:
        """tr Σ of each parameter group, shape (groups,)."""
        self._check(least=2)
        if self.estimator == "microbatch" and len(self._passes) < 2:
            raise RuntimeError(
                "the estimator microbatch compares backward passes, and this batch had one: accumulate gradients of "
                "at least two pieces, or choose estimator='exact'"
            )
        return self.traces_of(self.sums(), self.mean_squared_norms(), self.examples)

    @_unseen
    def sums(self) -> Tensor:
        """What adds up over the workers that share a batch: ‖g_i‖² over its examples, by group.

        With the estimator ``microbatch`` the sums go over the passes that were squared, b_k ‖g_k‖², and the number of
        passes and of their examples come after them.
        """
        self._check(least=1)
        passes = [one for one in self._passes if one.squares]
        single = self.estimator != "microbatch"
        total: Tensor | float = 0.0
        for one in passes:
            means = _stack([one.mean_squares(group) for group in range(self._count)])
            # A pass of b examples adds up to b g_k.
            weight = one.examples if single else 1 / one.examples
            total = total + weight * self._scale(one) * means
        total = torch.as_tensor(total).expand(self._count)
        if single:
            return total
        return torch.cat([total, total.new_tensor([len(passes), sum(one.examples for one in passes)])])

    def traces_of(self, sums: Tensor, mean_squares: Tensor, examples: int) -> Tensor:
        """tr Σ of each group, from ``sums``, added up over workers, and ‖g‖² of all ``examples`` of the batch."""
        if self.estimator != "microbatch":
            return sums / examples - mean_squares
        return microbatch.traces(sums[: self._count], mean_squares, examples, *sums[self._count :])

    def trace(self) -> Tensor:
        """tr Σ ≈ (1/m) Σ_i ‖g_i‖² − ‖g‖² over all parameters, a scalar."""
        return self.traces().sum()

    @_unseen
    def mean_squared_norms(self) -> Tensor:
        """‖g‖² of each parameter group, shape (groups,)."""
        self._check(least=1)
        total: Tensor | float = 0.0
        for one in self._passes:
            squares = [one.square_of_sum.get(g) for g in range(self._count)]
            total = total + self._scale(one) * _stack(squares)
        assert isinstance(total, Tensor)
        return total / self.examples**2

    @property
    def mean_squared_norm(self) -> Tensor:
        """‖g‖² of the mean gradient, a scalar."""
        return self.mean_squared_norms().sum()

    def _scale(self, one: BackwardPass) -> Tensor | float:
        """The one place that undoes how the loss was scaled: ‖g_i‖² = scale · ‖G_i‖².

        ``backward`` gives G_i with Σ_i G_i the gradient that is stepped with. For a mean of m examples,
        however many passes it took, g_i = m G_i; for a sum, g_i = G_i. A GradScaler's factor is in both.
        """
        scale = (self.examples / self.loss_weight) ** 2 if self.reduction == "mean" else 1.0
        return scale if one.scale is None else scale / one.scale.square()

    def unscaled(self, squares: Tensor) -> Tensor:
        """‖g‖² from the square of a gradient as a GradScaler left it."""
        scale = self._passes[-1].scale if self._passes else None
        return squares if scale is None else squares / scale.square().to(squares)

    @property
    def penalized(self) -> bool:
        """Whether the loss had a part that is not the examples', a penalty."""
        return any(one.penalized for one in self._passes)

    def _check(self, least: int) -> None:
        if not self._passes:
            if self._meter is not None:
                self._meter.check()
            raise RuntimeError("nothing was measured: call backward on a loss of this model first")
        if self.examples < least:
            raise RuntimeError(f"the batch had {self.examples} example, and a variance takes at least {least}")
        for one in self._passes:
            one.finish()
        if self._meter is not None:
            self._meter.check()


def _stack(values: Sequence[Tensor | None]) -> Tensor:
    like = next((value for value in values if value is not None), torch.zeros(()))
    return torch.stack([like.new_zeros(()) if value is None else value.to(like.dtype) for value in values])
