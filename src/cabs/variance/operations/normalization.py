"""Scales and shifts behind a normalisation, and the slopes of PReLU: sums over positions of δ ∘ x̂."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.norms import wide
from cabs.variance.factors import PerExample, Positions
from cabs.variance.registry import only_first, operation


def _normalized(name: str, tensor: Tensor, arguments: Mapping[str, Any]) -> int:
    return tensor.dim() - len(arguments["normalized_shape"])


def affine(delta: Tensor, normalized: Tensor | None, over: Sequence[int]) -> Mapping[str, PerExample]:
    """The gradients of weight and bias in δ ∘ (weight ∘ x̂ + bias)."""
    gradients: dict[str, PerExample] = {"bias": Positions(delta, over)}
    if normalized is not None:
        gradients["weight"] = Positions(wide(delta) * normalized, over)
    return gradients


@operation(F.layer_norm, torch.layer_norm, weight=("input",), bias=(), leading=_normalized)
def layer_norm(
    delta: Tensor,
    input: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Mapping[str, PerExample]:
    normalized = None if input is None else F.layer_norm(wide(input), list(normalized_shape), eps=eps)
    return affine(delta, normalized, (1,))


@operation(F.rms_norm, torch.rms_norm, weight=("input",), leading=_normalized)
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
    return affine(delta, normalized, (1,))


@operation(F.group_norm, torch.group_norm, weight=("input",), bias=(), leading=only_first)
def group_norm(
    delta: Tensor,
    input: Tensor | None,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Mapping[str, PerExample]:
    normalized = None
    if input is not None:
        normalized = F.group_norm(wide(input).flatten(0, 1), num_groups, eps=eps).unflatten(0, input.shape[:2])
    return affine(delta, normalized, _all_but_channels(delta))


@operation(F.instance_norm, weight=("input", "running_mean", "running_var"), bias=(), leading=only_first)
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
        x = wide(input).flatten(0, 1)
        normalized = (
            F.instance_norm(x, eps=eps) if use_input_stats else _standardized(x, running_mean, running_var, eps)
        ).unflatten(0, input.shape[:2])
    return affine(delta, normalized, _all_but_channels(delta))


def _batch_statistics(arguments: dict[str, Any]) -> dict[str, Any]:
    """In training mode the mean and the variance are those of all examples together."""
    x = arguments.get("input")
    if x is None or not arguments.get("training"):
        return arguments
    variance, mean = torch.var_mean(wide(x), [0, *range(2, x.dim())], correction=0)
    return {**arguments, "running_mean": mean, "running_var": variance, "training": False}


@operation(
    F.batch_norm, weight=("input", "running_mean", "running_var"), bias=(), leading=only_first,
    prepare=_batch_statistics,
)  # fmt: skip
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
        x = wide(input).flatten(0, 1)
        normalized = _standardized(x, running_mean, running_var, eps).unflatten(0, input.shape[:2])
    return affine(delta, normalized, _all_but_channels(delta))


def _all_but_channels(delta: Tensor) -> list[int]:
    """Behind the examples (m, rows, channels, …) everything but the channels is summed over."""
    return [1, *range(3, delta.dim())]


def _standardized(x: Tensor, mean: Tensor | None, variance: Tensor | None, eps: float) -> Tensor:
    assert mean is not None
    assert variance is not None
    shape = (1, -1, *(1 for _ in range(2, x.dim())))
    return (x - mean.reshape(shape)) * (variance.reshape(shape) + eps).rsqrt()


@operation(torch.prelu, F.prelu, weight=("input",), leading=only_first)
def prelu(delta: Tensor, input: Tensor, weight: Tensor) -> Mapping[str, PerExample]:
    terms = wide(delta) * wide(input).clamp(max=0)
    over = range(1, terms.dim()) if weight.numel() == 1 else _all_but_channels(terms)
    return {"weight": Positions(terms, over, weight.shape)}
