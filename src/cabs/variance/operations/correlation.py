"""The gradients of a convolution's weight: a correlation of its inputs with the gradients of its outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.norms import wide
from cabs.variance.factors import Outer, PerExample, in_chunks, inner_products, row_norms, weighted_squares
from cabs.variance.rows import EVERY


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


NARROW = 64
"""A matrix product with a side shorter than this is slow."""


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
        if examples == EVERY:
            return self
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

    def squared_norms(self, weights: Tensor | None = None) -> Tensor:
        compute, bytes_each = self._cheapest()
        if weights is None:
            return in_chunks(self.examples, bytes_each, lambda some: compute(self[some]))
        t, d = math.prod(self.delta.shape[2:]), self.shape[0] // self.geometry.groups
        if 2 * t <= d:  # patches are small beside the weights, which would have to be copied into another order
            return self._outer().squared_norms(weights)
        bytes_each, arranged = self._bytes_explicitly(), self._arranged(weights)
        return in_chunks(self.examples, bytes_each, lambda some: self[some]._explicitly(weights=arranged))

    def squared_norms_and_sum(self, weights: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        compute, _ = self._cheapest(sum_too=True)
        if compute is not Correlation._explicitly and weights is None:
            return None
        sums: dict[int, Tensor] = {}
        arranged = None if weights is None else self._arranged(weights)
        bytes_each = self._bytes_explicitly()
        norms = in_chunks(self.examples, bytes_each, lambda some: self[some]._explicitly(sums, arranged))
        # For each piece of the kernel (g, C/g · |piece|, D/g) → the weight's (D, C/g, *kernel)
        groups, c = self.geometry.groups, self.x.shape[1] // self.geometry.groups
        if len(sums) == 1:
            return norms, sums[0].reshape(groups, c, -1, sums[0].shape[-1]).permute(0, 3, 1, 2).reshape(self.shape)
        pieces = torch.stack(list(sums.values())).unflatten(2, (c, -1)).permute(1, 4, 2, 0, 3)
        return norms, pieces.reshape(self.shape)

    def _cheapest(self, sum_too: bool = False) -> tuple[Callable[[Correlation], Tensor], int]:
        return _cheapest(self.geometry, self.x.shape[1:], self.delta.shape[1:], self._item(), sum_too)

    def _item(self) -> int:
        return 8 if self.delta.dtype == torch.float64 else 4

    def _bytes_explicitly(self) -> int:
        return _bytes_explicitly(self.geometry, self.x.shape[1:], self.delta.shape[1:], self._item())

    def _arranged(self, weights: Tensor) -> Tensor:
        """Weights as ``_explicitly`` finds gradients: for each piece of the kernel (g, C/g · |piece|, D/g)."""
        groups, kernel = self.geometry.groups, math.prod(self.geometry.kernel)
        pieces = weights.reshape(groups, -1, self.x.shape[1] // groups, kernel)
        return pieces.unflatten(3, (-1, self._piece())).permute(3, 0, 2, 4, 1).flatten(2, 3)

    def _piece(self) -> int:
        return _piece(self.geometry, self.x.shape[1])

    def _by_patch_grams(self) -> Tensor:
        return self._outer()._by_grams()

    def _explicitly(self, sums: dict[int, Tensor] | None = None, weights: Tensor | None = None) -> Tensor:
        """‖g_i‖²; Σ_i g_i of each piece of the kernel is added to ``sums``. Groups stand with the examples."""
        norms: Tensor | None = None
        groups = self.geometry.groups
        delta = wide(self.delta).flatten(2)
        delta = delta.mT if groups == 1 else delta.unflatten(1, (groups, -1)).flatten(0, 1).mT
        for number, seen in enumerate(self._unfolded()):
            products = torch.bmm(seen, delta)  # (m · g, C/g · |piece|, D/g)
            by_group = products.unflatten(0, (-1, groups))
            if sums is not None:
                total = by_group.sum(0)
                sums[number] = sums[number].add_(total) if number in sums else total
            if weights is not None:
                squares = weighted_squares(by_group, weights[number])
            else:
                squares = row_norms(products if groups == 1 else by_group)
            norms = squares if norms is None else norms + squares
        assert norms is not None
        return norms

    def _unfolded(self) -> Iterator[Tensor]:
        """For each piece of the kernel what it meets, (m · g, C/g · |piece|, t)."""
        geometry, out = self.geometry, self.delta.shape[2:]
        x = geometry.pad(wide(self.x)).unflatten(1, (geometry.groups, -1))
        by_rows = int(self._piece() < math.prod(geometry.kernel))
        # (m, g, C/g, *piece, *positions), with all positions of x along the first dimension if it goes by rows
        places = x.stride()[3:]
        within = [n * place for n, place in zip(geometry.dilation, places, strict=True)]
        between = [n * place for n, place in zip(geometry.stride, places, strict=True)]
        size = [*x.shape[:3], *geometry.kernel[by_rows:], *x.shape[3 : 3 + by_rows], *out[by_rows:]]
        stride = [*x.stride()[:3], *within[by_rows:], *places[:by_rows], *between[by_rows:]]
        groups, pieces, rows = math.prod(size[:2]), math.prod(size[2 : 3 + len(out) - by_rows]), size[-len(out) :]
        if not by_rows:
            yield x.as_strided(size, stride).reshape(groups, pieces, -1)
            return
        x = x.as_strided(size, stride).reshape(groups, pieces, rows[0], -1)  # what was padded is let go
        step = geometry.stride[0]
        for row in range(geometry.kernel[0]):
            start = row * geometry.dilation[0]
            yield x[:, :, start : start + (out[0] - 1) * step + 1 : step].flatten(2)

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

    def positionwise(self, weights: Tensor | None = None) -> Tensor:
        """Σ_t (box_k ‖x‖²)(t) · ‖δ_t‖²: norms over channels, a box filter, a product."""
        if weights is not None:
            bytes_each = self._bytes_explicitly() * math.prod(self.geometry.kernel) // self._piece()
            return in_chunks(self.examples, bytes_each, lambda some: self[some]._outer().positionwise(weights))
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


@functools.lru_cache(maxsize=1024)
def _cheapest(
    geometry: Geometry, x: torch.Size, delta: torch.Size, item: int, sum_too: bool
) -> tuple[Callable[[Correlation], Tensor], int]:
    """The cheapest way for an example's x and δ of these shapes, and the bytes it takes for one."""
    c, d = x[0] // geometry.groups, delta[0] // geometry.groups
    p, t, k = math.prod(x[1:]), math.prod(delta[1:]), math.prod(geometry.kernel)
    size = geometry.groups * item
    # Measured, in multiplications of a matrix product: an addition to a Gram takes the time of some fifteen, a copy
    # into a patch that of sixty. _explicitly multiplies at two thirds of the speed of one large product, such as
    # that which finds the sum alone.
    explicitly = (0.5 if sum_too else 1.5) * c * d * t * k
    ways: list[tuple[float, Callable[[Correlation], Tensor], int]] = [
        (explicitly, Correlation._explicitly, _bytes_explicitly(geometry, x, delta, item)),
        (t * t * (c * k + d) + 60 * c * k * t, Correlation._by_patch_grams, size * (2 * t * t + c * k * t)),
    ]
    if all(s == 1 for s in geometry.stride):
        additions = t * t * (1 + sum(geometry.kernel))
        ways.append((p * p * c + t * t * d + 15 * additions, Correlation._by_pixel_grams, size * (p * p + 3 * t * t)))
    _, compute, bytes_each = min(ways, key=lambda way: way[0])
    return compute, bytes_each


@functools.lru_cache(maxsize=1024)
def _bytes_explicitly(geometry: Geometry, x: torch.Size, delta: torch.Size, item: int) -> int:
    c, d = x[0] // geometry.groups, delta[0] // geometry.groups
    p, t, piece = math.prod(x[1:]), math.prod(delta[1:]), _piece(geometry, x[0])
    return geometry.groups * item * (c * piece * (p + t) + d * t + c * d * piece)


def _piece(geometry: Geometry, channels: int) -> int:
    """How many kernel entries are multiplied at a time: a row's, or all if that would make narrow products."""
    row = math.prod(geometry.kernel[1:])
    return row if channels // geometry.groups * row >= NARROW else row * geometry.kernel[0]


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
