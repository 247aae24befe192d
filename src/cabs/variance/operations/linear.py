"""Matrix multiplications: whatever stands before the last dimension is a position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.variance.factors import Outer, PerExample, Positions
from cabs.variance.layout import Layout
from cabs.variance.registry import operation


def positions(tensor: Tensor) -> Tensor:
    """(m, …, d) as (m, 1, t, d): one group, all positions in one dimension."""
    return tensor.reshape(tensor.shape[0], 1, -1, tensor.shape[-1])


def _one_row_each(delta: Tensor) -> bool:
    """Without positions a squared norm is the product of two row norms."""
    return delta.dim() == 2


def _any_rows(arguments: Mapping[str, Any], layout: Layout) -> bool:
    """Covers examples in a dimension of their own, or flattened with positions into rows."""
    examples = arguments["mat1"] if "mat1" in arguments else arguments["input"]
    return layout.holds(examples, features=1) or layout.holds_rows(examples)


def _by_matrix(arguments: Mapping[str, Any], layout: Layout) -> bool:
    return arguments["other"].dim() == 2 and _any_rows(arguments, layout)


@operation(
    F.linear,
    weight=("input",),
    bias=(),
    covers=_any_rows,
    features=1,
    cheap=_one_row_each,
    lowers_precision=True,
    sums_cheaply=True,
)
def linear(delta: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Mapping[str, PerExample]:
    gradients: dict[str, PerExample] = {"bias": Positions(delta, range(1, delta.dim() - 1))}
    if input is not None:
        gradients["weight"] = Outer(positions(delta), positions(input), weight.shape)
    return gradients


@operation(
    torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__, other=("input",),
    covers=_by_matrix, features=1, cheap=_one_row_each, lowers_precision=True, sums_cheaply=True,
)  # fmt: skip
def matmul(delta: Tensor, input: Tensor, other: Tensor) -> Mapping[str, PerExample]:
    return {"other": Outer(positions(input), positions(delta), other.shape)}


@operation(
    torch.addmm, Tensor.addmm, input=(), mat2=("mat1",),
    covers=_any_rows, features=1, cheap=_one_row_each, lowers_precision=True, sums_cheaply=True,
)  # fmt: skip
def addmm(
    delta: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Mapping[str, PerExample]:
    gradients: dict[str, PerExample] = {"input": Positions(beta * delta, range(1, delta.dim() - 1), input.shape)}
    if mat1 is not None:
        gradients["mat2"] = Outer(positions(mat1), positions(alpha * delta), mat2.shape)
    return gradients
