"""Convolutions of one to three dimensions, and their transposes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.norms import wide
from cabs.torch_internals import convolution_backward
from cabs.variance.factors import Outer, PerExample, Positions, in_chunks, inner_products, row_norms
from cabs.variance.registry import only_first, operation

Sizes = int | Sequence[int]


@dataclass(frozen=True)
class Geometry:
    """How a kernel slides: one number a spatial dimension; padding as (before, after)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def pad(self, x: Tensor) -> Tensor:
        if not any(map(any, self.padding)):
            return x
        return F.pad(x, [n for side in reversed(self.padding) for n in side])


ARGUMENTS = ("input", "weight", "bias")

NARROW = 64
"""A matrix product with a side shorter than this is slow."""


class _Total:
    """Sums over examples, by the number of the piece they are of."""

    def __init__(self) -> None:
        self.terms: list[Tensor] = []

    def add(self, number: int, products: Tensor) -> None:
        if number < len(self.terms):
            self.terms[number] += products.sum(0)
        else:
            self.terms.append(products.sum(0))


class Correlation(PerExample):
    """The weight gradients of a convolution, g_i[d, c, k] = Σ_t δ_t[d] x_{s t + l k}[c], for x padded.

    Three ways to their norms, of which the cheapest is taken for each layer and shape. With P positions of x,
    T of δ, C and D channels and |k| kernel entries, an example takes about as many multiplications as

    - ``_explicitly``: C·D·T·|k|. The gradient itself: x is unfolded, and multiplied with δ. With many channels it is
      unfolded along all dimensions but the first only, and for each row of the kernel the pixels it meets are then
      a slice. The gradients' sum comes with it, so that nobody else need compute it.
    - ``_by_pixel_grams``: P²C + T²D, and 2·T² additions for each row and column of the kernel. As
      ‖g_i‖² = Σ_{t,t'} ⟨δ_t, δ_t'⟩ Σ_k ⟨x_{t+k}, x_{t'+k}⟩, all inner products are those of pixels, and the sum over k
      is a box filter along the diagonal of the Gram of δ. Needs stride 1.
    - ``_by_patch_grams``: T²(C·|k| + D). The same with whole patches for pixels, for any stride.

    Args:
        x: shape (m, C, *positions), not padded.
        delta: shape (m, D, *positions).
        geometry: how the kernel slides over x.
        shape: the weight's, (D, C/g, *kernel).
    """

    def __init__(self, x: Tensor, delta: Tensor, geometry: Geometry, shape: torch.Size) -> None:
        self.x, self.delta, self.geometry, self.shape = x, delta, geometry, shape
        self.examples = delta.shape[0]
        self.delta_norms: list[Tensor] = []
        """Σ_t ‖δ_t‖², once it is known."""

    def __getitem__(self, examples: slice) -> Correlation:
        return Correlation(self.x[examples], self.delta[examples], self.geometry, self.shape)

    # -- the gradients themselves

    def _reached(self) -> Tensor:
        """x, padded; with strides its last rows may be out of the kernel's reach."""
        geometry = self.geometry
        x = geometry.pad(wide(self.x))
        spans = zip(self.delta.shape[2:], geometry.kernel, geometry.stride, geometry.dilation, strict=True)
        for axis, (out, k, s, d) in enumerate(spans, start=2):
            x = x.narrow(axis, 0, (out - 1) * s + d * (k - 1) + 1)
        return x

    def _outer(self) -> Outer:
        """δ and the patches that the kernel sees (im2col)."""
        geometry, spatial = self.geometry, len(self.geometry.kernel)
        x = self._reached()
        for axis, (k, s, d) in enumerate(
            zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True), start=2
        ):
            x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
        # (m, C, *out, *kernel) → (m, g, t, C/g · |k|)
        patches = x.unflatten(1, (geometry.groups, -1)).movedim(2, 2 + spatial)
        patches = patches.flatten(2 + spatial).flatten(2, 1 + spatial)
        return Outer(self._delta_rows().mT, patches, self.shape)

    def _delta_rows(self) -> Tensor:
        return wide(self.delta).flatten(2).unflatten(1, (self.geometry.groups, -1))  # (m, g, D/g, t)

    def dense(self) -> Tensor:
        return self._outer().dense()

    # -- their norms

    def squared_norms(self) -> Tensor:
        compute, bytes_each = self._cheapest()
        return in_chunks(self.examples, bytes_each, lambda some: compute(self[some]))

    def squared_norms_and_sum(self) -> tuple[Tensor, Tensor] | None:
        compute, bytes_each = self._cheapest(sum_too=True)
        if compute is not Correlation._explicitly:
            return None
        total = _Total()
        norms = in_chunks(self.examples, bytes_each, lambda some: self[some]._explicitly(total))
        # For each piece of the kernel (g, C/g · |piece|, D/g) → the weight's (D, C/g, *kernel)
        kernel, groups = self.geometry.kernel, self.geometry.groups
        pieces = torch.stack(total.terms) if len(total.terms) > 1 else total.terms[0].unsqueeze(0)
        c, first = self.x.shape[1] // groups, len(total.terms)
        summed = pieces.reshape(first, groups, c, math.prod(kernel) // first, -1).permute(1, 4, 2, 0, 3)
        return norms, summed.reshape(self.shape)

    def _cheapest(self, sum_too: bool = False) -> tuple[Callable[[Correlation], Tensor], int]:
        geometry = self.geometry
        c, d = self.x.shape[1] // geometry.groups, self.delta.shape[1] // geometry.groups
        p, t = math.prod(self.x.shape[2:]), math.prod(self.delta.shape[2:])
        k = math.prod(geometry.kernel)
        size = geometry.groups * (8 if self.delta.dtype == torch.float64 else 4)
        # Measured, in multiplications of a matrix product: an addition to a Gram takes the time of some fifteen, a copy
        # into a patch that of sixty. _explicitly multiplies at two thirds of the speed of one large product, such as
        # that which finds the sum alone.
        piece = self._piece()
        ways = [
            (
                (0.5 if sum_too else 1.5) * c * d * t * k,
                Correlation._explicitly,
                size * (c * piece * (p + t) + d * t + c * d * piece),
            ),
            (t * t * (c * k + d) + 60 * c * k * t, Correlation._by_patch_grams, size * (2 * t * t + c * k * t)),
        ]
        if all(s == 1 for s in geometry.stride):
            additions = t * t * (1 + sum(geometry.kernel))
            ways.append(
                (p * p * c + t * t * d + 15 * additions, Correlation._by_pixel_grams, size * (p * p + 3 * t * t))
            )
        _, compute, bytes_each = min(ways, key=lambda way: way[0])
        return compute, bytes_each

    def _piece(self) -> int:
        """How many kernel entries are multiplied at a time: a row's, or all if that would make narrow products."""
        kernel, c = self.geometry.kernel, self.x.shape[1] // self.geometry.groups
        row = math.prod(kernel[1:])
        return row if c * row >= NARROW else row * kernel[0]

    def _by_patch_grams(self) -> Tensor:
        return self._outer()._by_grams()

    def _explicitly(self, total: _Total | None = None) -> Tensor:
        norms: Tensor | None = None
        delta = self._delta_rows().mT
        for number, seen in enumerate(self._unfolded()):
            products = seen @ delta  # (m, g, C/g · |piece|, D/g)
            squares = row_norms(products)
            norms = squares if norms is None else norms + squares
            if total is not None:
                total.add(number, products)
        assert norms is not None
        return norms

    def _unfolded(self) -> Iterator[Tensor]:
        """For each piece of the kernel what it meets, (m, g, C/g · |piece|, t)."""
        geometry, out = self.geometry, self.delta.shape[2:]
        spatial = len(out)
        by_rows = self._piece() < math.prod(geometry.kernel)
        x = self._reached()
        options = enumerate(zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True), start=2)
        for axis, (k, s, d) in list(options)[by_rows:]:
            x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
        x = x.unflatten(1, (geometry.groups, -1))
        # (m, g, C/g, *positions, *piece) → (m, g, C/g · |piece|, *positions)
        inner = spatial - by_rows
        if inner:
            x = x.movedim(list(range(3 + spatial, 3 + spatial + inner)), list(range(3, 3 + inner)))
            x = x.flatten(2, 2 + inner)
        if not by_rows:
            yield x.flatten(3)
            return
        step = geometry.stride[0]
        for row in range(geometry.kernel[0]):
            start = row * geometry.dilation[0]
            yield x[:, :, :, start : start + (out[0] - 1) * step + 1 : step].flatten(3)

    def _by_pixel_grams(self) -> Tensor:
        geometry = self.geometry
        x = wide(self.x).flatten(2).unflatten(1, (geometry.groups, -1)).flatten(0, 1)
        delta = self._delta_rows().flatten(0, 1)
        gram = (delta.mT @ delta).unflatten(1, self.delta.shape[2:]).unflatten(-1, self.delta.shape[2:])
        for axis in range(len(geometry.kernel)):
            gram = self._box(gram, axis)
        return inner_products((x.mT @ x).flatten(1), gram.flatten(1)).unflatten(0, (-1, geometry.groups)).sum(1)

    def _box(self, gram: Tensor, axis: int) -> Tensor:
        """Σ_k gram[…, t − k, …, t' − k, …] along one dimension of t and t', from positions of δ to those of x."""
        spatial = len(self.geometry.kernel)
        one, other = 1 + axis, 1 + axis + spatial
        (before, _), dilation = self.geometry.padding[axis], self.geometry.dilation[axis]
        have, want = gram.shape[one], self.x.shape[2 + axis]
        shape = list(gram.shape)
        shape[one] = shape[other] = want
        shifts = [k * dilation - before for k in range(self.geometry.kernel[axis])]
        # Where nothing is cut off the first term can be the copy that the rest is added to.
        total = gram.clone() if have == want and 0 in shifts else gram.new_zeros(shape)
        for shift in shifts:
            low, high = max(0, shift), min(want, have + shift)
            if high <= low or (shift == 0 and have == want):
                continue
            into = total.narrow(one, low, high - low).narrow(other, low, high - low)
            into += gram.narrow(one, low - shift, high - low).narrow(other, low - shift, high - low)
        return total

    def positionwise(self) -> Tensor:
        """Σ_t (box_k ‖x‖²)(t) · ‖δ_t‖²: norms over channels, a box filter, a product."""
        bytes_each = max(4, self.delta.element_size()) * (self.x[:1].numel() + self.delta[:1].numel())
        found = in_chunks(self.examples, bytes_each, lambda some: self[some]._positionwise())
        self.delta_norms.append(found[:, 1])
        return found[:, 0]

    def _positionwise(self) -> Tensor:
        """Shape (m, 2): the sum, and Σ_t ‖δ_t‖² alone, which is the bias's."""
        geometry = self.geometry
        seen, delta = _channel_norms(self.x, geometry.groups), _channel_norms(self.delta, geometry.groups)
        spans = zip(self.x.shape[2:], self.delta.shape[2:], strict=True)
        for axis, (have, want) in enumerate(spans):
            options = (geometry.kernel[axis], geometry.stride[axis], geometry.padding[axis][0], geometry.dilation[axis])
            band = _band(have, want, *options, seen.dtype, seen.device)
            seen = (seen.movedim(2 + axis, -1) @ band).movedim(-1, 2 + axis)
        groups = geometry.groups
        alone = delta.flatten(1).sum(1)
        return torch.stack([(seen * delta).flatten(1).sum(1), alone], 1).unflatten(0, (-1, groups)).sum(1)


