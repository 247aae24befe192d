"""Convolutions of one to three dimensions, and their transposes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.variance.factors import Outer, PerExample, Positions
from cabs.variance.registry import operation

Sizes = int | Sequence[int]


def patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """What the kernel sees at each output position (im2col): (m, g, t, C/g · |k|), for any dimension."""
    spatial = len(kernel)
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    # (m, C, *out, *kernel) → (m, g, *out, C/g, *kernel)
    x = x.unflatten(1, (groups, -1)).movedim(2, 2 + spatial)
    return x.flatten(2 + spatial).flatten(2, 1 + spatial)


def correlation(
    x: Tensor, delta: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> PerExample:
    """The weight gradients g_i[d, c, k] = Σ_t δ_t[d] x_{s t + l k}[c] of x already padded."""
    kernel = weight.shape[2:]
    # With strides the last rows of x may be out of the kernel's reach.
    out = delta.shape[2:]
    for axis, (o, k, s, d) in enumerate(zip(out, kernel, stride, dilation, strict=True), start=2):
        x = x.narrow(axis, 0, (o - 1) * s + d * (k - 1) + 1)
    left = delta.flatten(2).unflatten(1, (groups, -1)).mT  # (m, g, t, D/g)
    return Outer(left, patches(x, kernel, stride, dilation, groups), weight.shape)


def padded(x: Tensor, padding: str | Sizes, kernel: Sequence[int], dilation: Sequence[int]) -> Tensor:
    spatial = len(kernel)
    if padding == "valid":
        return x
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        sides = [(n // 2, n - n // 2) for n in total]
    else:
        assert not isinstance(padding, str)
        sides = [(n, n) for n in each(padding, spatial)]
    return F.pad(x, [n for side in reversed(sides) for n in side]) if any(map(any, sides)) else x


def each(value: Sizes, spatial: int) -> tuple[int, ...]:
    """An option as one number a dimension."""
    if isinstance(value, int):
        return (value,) * spatial
    values = tuple(value)
    return values * spatial if len(values) == 1 else values


def over_positions(delta: Tensor) -> PerExample:
    return Positions(delta, range(2, delta.dim()))


@operation(
    torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d,
    weight=("input",), bias=(), lowers_precision=True,
)  # fmt: skip
def convolution(
    delta: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Mapping[str, PerExample]:
    gradients: dict[str, PerExample] = {"bias": over_positions(delta)}
    if input is not None:
        spatial = weight.dim() - 2
        stride, dilation = each(stride, spatial), each(dilation, spatial)
        x = padded(input, padding, weight.shape[2:], dilation)
        gradients["weight"] = correlation(x, delta, weight, stride, dilation, groups)
    return gradients


@operation(
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    weight=("input",), bias=(), lowers_precision=True,
)  # fmt: skip
def transposed_convolution(
    delta: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Mapping[str, PerExample]:
    gradients: dict[str, PerExample] = {"bias": over_positions(delta)}
    if input is not None:
        # The transpose of a convolution that takes delta to input: the two change places.
        spatial = weight.dim() - 2
        stride, dilation = each(stride, spatial), each(dilation, spatial)
        x = padded(delta, padding, weight.shape[2:], dilation)
        gradients["weight"] = correlation(x, input, weight, stride, dilation, groups)
    return gradients
