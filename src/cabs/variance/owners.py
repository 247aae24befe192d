"""Whose is it: for every tensor that depends on the examples, which example each of its elements belongs to.

Owners are kept with the memory of a tensor (``memory.py``), not with the tensor: whatever is a view of the same memory
(transposed, cut, reshaped, expanded, detached, …) finds its owners there. Only operations that make new memory have to
say how ownership moves; ``moves`` has a function for each.

A table of owners has as many dimensions as its tensor, each of full length, or of length 1 where all along it are
alike: the owners of a batch of shape (m, t, d) are a table of shape (m, 1, 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cabs.variance.backward import BackwardPass
    from cabs.variance.shares import Share

T = TypeVar("T")

NOBODY = -1
"""Made of parameters and constants alone."""
SUM = 1 << 40
"""A sum over examples, each adding a term of its own: what a loss is."""
SEVERAL = SUM + 1
"""Depends on several examples in some other way."""
UNKNOWN = SUM + 2
"""Made of examples by an operation that no function in ``moves`` describes."""

MOST_KEPT = 4096
"""How much is kept of what follows from one table; shapes that never come back must not fill the memory."""
_ABSENT = object()


class Lot:
    """The examples that one forward and backward pass are about, numbered from 0 to m − 1.

    Args:
        examples: m; grows if a further forward pass is about further examples.
        given: whether the number is certain, since a loader handed them out.
    """

    def __init__(self, examples: int, given: bool = False) -> None:
        self.examples = examples
        self.given = given
        self.closed = False
        """Whether a backward pass has begun: the next forward pass is about other examples."""
        self.seen: set[int] = set()
        """The examples that a model was called with."""
        self.parts, self.fired = 1, set[int]()
        """How many forward passes further examples came with, and those of which gradients came back."""
        self.uses: Counter[int] = Counter()
        """How often each parameter was used on them, by its id."""
        self.beside: BackwardPass | None = None
        """Where their norms go, if they are examples that run beside compiled code."""
        self.hidden: set[int] = set()
        """Parameters that met them where autograd was off: perhaps in a custom autograd.Function."""
        self.penalized: set[int] = set()
        """Parameters that penalties in the loss are made of: more gradient reaches these than the examples'."""
        self.counts: set[float] = set()
        """Numbers that Python code was given, made of several examples: how many tokens a batch has, say."""
        self.read = False
        """Whether it was given an example's own numbers, so that tensors without owners may be made of these."""
        self.doubtful: list[tuple[int, ...]] = []
        """Shapes of what was taken for the examples', but may be as long for another reason: another tensor is too."""

    def note_read(self, owners: Owners, numbers: Any) -> None:
        """Told what Python code is given of a tensor with these owners."""
        if owners.highest < SUM:
            self.read = True
        elif isinstance(numbers, (int, float)):
            self.counts.add(float(numbers))

    def see(self, inputs: Iterable[Owners]) -> None:
        """Takes note of what a model is called with."""
        for owners in inputs:
            if len(self.seen) < self.examples:
                self.seen.update(i for i in owners.table.flatten().tolist() if 0 <= i < SUM)


class Owners:
    """A table of owners, with what there is to know about it; never changed once it is made.

    Attributes:
        table: the owners, see above.
        why: for elements that are SEVERAL's or UNKNOWN: what made them so.
        share: for a sum over examples: what it has of each.
    """

    def __init__(self, table: Tensor, why: str | None = None, share: Share | None = None) -> None:
        self.table = table
        self.why = why
        self.share = share
        self._kept: dict[Any, Any] = {}

    def derived(self, key: Any, make: Callable[[], T]) -> T:
        """What follows from these owners, kept for the next time: one step's tensors are shaped like the last one's."""
        found = self._kept.get(key, _ABSENT)
        return self.keep(key, make()) if found is _ABSENT else cast(T, found)

    def recall(self, key: Any) -> Any | None:
        """What was kept under a key, if anything was."""
        return self._kept.get(key)

    def keep(self, key: Any, value: T) -> T:
        """Keeps what follows from these owners."""
        if len(self._kept) >= MOST_KEPT:
            self._kept.clear()
        self._kept[key] = value
        return value

    @classmethod
    def along(cls, dim: int, dims: int, ids: Tensor) -> Owners:
        """One example, known by its number, for each place along a dimension."""
        return cls(compact(ids.reshape([len(ids) if d == dim else 1 for d in range(dims)])))

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """The dimensions along which owners differ."""
        return tuple(d for d, n in enumerate(self.table.shape) if n != 1)

    @cached_property
    def settled(self) -> bool:
        """Whether every element has exactly one owner."""
        return self.table.numel() == 0 or (int(self.table.min()) >= 0 and int(self.table.max()) < SUM)

    @cached_property
    def highest(self) -> int:
        """The largest entry: SUM or above if not every element is one example's."""
        return int(self.table.max()) if self.table.numel() else NOBODY

    def pattern(self, examples: int) -> tuple[int, int] | None:
        """(k, r) if, along the one dimension that varies, all examples follow in turn, r times each, k times over."""
        if len(self.varying) > 1:
            return None
        return self.derived(("pattern", examples), lambda: _pattern(self.table.flatten(), examples))


