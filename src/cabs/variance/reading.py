"""From what backward passes leave behind to tr Σ: the one place that undoes how losses were scaled.

Backward gives G_i = w g_i, with w the weight of one example in the gradient that is stepped with: 1/m for the mean of m
examples, however many passes it took, and 1 for a sum. Where passes have weights of their own (accumulated means of
batches of different sizes), w is that of the example's pass. The gradient of the step is Σ_i w_i g_i, and
W = Σ_i w_i, so that

    tr Σ ≈ Σ_i (w_i / W) ‖g_i‖² − ‖Σ_i w_i g_i / W‖²

which is the paper's estimate if all weights are alike. A GradScaler's factor is in G_i too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cabs.variance.backward import BackwardPass

Passes = Sequence[BackwardPass]


def _weights(passes: Passes, reduction: str) -> list[float]:
    """w of each pass."""
    examples = sum(one.examples for one in passes)
    usual = 1 / examples if reduction == "mean" else 1.0
    return [usual if one.weight is None else one.weight for one in passes]


def _scale(one: BackwardPass, weight: float) -> Tensor | float:
    """‖g_i‖² = scale · ‖G_i‖²."""
    return 1 / weight**2 if one.scale is None else 1 / weight**2 / one.scale.square()


def squared_norms(passes: Passes, reduction: str) -> Tensor:
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


def sums_of_examples(passes: Passes, reduction: str, groups: int) -> Tensor:
    """m Σ_i (w_i / W) ‖g_i‖² of each group: Σ_i ‖g_i‖² if all weights are alike."""
    weights = _weights(passes, reduction)
    examples = sum(one.examples for one in passes)
    total_weight = sum(one.examples * weight for one, weight in zip(passes, weights, strict=True))
    total: Tensor | float = 0.0
    for one, weight in zip(passes, weights, strict=True):
        count = one.examples * examples * weight / total_weight
        total = total + count * _scale(one, weight) * _means(one, groups)
    return torch.as_tensor(total).expand(groups)


def sums_of_passes(passes: Passes, reduction: str, groups: int) -> Tensor:
    """Σ_k b_k ‖g_k‖² of each group over the passes that were squared, then how many these are, and their examples."""
    squared = [(one, w) for one, w in zip(passes, _weights(passes, reduction), strict=True) if one.squares]
    total: Tensor | float = 0.0
    for one, weight in squared:
        total = total + _scale(one, weight) / one.examples * _means(one, groups)  # a pass adds up to b g_k
    total = torch.as_tensor(total).expand(groups)
    return torch.cat([total, total.new_tensor([len(squared), sum(one.examples for one, _ in squared)])])


def trace_between_passes(sums: Tensor, mean_squares: Tensor, examples: int, passes: Tensor, measured: Tensor) -> Tensor:
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


def mean_squared_norms(passes: Passes, reduction: str, groups: int) -> Tensor:
    """‖g‖² of each group."""
    weights = _weights(passes, reduction)
    total_weight = sum(one.examples * weight for one, weight in zip(passes, weights, strict=True))
    total: Tensor | float = 0.0
    for one in passes:
        squares = [one.square_of_sum.get(group) for group in range(groups)]
        total = total + _scale(one, total_weight) * _stack(squares)
    assert isinstance(total, Tensor)
    return total


def _means(one: BackwardPass, groups: int) -> Tensor:
    return _stack([one.mean_squares(group) for group in range(groups)])


def _stack(values: Sequence[Tensor | None]) -> Tensor:
    like = next((value for value in values if value is not None), torch.zeros(()))
    return torch.stack([like.new_zeros(()) if value is None else value.to(like.dtype) for value in values])
