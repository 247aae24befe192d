"""Matrix multiplications: whatever stands before the last dimension is a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.variance.factors import Outer, PerExample, Positions
from cabs.variance.registry import operation


def one_group(rows: Tensor) -> Tensor:
    """(m, t, d) as (m, 1, t, d)."""
    return rows.unsqueeze(1)


@operation(F.linear, weight=("input",), bias=(), cheap=True, lowers_precision=True, sums_cheaply=True)
def linear(delta: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Mapping[str, PerExample]:
    gradients: dict[str, PerExample] = {"bias": Positions(delta, (1,))}
    if input is not None:
        gradients["weight"] = Outer(one_group(delta), one_group(input), weight.shape)
    return gradients


def _by_matrix(arguments: Mapping[str, Any]) -> bool:
    return arguments["other"].dim() == 2


@operation(
    torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__, other=("input",),
    covers=_by_matrix, cheap=True, lowers_precision=True, sums_cheaply=True,
)  # fmt: skip
def matmul(delta: Tensor, input: Tensor, other: Tensor) -> Mapping[str, PerExample]:
    return {"other": Outer(one_group(input), one_group(delta), other.shape)}


@operation(
    torch.addmm, Tensor.addmm, input=(), mat2=("mat1",), cheap=True, lowers_precision=True, sums_cheaply=True,
    covers=lambda arguments: arguments["input"].dim() == 1 or arguments["input"].shape[0] == 1,
)  # fmt: skip
def addmm(
    delta: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Mapping[str, PerExample]:
    over = (1, 2) if input.shape[-1] == 1 else (1,)
    gradients: dict[str, PerExample] = {"input": Positions(beta * delta, over, input.shape)}
    if mat1 is not None:
        gradients["mat2"] = Outer(one_group(mat1), one_group(alpha * delta), mat2.shape)
    return gradients
