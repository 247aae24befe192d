"""Scales and shifts behind a normalisation, and the slopes of PReLU: sums over positions of δ ∘ x̂."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.variance.factors import PerExample, Positions, wide
from cabs.variance.layout import Layout
from cabs.variance.registry import operation


def _any_rows(arguments: Mapping[str, Any], layout: Layout) -> bool:
    return layout.holds(arguments["input"], features=1) or layout.holds_rows(arguments["input"])


def affine(delta: Tensor, normalized: Tensor | None, over: Sequence[int]) -> Mapping[str, PerExample]:
    """The gradients of weight and bias in δ ∘ (weight ∘ x̂ + bias)."""
    gradients: dict[str, PerExample] = {"bias": Positions(delta, over)}
    if normalized is not None:
        gradients["weight"] = Positions(wide(delta) * normalized, over)
    return gradients


@operation(F.layer_norm, torch.layer_norm, weight=("input",), bias=(), covers=_any_rows, features=1)
def layer_norm(
    delta: Tensor,
    input: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Mapping[str, PerExample]:
    normalized = None if input is None else F.layer_norm(wide(input), list(normalized_shape), eps=eps)
    return affine(delta, normalized, range(1, delta.dim() - len(normalized_shape)))


@operation(F.rms_norm, torch.rms_norm, weight=("input",), covers=_any_rows, features=1)
def rms_norm(
    delta: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Mapping[str, PerExample]:
    # The default eps is that of the type the operation ran in.
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    normalized = F.rms_norm(wide(input), list(normalized_shape), eps=eps)
    return affine(delta, normalized, range(1, delta.dim() - len(normalized_shape)))


@operation(F.group_norm, torch.group_norm, weight=("input",), bias=())
def group_norm(
    delta: Tensor,
    input: Tensor | None,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Mapping[str, PerExample]:
    normalized = None if input is None else F.group_norm(wide(input), num_groups, eps=eps)
    return affine(delta, normalized, range(2, delta.dim()))


@operation(F.instance_norm, weight=("input", "running_mean", "running_var"), bias=())
def instance_norm(
    delta: Tensor,
    input: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Mapping[str, PerExample]:
    normalized = None
    if input is not None:
        x = wide(input)
        normalized = (
            F.instance_norm(x, eps=eps) if use_input_stats else _standardized(x, running_mean, running_var, eps)
        )
    return affine(delta, normalized, range(2, delta.dim()))


@operation(
    F.batch_norm,
    weight=("input", "running_mean", "running_var"),
    bias=(),
    mixes_examples=lambda arguments: bool(arguments.get("training")),
)
def batch_norm(
    delta: Tensor,
    input: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Mapping[str, PerExample]:
    normalized = None
    if input is not None:
        x = wide(input)
        if training:
            running_var, running_mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        normalized = _standardized(x, running_mean, running_var, eps)
    return affine(delta, normalized, range(2, delta.dim()))


def _standardized(x: Tensor, mean: Tensor | None, variance: Tensor | None, eps: float) -> Tensor:
    assert mean is not None
    assert variance is not None
    shape = (1, -1, *(1 for _ in range(2, x.dim())))
    return (x - mean.reshape(shape)) * (variance.reshape(shape) + eps).rsqrt()


@operation(torch.prelu, F.prelu, weight=("input",))
def prelu(delta: Tensor, input: Tensor, weight: Tensor) -> Mapping[str, PerExample]:
    terms = wide(delta) * wide(input).clamp(max=0)
    first = 1 if weight.numel() == 1 else 2
    return {"weight": Positions(terms, range(first, terms.dim()), weight.shape)}
