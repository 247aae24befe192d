"""From what backward passes leave behind to tr Σ: the one place that undoes how losses were scaled.

Backward gives G_i = w g_i, with w the weight of one example in the gradient that is stepped with: 1/m for the mean of m
examples, however many passes it took, and 1 for a sum. Where passes have weights of their own (accumulated means of
batches of different sizes), w is that of the example's pass. The gradient of the step is Σ_i w_i g_i, and
W = Σ_i w_i, so that

    tr Σ ≈ Σ_i (w_i / W) ‖g_i‖² − ‖Σ_i w_i g_i / W‖²

which is the paper's estimate if all weights are alike. A GradScaler's factor is in G_i too.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from cabs.torch_internals import unseen
from cabs.variance.backward import BackwardPass
from cabs.variance.dots import NOT_ALIKE, sums_of_squares
from cabs.variance.parameters import Parameters

Passes = Sequence[BackwardPass]

P = ParamSpec("P")
R = TypeVar("R")


def _unseen(method: Callable[P, R]) -> Callable[P, R]:
    """Lets a method compute without being looked at itself."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with unseen():
            return method(*args, **kwargs)

    return call


class Readings(ABC):
    """What a measurement shows, once there was a backward pass.

    Attributes:
        estimator: how tr Σ is estimated.
        reduction: how the loss puts examples together.
    """

    estimator: str
    reduction: str
    measures_dots: bool = False
    """Whether ⟨g_i, g⟩ is measured too, for ``dot_variance``; to be set before a backward pass."""
    _parameters: Parameters
    _count: int
    """How many parameter groups there are."""

    @abstractmethod
    def _readable(self, least: int = 1) -> list[BackwardPass]:
        """The passes of the batch, after a check that nothing was missed and that it has so many examples."""

    @property
    @abstractmethod
    def _passes(self) -> list[BackwardPass]: ...

    @property
    @abstractmethod
    def examples(self) -> int:
        """m: the examples of the batch."""

    @_unseen
    def squared_norms(self) -> Tensor:
        """‖g_i‖², one for each example measured."""
        if self.estimator == "microbatch":
            raise RuntimeError("the estimator microbatch does not see single examples: read trace()")
        return _squared_norms(self._readable(), self.reduction)

    @_unseen
    def traces(self) -> Tensor:
        """tr Σ of each parameter group, shape (groups,)."""
        passes = self._readable(least=2)
        if self.estimator == "microbatch" and len(passes) < 2:
            raise RuntimeError(
                "the estimator microbatch compares backward passes, and this batch had one: accumulate gradients of "
                "at least two microbatches, or choose estimator='exact'"
            )
        mean_squares = _mean_squared_norms(passes, self.reduction, self._count)
        return self.traces_of(self._sums_of(passes), mean_squares, sum(one.examples for one in passes))

    @_unseen
    def sums(self) -> Tensor:
        """What adds up over the processes that share a batch, see ``reading``."""
        return self._sums_of(self._readable())

    def _sums_of(self, passes: Passes) -> Tensor:
        adds_up = _sums_of_passes if self.estimator == "microbatch" else _sums_of_examples
        return adds_up(passes, self.reduction, self._count)

    @property
    def sums_count(self) -> int:
        """How many numbers ``sums`` has."""
        return self._count + (2 if self.estimator == "microbatch" else 0)

    def traces_of(self, sums: Tensor, mean_squares: Tensor, examples: int) -> Tensor:
        """tr Σ of each group, from ``sums``, added up over processes, and ‖g‖² of all ``examples`` of the batch."""
        if self.estimator == "microbatch":
            return _trace_between_passes(sums[: self._count], mean_squares, examples, *sums[self._count :])
        return sums / examples - mean_squares

    def trace(self) -> Tensor:
        """tr Σ ≈ (1/m) Σ_i ‖g_i‖² − ‖g‖² over all parameters, a scalar."""
        return self.traces().sum()

    @_unseen
    def mean_squared_norms(self) -> Tensor:
        """‖g‖² of each parameter group, shape (groups,)."""
        return _mean_squared_norms(self._readable(), self.reduction, self._count)

    @property
    def mean_squared_norm(self) -> Tensor:
        """‖g‖² of the mean gradient, a scalar."""
        return self.mean_squared_norms().sum()

    @_unseen
    def dot_variance(self) -> Tensor:
        """Var_i⟨g_i, g⟩ over the examples measured, a scalar."""
        self._readable(least=2)
        squares, count = self.dot_sums(lambda numbers: numbers)
        return squares / count

    @_unseen
    def dot_sums(self, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Σ_i (⟨g_i, g⟩ − ‖g‖²)² over the examples measured, and how many these are.

        Args:
            total: adds numbers up over the processes that share the batch.
        """
        passes = self._readable() if self._passes else []
        weights = _weights(passes, self.reduction)
        counted = [
            (one.dots, weight, 1.0 if one.scale is None else float(one.scale))
            for one, weight in zip(passes, weights, strict=True)
            if one.dots is not None
        ]
        if len(counted) < len(passes):
            raise RuntimeError(NOT_ALIKE)
        weight = sum(one.examples * weight for one, weight in zip(passes, weights, strict=True))
        return sums_of_squares(counted, weight, self.examples if passes else 0, self._parameters.measured, total)

    def unscaled(self, squares: Tensor) -> Tensor:
        """‖g‖² from the square of a gradient as a GradScaler left it."""
        scale = self._passes[-1].scale if self._passes else None
        return squares if scale is None else squares / scale.square().to(squares)

    @property
    def unweighed(self) -> bool:
        """Whether gradients came that could not be weighed, or measured, so that there is nothing to read."""
        return any(one.unweighed or one.unmeasured for one in self._passes)

    @property
    def penalized(self) -> bool:
        """Whether the loss had a part that is not the examples', a penalty."""
        return any(one.penalized for one in self._passes)


def _weights(passes: Passes, reduction: str) -> list[float]:
    """w of each pass."""
    examples = sum(one.examples for one in passes)
    usual = 1 / examples if reduction == "mean" else 1.0
    return [usual if one.weight is None else one.weight for one in passes]


def _scale(one: BackwardPass, weight: float) -> Tensor | float:
    """‖g_i‖² = scale · ‖G_i‖²."""
    return 1 / weight**2 if one.scale is None else 1 / weight**2 / one.scale.square()


def _squared_norms(passes: Passes, reduction: str) -> Tensor:
    """‖g_i‖², one for each example measured."""
    norms = []
    for one, weight in zip(passes, _weights(passes, reduction), strict=True):
        parts = [part for parts in one.squares.values() for part in parts]
        if len({part.shape for part in parts}) > 1:
            raise RuntimeError(
                "different numbers of examples were measured in different layers: set max_examples to a number, or "
                "to None for all"
            )
        norms.append(torch.stack(parts).sum(0) * _scale(one, weight))
    return torch.cat(norms)


def _sums_of_examples(passes: Passes, reduction: str, groups: int) -> Tensor:
    """m Σ_i (w_i / W) ‖g_i‖² of each group: Σ_i ‖g_i‖² if all weights are alike."""
    weights = _weights(passes, reduction)
    examples = sum(one.examples for one in passes)
    total_weight = sum(one.examples * weight for one, weight in zip(passes, weights, strict=True))
    counts = [one.examples * examples * weight / total_weight for one, weight in zip(passes, weights, strict=True)]
    terms = [
        count * _scale(one, weight) * _means(one, groups)
        for one, weight, count in zip(passes, weights, counts, strict=True)
    ]
    return _added(terms, groups)


def _sums_of_passes(passes: Passes, reduction: str, groups: int) -> Tensor:
    """Σ_k b_k ‖g_k‖² of each group over the passes that were squared, then how many these are, and their examples."""
    squared = [(one, w) for one, w in zip(passes, _weights(passes, reduction), strict=True) if one.squares]
    total: Tensor | float = 0.0
    for one, weight in squared:
        total = total + _scale(one, weight) / one.examples * _means(one, groups)  # a pass adds up to b g_k
    total = torch.as_tensor(total).expand(groups)
    return torch.cat([total, total.new_tensor([len(squared), sum(one.examples for one, _ in squared)])])


def _trace_between_passes(
    sums: Tensor, mean_squares: Tensor, examples: int, passes: Tensor, measured: Tensor
) -> Tensor:
    """tr Σ of each group, without bias, from passes of any sizes.

    E‖g_k‖² = ‖∇F‖² + tr Σ / b_k and E‖g‖² = ‖∇F‖² + tr Σ / m: the difference of the two means over the passes,
    each weighed by its examples, is tr Σ times that of 1/b_k and 1/m.

    Args:
        sums: Σ_k b_k ‖g_k‖² of each group, over the passes that were squared.
        mean_squares: ‖g‖² of each group.
        examples: m.
        passes: how many passes were squared.
        measured: how many examples they had.
    """
    return (sums / measured - mean_squares) / (passes / measured - 1 / examples)


def _mean_squared_norms(passes: Passes, reduction: str, groups: int) -> Tensor:
    """‖g‖² of each group."""
    weights = _weights(passes, reduction)
    total_weight = sum(one.examples * weight for one, weight in zip(passes, weights, strict=True))
    squares = [_stack([one.square_of_sum.get(group) for group in range(groups)]) for one in passes]
    return _added([_scale(one, total_weight) * square for one, square in zip(passes, squares, strict=True)], groups)


def _added(terms: Sequence[Tensor], groups: int) -> Tensor:
    total = torch.zeros(groups) if not terms else terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _means(one: BackwardPass, groups: int) -> Tensor:
    return _stack([one.mean_squares(group) for group in range(groups)])


def _stack(values: Sequence[Tensor | None]) -> Tensor:
    like = next((value for value in values if value is not None), None)
    if like is None:
        return torch.zeros(len(values))
    if len(values) == 1:
        return like.unsqueeze(0)
    return torch.stack([like.new_zeros(()) if value is None else value.to(like.dtype) for value in values])