def _pattern(ids: Tensor, examples: int) -> tuple[int, int] | None:
    count = len(ids)
    if count == 0 or count % examples:
        return None
    ordered = torch.arange(examples)
    if count == examples:
        return (1, 1) if torch.equal(ids, ordered) else None
    repeats = int((ids == ids[0]).cummin(0).values.sum())
    if count % (examples * repeats):
        return None
    times = count // (examples * repeats)
    expected = ordered.view(1, -1, 1).expand(times, -1, repeats).reshape(-1)
    return (times, repeats) if torch.equal(ids, expected) else None


@dataclass(frozen=True)
class Turns:
    """Where the examples are in a tensor: in turn along one dimension, each ``repeats`` times, all ``times`` over."""

    dim: int
    times: int
    repeats: int

    @classmethod
    def of(cls, owners: Owners | None, examples: int) -> Turns | None:
        """None if that is not how it is, or if there are too few examples to tell."""
        pattern = None if owners is None or not owners.varying else owners.pattern(examples)
        return None if owners is None or pattern is None else cls(owners.varying[0], *pattern)

    def owners(self, dims: int, examples: int) -> Owners:
        """The owners of a tensor of so many dimensions."""
        ids = torch.arange(examples).view(1, -1, 1).expand(self.times, -1, self.repeats)
        return Owners.along(self.dim, dims, ids.flatten())

    def cut(self, tensor: Tensor, examples: int, chosen: slice) -> Tensor:
        """The parts of some of the examples."""
        places = torch.arange(self.times * examples * self.repeats).view(self.times, examples, self.repeats)
        return tensor.index_select(self.dim, places[:, chosen].flatten().to(tensor.device))

    def fits(self, shape: Sequence[int], few: Sequence[int], examples: int) -> bool:
        """Whether a shape is that of a few examples, but of so many."""
        along = self.times * self.repeats * examples
        return list(shape) == [along if d == self.dim else n for d, n in enumerate(few)]


# -- arithmetic of tables


def aligned(table: Tensor, dims: int) -> Tensor:
    """A table with more dimensions in front, as broadcasting adds them."""
    return table if table.dim() == dims else table.reshape((1,) * (dims - table.dim()) + tuple(table.shape))


def join(tables: Iterable[Tensor], dims: int, otherwise: int = SEVERAL) -> Tensor:
    """The owners of what is computed elementwise, with broadcasting, from elements with these owners.

    Args:
        tables: the owners.
        dims: how many dimensions the outcome has.
        otherwise: what elements are that have different owners.
    """
    joined: Tensor | None = None
    for table in tables:
        table = aligned(table, dims)
        if joined is None or joined is table:
            joined = table
        elif joined.shape != table.shape or not torch.equal(joined, table):
            joined = _join(joined, table, otherwise)
    assert joined is not None
    return joined


def _join(one: Tensor, other: Tensor, otherwise: int) -> Tensor:
    both = torch.maximum(one, other)
    alike = (one == other) | (one < 0) | (other < 0)
    return compact(torch.where(alike, both, both.clamp(min=otherwise)))


def within(low: Tensor, high: Tensor, otherwise: int = SEVERAL) -> Tensor:
    """The owner of things whose owners range from low to high; ``low`` leaves NOBODY out."""
    return torch.where((low == high) | (high < 0), high, high.clamp(min=otherwise))


def collapse(table: Tensor, dims: Iterable[int], otherwise: int = SEVERAL) -> Tensor:
    """The owners of what depends on everything along some dimensions, which keep a length of 1."""
    varying = [d for d in dims if table.shape[d] != 1]
    if not varying:
        return table
    if 0 in table.shape:
        return table.new_full([1 if d in varying else n for d, n in enumerate(table.shape)], NOBODY)
    low = torch.where(table < 0, UNKNOWN, table).amin(varying, keepdim=True)
    return within(low, table.amax(varying, keepdim=True), otherwise)


def compact(table: Tensor) -> Tensor:
    """The same table with a length of 1 along every dimension on which all are alike."""
    for d, n in enumerate(table.shape):
        if n > 1:
            first = table.narrow(d, 0, 1)
            if bool((table == first).all()):
                table = first
    return table


def full(table: Tensor, shape: Sequence[int], dims: Iterable[int] | None = None) -> Tensor:
    """The table with full length along some dimensions, or all."""
    chosen = set(range(table.dim()) if dims is None else dims)
    return table.expand([shape[d] if d in chosen else n for d, n in enumerate(table.shape)])
