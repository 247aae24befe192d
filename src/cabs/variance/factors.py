"""The gradients of single examples, held in whatever form is small, and their squared norms.

Everything CABS needs of an example's gradient is its squared norm, so an operation's formula does not compute
gradients: it says what they are *made of*, and the classes here find the norms without forming them
wherever that is cheaper. Index letters: m examples, g groups, t positions, p and q the two sides of a weight.

Every class also has the slow way, ``dense()``, the gradients themselves. It is what tests compare with, and
what weights used more than once fall back to, since their uses must add up before they are squared.

Every norm can be weighted, Σ_j P_j g_j² for ‖g‖², with P a non-negative tensor of the parameter's shape. Grams do not
survive that, but for those of embeddings: what they were for is formed then, a few examples at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cabs.norms import wide

CACHE_BYTES = 8 << 20
"""Intermediate results are made for as many examples at a time as fit in about this much memory."""


class PerExample(ABC):
    """The gradients of one parameter for m examples."""

    examples: int

    @abstractmethod
    def squared_norms(self, weights: Tensor | None = None) -> Tensor:
        """‖g_i‖², shape (m,): the estimator ``exact``."""

    @abstractmethod
    def positionwise(self, weights: Tensor | None = None) -> Tensor:
        """Σ_t ‖g_{i,t}‖², shape (m,): the estimator ``paper``, positions squared before they are summed."""

    @abstractmethod
    def dense(self) -> Tensor:
        """g_i, shape (m, *parameter.shape)."""

    @abstractmethod
    def __getitem__(self, examples: slice) -> PerExample:
        """The same for some of the examples."""

    def dots(self, vector: Tensor) -> Tensor:
        """⟨g_i, vector⟩, shape (m,), for a vector of the parameter's shape."""
        flat = wide(vector).flatten()
        each = flat.numel() * flat.element_size()
        return in_chunks(self.examples, 2 * each, lambda some: self[some].dense().reshape(-1, flat.numel()) @ flat)

    def squared_norm_of_sum(self) -> Tensor | None:
        """‖Σ_i g_i‖² where that is cheaper than reading the parameter's gradient, else None."""
        return None

    def squared_norms_and_sum(self, weights: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """‖g_i‖² and Σ_i g_i, where both together are cheaper than each on its own, else None."""
        return None

    def _densely(self, weights: Tensor | None) -> Tensor:
        """‖g_i‖² from the gradients themselves, a few examples at a time."""
        each = 4 * math.prod(self[:1].dense().shape)
        return in_chunks(self.examples, 2 * each, lambda some: row_norms(self[some].dense(), weights=weights))


def row_norms(tensor: Tensor, keep: int = 1, weights: Tensor | None = None) -> Tensor:
    """Squared norms over all but the first ``keep`` dimensions; ``weights`` has a number for each element of a row."""
    rows = wide(tensor).flatten(keep) if tensor.dim() > keep else wide(tensor).unsqueeze(-1)
    if weights is None:
        return torch.linalg.vector_norm(rows, dim=-1).square()
    return weighted_squares((rows.abs() if rows.is_complex() else rows).clone(), weights.flatten())


def weighted_squares(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_j P_j x_ij²; ``rows`` is overwritten, being nobody's any more.

    Not as a product of matrix and vector: that has threads of its own, which for a few rows cost more than they do.
    """
    return rows.square_().mul_(weights.to(rows.dtype)).flatten(1).sum(1)


def in_chunks(examples: int, bytes_each: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """compute() for a few examples at a time, so that intermediates stay in cache."""
    step = max(1, min(examples, CACHE_BYTES // max(1, bytes_each)))
    if step >= examples:
        return compute(slice(None))
    return torch.cat([compute(slice(start, start + step)) for start in range(0, examples, step)])


class Positions(PerExample):
    """Gradients that are sums over positions: g_i = Σ_t x_{i,t}; biases, scales, anything elementwise.

    Args:
        terms: shape (m, *positions, *shape), with positions anywhere behind the examples.
        over: the dimensions that are positions.
        shape: the parameter's shape, if it differs from what is left.
    """

    def __init__(self, terms: Tensor, over: Sequence[int] = (), shape: torch.Size | None = None) -> None:
        self.terms, self.over, self.shape = terms, tuple(over), shape
        self.examples = terms.shape[0]

    def __getitem__(self, examples: slice) -> Positions:
        return Positions(self.terms[examples], self.over, self.shape)

    def dense(self) -> Tensor:
        terms = wide(self.terms)
        several = any(terms.shape[dim] != 1 for dim in self.over)
        summed = terms.sum(self.over) if several else terms.squeeze(self.over)
        return summed if self.shape is None else summed.reshape(self.examples, *self.shape)

    def squared_norms(self, weights: Tensor | None = None) -> Tensor:
        return row_norms(self.dense(), weights=weights)

    def squared_norms_and_sum(self, weights: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        gradients = self.dense()
        return row_norms(gradients, weights=weights), gradients.sum(0)

    def positionwise(self, weights: Tensor | None = None) -> Tensor:
        if weights is None:
            return row_norms(self.terms)
        summed = Positions(wide(self.terms).abs().square(), self.over, self.shape).dense()
        return summed.reshape(self.examples, weights.numel()) @ weights.to(summed.dtype).flatten()


class Outer(PerExample):
    """Gradients that are sums of outer products: g_i = Σ_t left_{i,t} right_{i,t}ᵀ; every matrix multiplication.

    Args:
        left: shape (m, g, t, q).
        right: shape (m, g, t, p).
        shape: the parameter's shape, a reshape of (g·q, p).
    """

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size) -> None:
        self.left, self.right, self.shape = left, right, shape
        self.examples = left.shape[0]

    def __getitem__(self, examples: slice) -> Outer:
        return Outer(self.left[examples], self.right[examples], self.shape)

    def _products(self) -> Tensor:
        return wide(self.left).mT @ wide(self.right)  # (m, g, q, p)

    def dense(self) -> Tensor:
        return self._products().reshape(self.examples, *self.shape)

    def squared_norms(self, weights: Tensor | None = None) -> Tensor:
        _, groups, t, q = self.left.shape
        p = self.right.shape[-1]
        if t == 1:
            return self.positionwise(weights)
        size = wide(self.left[:0]).element_size() * groups
        if weights is None and t * (p + q) <= p * q:
            # ‖Σ_t l_t r_tᵀ‖² = Σ_{t,t'} ⟨l_t, l_t'⟩⟨r_t, r_t'⟩
            return in_chunks(self.examples, size * t * (2 * t + p + q), lambda some: self[some]._by_grams())
        if weights is not None:
            each = size * t * (p + q)
            return in_chunks(self.examples, each, lambda some: self[some]._weighted(weights.reshape(groups, q, p)))
        return in_chunks(self.examples, size * (p * q + t * (p + q)), lambda some: row_norms(self[some]._products()))

    def _weighted(self, weights: Tensor) -> Tensor:
        """Some rows of the gradients of all examples at a time: weights are read once, and products stay in cache."""
        left, right = wide(self.left), wide(self.right).contiguous()
        _, q, p = weights.shape
        step = max(1, CACHE_BYTES // max(1, self.examples * left.shape[1] * p * left.element_size()))
        norms = left.new_zeros(self.examples)
        for start in range(0, q, step):
            rows = slice(start, start + step)
            norms += weighted_squares(left[..., rows].mT @ right, weights[:, rows])
        return norms

    def _by_grams(self) -> Tensor:
        left, right = wide(self.left), wide(self.right)
        return inner_products(left @ left.mT, right @ right.mT)

    def positionwise(self, weights: Tensor | None = None) -> Tensor:
        if weights is None:
            left, right = (torch.linalg.vector_norm(wide(side), dim=-1) for side in (self.left, self.right))
            return row_norms(left * right)
        _, groups, t, q = self.left.shape
        size = wide(self.left[:0]).element_size() * groups * t * (2 * self.right.shape[-1] + q)
        return in_chunks(self.examples, size, lambda some: self[some]._products_of_squares(weights))

    def _products_of_squares(self, weights: Tensor) -> Tensor:
        """Σ_t (l_t²)ᵀ P (r_t²)."""
        left, right = (wide(side).square().transpose(0, 1).flatten(1, 2) for side in (self.left, self.right))
        weights = weights.to(left.dtype).reshape(left.shape[0], left.shape[-1], -1)
        if left.shape[-1] > right.shape[-1]:
            return inner_products(left @ weights, right, keep=2).unflatten(1, (self.examples, -1)).sum((0, 2))
        return inner_products(right @ weights.mT, left, keep=2).unflatten(1, (self.examples, -1)).sum((0, 2))

    def dots(self, vector: Tensor) -> Tensor:
        # ⟨Σ_t l_t r_tᵀ, V⟩ = Σ_t l_tᵀ V r_t
        matrices = wide(vector).reshape(self.left.shape[1], self.left.shape[-1], self.right.shape[-1])
        return inner_products(wide(self.left) @ matrices, wide(self.right))

    def squared_norm_of_sum(self) -> Tensor | None:
        m, groups, t, q = self.left.shape
        p = self.right.shape[-1]
        # A float of the gradient costs about as much to read as some forty multiplications of a Gram.
        if groups > 1 or 2 * (m * t) ** 2 * (p + q) > 40 * p * q:
            return None
        left, right = wide(self.left).reshape(m * t, q), wide(self.right).reshape(m * t, p)
        return torch.sum((left @ left.mT) * (right @ right.mT))


class OneHot(PerExample):
    """Gradients of table rows: g_i has Σ_{t: index_t = v} δ_{i,t} in row v; embeddings.

    Args:
        index: which row each position looked up, shape (m, t).
        delta: the gradient of what it got, shape (m, t, d); zero where nothing is to be counted.
        shape: the table's shape.
    """

    def __init__(self, index: Tensor, delta: Tensor, shape: torch.Size) -> None:
        self.index, self.delta, self.shape = index, delta, shape
        self.examples = index.shape[0]

    def __getitem__(self, examples: slice) -> OneHot:
        return OneHot(self.index[examples], self.delta[examples], self.shape)

    def dense(self) -> Tensor:
        delta = wide(self.delta)
        out = delta.new_zeros(self.examples, *self.shape)
        return out.scatter_add_(1, self.index.unsqueeze(-1).expand_as(delta), delta)

    def squared_norms(self, weights: Tensor | None = None) -> Tensor:
        t = self.index.shape[1]
        if t == 1:
            return self.positionwise(weights)
        return in_chunks(
            self.examples,
            self.delta.element_size() * t * (2 * t + 2 * self.shape[-1]),
            lambda some: self[some]._by_grams(weights),
        )

    def _by_grams(self, weights: Tensor | None) -> Tensor:
        delta = wide(self.delta)
        same = self.index.unsqueeze(1) == self.index.unsqueeze(2)
        # Positions that meet looked up the same row, so that its weights are both's.
        return (((delta if weights is None else self._weighted(weights)) @ delta.mT) * same).flatten(1).sum(1)

    def _weighted(self, weights: Tensor) -> Tensor:
        return wide(self.delta) * weights.to(wide(self.delta).dtype)[self.index]

    def dots(self, vector: Tensor) -> Tensor:
        return inner_products(wide(vector)[self.index], wide(self.delta))

    def positionwise(self, weights: Tensor | None = None) -> Tensor:
        if weights is None:
            return row_norms(self.delta)
        return (self._weighted(weights) * wide(self.delta)).flatten(1).sum(1)


class Sum(PerExample):
    """The uses of one parameter, which add up before they are squared."""

    def __init__(self, uses: Sequence[PerExample]) -> None:
        self.uses = list(uses)
        self.examples = self.uses[0].examples

    def __getitem__(self, examples: slice) -> Sum:
        return Sum([use[examples] for use in self.uses])

    def dense(self) -> Tensor:
        total = self.uses[0].dense()
        for use in self.uses[1:]:
            total = total + use.dense()
        return total

    def squared_norms(self, weights: Tensor | None = None) -> Tensor:
        if all(isinstance(use, Outer) for use in self.uses):
            return self._concatenated().squared_norms(weights)
        return self._densely(weights)

    def dots(self, vector: Tensor) -> Tensor:
        return torch.stack([use.dots(vector) for use in self.uses]).sum(0)

    def _concatenated(self) -> Outer:
        # Positions of different uses are just more positions.
        outers = [use for use in self.uses if isinstance(use, Outer)]
        return Outer(
            torch.cat([wide(use.left) for use in outers], 2),
            torch.cat([wide(use.right) for use in outers], 2),
            outers[0].shape,
        )

    def positionwise(self, weights: Tensor | None = None) -> Tensor:
        return torch.stack([use.positionwise(weights) for use in self.uses]).sum(0)


def inner_products(left: Tensor, right: Tensor, keep: int = 1) -> Tensor:
    """⟨left_i, right_i⟩ for each example, shape (m,); ``left`` is overwritten, being nobody's any more."""
    return left.mul_(right).flatten(keep).sum(keep)