def _channel_norms(x: Tensor, groups: int) -> Tensor:
    """Squared norms over the channels of each group: (m · g, 1, *positions)."""
    return wide(x).square().unflatten(1, (groups, -1)).sum(2).flatten(0, 1).unsqueeze(1)


@functools.lru_cache(maxsize=128)
def _band(
    have: int,
    want: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """What takes pixels along one dimension to the sums that the kernel sees of them, shape (have, want)."""
    offset = torch.arange(have).unsqueeze(1) + padding - stride * torch.arange(want)
    seen = (offset >= 0) & (offset <= dilation * (kernel - 1)) & (offset % dilation == 0)
    return seen.to(device, dtype)


def sides(padding: str | Sizes, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((n // 2, n - n // 2) for n in total)
    assert not isinstance(padding, str)
    return tuple((n, n) for n in each(padding, len(kernel)))


def each(value: Sizes, spatial: int) -> tuple[int, ...]:
    """An option as one number a dimension."""
    if isinstance(value, int):
        return (value,) * spatial
    values = tuple(value)
    return values * spatial if len(values) == 1 else values


def geometry_of(
    weight: Tensor, stride: Sizes = 1, padding: str | Sizes = 0, dilation: Sizes = 1, groups: int = 1
) -> Geometry:
    kernel = tuple(weight.shape[2:])
    dilations = each(dilation, len(kernel))
    return Geometry(kernel, each(stride, len(kernel)), sides(padding, kernel, dilations), dilations, groups)


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

    def positionwise(self) -> Tensor:
        return self._found[0] if self._found else super().positionwise()


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
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Mapping[str, PerExample]:
    gradients: dict[str, PerExample] = {"bias": over_positions(frames(delta))}
    if input is not None:
        geometry = over_frames(geometry_of(weight, stride, padding, dilation, groups), delta)
        gradients["weight"] = of_weight = Correlation(frames(input), frames(delta), geometry, weight.shape)
        gradients["bias"] = Bias(frames(delta), of_weight.delta_norms)
    return gradients


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
    gradients: dict[str, PerExample] = {"bias": over_positions(frames(delta))}
    if input is not None:
        # The transpose of a convolution that takes delta to input: the two change places.
        geometry = over_frames(geometry_of(weight, stride, padding, dilation, groups), delta)
        gradients["weight"] = Correlation(frames(delta), frames(input), geometry, weight.shape)
    return gradients
