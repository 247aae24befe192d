"""The definition, as a loop over single examples: slow, obviously right, and what everything is tested against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Reference(NamedTuple):
    """What ``GradientVariance`` measures, by definition; per parameter group where it says so."""

    squared_norms: Tensor
    mean_squared_norm: Tensor
    trace: Tensor
    traces: Tensor


def per_example_gradients(
    loss_of: Callable[[int], Tensor], parameters: Iterable[Tensor], examples: int
) -> list[Tensor]:
    """g_i of each parameter, shape (m, *parameter.shape).

    Args:
        loss_of: the loss ℓ_i of example i alone, without penalties.
        parameters: what to differentiate by.
        examples: m.
    """
    parameters = list(parameters)
    rows = [
        torch.autograd.grad(loss_of(i), parameters, allow_unused=True, materialize_grads=True) for i in range(examples)
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def reference(
    loss_of: Callable[[int], Tensor],
    groups: Sequence[Iterable[Tensor]],
    examples: int,
    weights: Mapping[Tensor, Tensor] | None = None,
) -> Reference:
    """tr Σ and its parts from the gradient of every single example (eq:sample_variance); tr(PΣ) with weights P."""
    groups = [list(group) for group in groups]
    gradients = per_example_gradients(loss_of, [p for group in groups for p in group], examples)
    squares: list[Any] = []
    means: list[Any] = []
    rest = iter(gradients)
    for group in groups:
        flat = torch.cat([next(rest).reshape(examples, -1) for _ in group], 1)
        ones = torch.ones(())
        p = torch.cat([(weights[q] if weights else ones.expand_as(q)).flatten().to(flat) for q in group])
        squares.append((p * flat.square()).sum(1))
        means.append((p * flat.mean(0).square()).sum())
    traces = torch.stack([s.mean() - m for s, m in zip(squares, means, strict=True)])
    return Reference(torch.stack(squares).sum(0), torch.stack(means).sum(), traces.sum(), traces)
