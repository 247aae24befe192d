"""Convolutions of one to three dimensions, and their transposes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.torch_internals import convolution_backward
from cabs.variance.factors import PerExample, Positions
from cabs.variance.operations.correlation import Correlation, Geometry
from cabs.variance.registry import only_first, operation

Sizes = int | Sequence[int]
ARGUMENTS = ("input", "weight", "bias")


def sides(
    padding: str | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((n // 2, n - n // 2) for n in total)
    assert not isinstance(padding, str)
    return tuple((n, n) for n in padding)


def each(value: Sizes, spatial: int) -> tuple[int, ...]:
    """An option as one number a dimension."""
    if isinstance(value, int):
        return (value,) * spatial
    values = tuple(value)
    return values * spatial if len(values) == 1 else values


def geometry_of(
    weight: Tensor, stride: Sizes = 1, padding: str | Sizes = 0, dilation: Sizes = 1, groups: int = 1
) -> Geometry:
    spatial = weight.dim() - 2
    sizes = padding if isinstance(padding, str) else each(padding, spatial)
    return _geometry(tuple(weight.shape[2:]), each(stride, spatial), sizes, each(dilation, spatial), groups)


@functools.lru_cache(maxsize=1024)
def _geometry(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: str | tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Geometry:
    return Geometry(kernel, stride, sides(padding, kernel, dilation), dilation, groups)


def _batched(arguments: Mapping[str, Any]) -> bool:
    """Covers inputs with a dimension for rows in front of channels and positions."""
    return arguments["input"].dim() == arguments["weight"].dim()


def frames(rows: Tensor) -> Tensor:
    """(m, t, channels, *positions) with an example's rows, if it has several, as one more dimension of positions."""
    return rows.squeeze(1) if rows.shape[1] == 1 else rows.transpose(1, 2)


def over_frames(geometry: Geometry, rows: Tensor) -> Geometry:
    """The geometry that goes with ``frames``: the kernel sees one row at a time."""
    if rows.shape[1] == 1:
        return geometry
    one = (1, *geometry.kernel), (1, *geometry.stride), ((0, 0), *geometry.padding), (1, *geometry.dilation)
    return Geometry(*one, geometry.groups)


class Bias(Positions):
    """The gradients of a bias, of which the weight may have found the norms already."""

    def __init__(self, delta: Tensor, found: list[Tensor]) -> None:
        super().__init__(delta, range(2, delta.dim()))
        self._found = found

    def positionwise(self, weights: Tensor | None = None) -> Tensor:
        return self._found[0] if self._found and weights is None else super().positionwise(weights)


def over_positions(delta: Tensor) -> PerExample:
    return Positions(delta, range(2, delta.dim()))


def _differentiated(
    delta: Tensor,
    wanted: Sequence[str],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Mapping[str, Tensor]:
    """What autograd does for a convolution, as far as it is wanted; ``options`` are those of ``convolution``."""
    geometry = geometry_of(weight, **options)
    before, after = zip(*geometry.padding, strict=True)
    if before != after:
        padded = geometry.pad(input)
        gradients = dict(_differentiated(delta, wanted, padded, weight, None, **{**options, "padding": 0}))
        if "input" in gradients:
            for axis, (n, skipped) in enumerate(zip(input.shape[2:], before, strict=True), start=2):
                gradients["input"] = gradients["input"].narrow(axis, skipped, n)
        return gradients
    found: dict[str, Tensor] = {}
    if "bias" in wanted and "weight" not in wanted:  # it would be found along with the weight's, at that price
        found["bias"] = delta.sum([0, *range(2, delta.dim())])
    mask = [name in wanted and name not in found for name in ARGUMENTS]
    if any(mask):
        shape = (geometry.stride, before, geometry.dilation, False, [0] * len(before), geometry.groups)
        every = convolution_backward(delta, input, weight, [weight.shape[0]], *shape, mask)
        found |= {name: gradient for name, gradient, asked in zip(ARGUMENTS, every, mask, strict=True) if asked}
    return found


@operation(
    torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d,
    weight=("input",), bias=(), covers=_batched, leading=only_first, lowers_precision=True,
    differentiated=_differentiated,
)  # fmt: skip
def convolution(
    delta: Tensor,
    input: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Mapping[str, PerExample]:
    framed = frames(delta)
    if input is None:
        return {"bias": over_positions(framed)}
    geometry = over_frames(geometry_of(weight, stride, padding, dilation, groups), delta)
    of_weight = Correlation(frames(input), framed, geometry, weight.shape)
    return {"weight": of_weight, "bias": Bias(framed, of_weight.delta_norms)}


@operation(
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    weight=("input",), bias=(), covers=_batched, leading=only_first, lowers_precision=True,
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
    framed = frames(delta)
    gradients: dict[str, PerExample] = {"bias": over_positions(framed)}
    if input is not None:
        # The transpose of a convolution that takes delta to input: the two change places.
        geometry = over_frames(geometry_of(weight, stride, padding, dilation, groups), delta)
        gradients["weight"] = Correlation(framed, frames(input), geometry, weight.shape)
    return gradients
