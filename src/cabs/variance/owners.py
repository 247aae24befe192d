"""Whose is it: for every tensor that depends on the examples, which example each of its elements belongs to.

Owners are kept with the *memory* of a tensor, not with the tensor: whatever is a view of the same memory (transposed,
cut, reshaped, expanded, detached, …) finds its owners there by its strides, and what is written into a view is seen by
all the others. Only operations that make new memory have to say how ownership moves; ``moves`` has a function for each.

A table of owners has as many dimensions as its tensor, each of full length, or of length 1 where all along it are
alike: the owners of a batch of shape (m, t, d) are a table of shape (m, 1, 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

NOBODY = -1
"""Made of parameters and constants alone."""
SUM = 1 << 40
"""A sum over examples, each adding a term of its own: what a loss is."""
SEVERAL = SUM + 1
"""Depends on several examples in some other way."""
UNKNOWN = SUM + 2
"""Made of examples by an operation that no function in ``moves`` describes."""


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
        self.uses: Counter[int] = Counter()
        """How often each parameter was used on them, by its id."""
        self.hidden: set[int] = set()
        """Parameters that met them where autograd was off: perhaps in a custom autograd.Function."""

    def see(self, inputs: Iterable[Owners]) -> None:
        """Takes note of what a model is called with."""
        for owners in inputs:
            if len(self.seen) < self.examples:
                self.seen.update(i for i in owners.table.flatten().tolist() if 0 <= i < SUM)


class Owners:
    """A table of owners, with what there is to know about it.

    Attributes:
        table: the owners, see above.
        why: for elements that are SEVERAL's or UNKNOWN: what made them so.
    """

    def __init__(self, table: Tensor, why: str | None = None) -> None:
        self.table = table
        self.why = why

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
        cached: dict[int, tuple[int, int] | None] = self.__dict__.setdefault("_patterns", {})
        if examples not in cached:
            cached[examples] = _pattern(self.table.flatten(), examples) if len(self.varying) <= 1 else None
        return cached[examples]


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


# -- owners of memory


class Mark:
    """What a piece of memory knows: the owners of one tensor in it, and of views of that one as they are asked for."""

    def __init__(self, tensor: Tensor, owners: Owners, lot: Lot) -> None:
        self.lot = lot
        self.owners = owners
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        self.item = tensor.element_size()
        self.first, self.last = _range(self.size, self.stride, self.offset, self.item)
        self._views: dict[Any, Owners | None] = {}

    def of(self, tensor: Tensor) -> Owners | None:
        """The owners of a tensor in the same memory, None if it is nobody's."""
        size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        item = tensor.element_size()
        if stride == self.stride and size == self.size and offset == self.offset and item == self.item:
            return self.owners
        key = (size, stride, offset, item)
        if key not in self._views:
            self._views[key] = self._seen_from(size, stride, offset, item)
        return self._views[key]

    def lines(self, every: Tensor) -> list[tuple[int, Tensor]]:
        """Owners of the lines of a matrix that is all of the memory: the first that has one, and all from there."""
        if self.item != every.element_size():
            return [(0, torch.full((len(every),), UNKNOWN))]
        block = every.shape[1]
        first = self.first // self.item // block
        part = every[first : (self.last + 1) // self.item // block]
        seen = self.of(part)
        assert seen is not None
        return [(first, full(seen.table, part.shape, [0])[:, 0])]

    def _seen_from(self, size: Sequence[int], stride: Sequence[int], offset: int, item: int) -> Owners | None:
        """The owners of a view: for each of its places, the coordinates that the marked tensor has for it."""
        table, why = self.owners.table, self.owners.why
        first, last = _range(size, stride, offset, item)
        if 0 in size or last < self.first or first > self.last:
            return None
        if first < self.first or last > self.last:
            return Owners(table.new_full((1,) * len(size), UNKNOWN), "a view of more memory than the examples have")
        if table.numel() == 1:
            return Owners(table.reshape((1,) * len(size)), why)
        steps = [s * item for s in stride]
        index = [
            self._coordinate(dim, size, steps, first - self.first, item)
            if n > 1
            else torch.zeros((1,) * len(size)).long()
            for dim, n in enumerate(table.shape)
        ]
        return Owners(compact(table[tuple(index)]), why)

    def _coordinate(self, dim: int, size: Sequence[int], steps: Sequence[int], start: int, item: int) -> Tensor:
        """Where along a dimension of the marked tensor each place of a view is; a table of the view's dimensions."""
        unit = self.stride[dim] * self.item
        larger = [s * self.item for s, n in zip(self.stride, self.size, strict=True) if n > 1 and s * self.item > unit]
        period = min(larger, default=0)  # 0: the outermost dimension
        moving = [d for d, n in enumerate(size) if n > 1 and steps[d] and not (period and steps[d] % period == 0)]
        # Dimensions along which a view stays within one unit do not matter, the smallest steps first.
        within_unit: set[int] = set()
        span = item - 1
        for d in sorted((d for d in moving if steps[d] < unit), key=lambda d: steps[d]):
            if span + steps[d] * (size[d] - 1) >= unit:
                break
            span += steps[d] * (size[d] - 1)
            within_unit.add(d)
        places = _places(size, steps, start, [d for d in moving if d not in within_unit])
        if within_unit and int((places % unit).max()) + span >= unit:
            places = _places(size, steps, start, moving)
        return (places % period if period else places) // unit


def _range(size: Sequence[int], stride: Sequence[int], offset: int, item: int) -> tuple[int, int]:
    """The first and the last byte of a tensor."""
    reach = sum(s * (n - 1) for s, n in zip(stride, size, strict=True))
    return offset * item, (offset + reach + 1) * item - 1


def _places(size: Sequence[int], steps: Sequence[int], start: int, dims: Sequence[int]) -> Tensor:
    places = torch.full((1,) * len(size), start)
    for d in dims:
        along = torch.arange(size[d]) * steps[d]
        places = places + along.reshape([-1 if e == d else 1 for e in range(len(size))])
    return places


def covers_its_memory_once(tensor: Tensor) -> bool:
    """Whether no two elements of a tensor share a place, so that each place can have an owner."""
    spans = sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1)
    reach = 0
    for stride, count in spans:
        if stride <= reach:
            return False
        reach += stride * (count - 1)
    return True


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor covers all of the memory from its first to its last element, once."""
    first, last = _range(tensor.size(), tensor.stride(), 0, 1)
    return last - first + 1 == tensor.numel() and (tensor.is_contiguous() or covers_its_memory_once(tensor))


def storage_of(tensor: Tensor) -> Any | None:
    """A tensor's memory; None for kinds of tensors that have none of their own (sparse, nested)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


class Marks:
    """The owners of all tensors of one lot of examples.

    Args:
        slot: the name under which memory keeps its mark; each measurement has its own.
    """

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self.lot: Lot | None = None

    def get(self, tensor: Tensor) -> Owners | None:
        """The owners of a tensor, None if it is nobody's."""
        mark = getattr(storage_of(tensor), self._slot, None)
        return None if mark is None or mark.lot is not self.lot else mark.of(tensor)

    def _mark(self, storage: Any) -> Mark | None:
        mark: Mark | None = None if storage is None else getattr(storage, self._slot, None)
        return None if mark is None or mark.lot is not self.lot else mark

    def beside(self, tensor: Tensor) -> bool:
        """Whether other parts of a tensor's memory hold examples, though not the tensor."""
        mark = self._mark(storage_of(tensor))
        return mark is not None and mark.of(tensor) is None

    def set(self, tensor: Tensor, owners: Owners | None) -> None:
        """Says whose the elements of a tensor are, just made or written to; it may be a part of its memory only."""
        storage = storage_of(tensor)
        if storage is None or tensor.numel() == 0 or self.lot is None:
            return
        mark = self._mark(storage)
        alone = mark is None or storage.nbytes() == tensor.numel() * tensor.element_size()
        if owners is None:
            if mark is not None and alone:
                delattr(storage, self._slot)
            elif mark is not None:
                self._set_part(storage, tensor, Owners(torch.full((1,) * tensor.dim(), NOBODY)), mark)
        elif alone and is_dense(tensor):
            setattr(storage, self._slot, Mark(tensor, owners, self.lot))
        else:
            self._set_part(storage, tensor, owners, mark)

    def _set_part(self, storage: Any, part: Tensor, owners: Owners, mark: Mark | None) -> None:
        """Writes owners into the table of a whole piece of memory, by blocks that have one owner each."""
        table, item = owners.table, part.element_size()
        if mark is not None:
            before = mark.of(part)
            if before is not None and before.table.shape == table.shape and torch.equal(before.table, table):
                return
        total = storage.nbytes() // item
        kept, block = part.dim(), 1
        while kept and table.shape[kept - 1] == 1 and (part.size(kept - 1) == 1 or part.stride(kept - 1) == block):
            block *= part.size(kept - 1)
            kept -= 1
        steps = [*part.stride()[:kept], part.storage_offset(), total]
        if mark is not None:
            steps += [s for s, n in zip(mark.stride, mark.owners.table.shape, strict=True) if n > 1]
            steps += [mark.offset, (mark.last + 1) // mark.item]
        run, block = block, math.gcd(block, *steps)
        every = torch.empty(total, dtype=part.dtype, device="meta").view(-1, block)
        tables = torch.full((total // block,), NOBODY)
        why = owners.why
        if mark is not None:
            why = why or mark.owners.why
            for first, seen in mark.lines(every):
                tables[first : first + len(seen)] = seen
        size = [*part.size()[:kept], run // block]
        stride = [*(s // block for s in part.stride()[:kept]), 1]
        tables.as_strided(size, stride, part.storage_offset() // block).copy_(
            table.reshape([*table.shape[:kept], 1]).expand(size)
        )
        assert self.lot is not None
        setattr(storage, self._slot, Mark(every, Owners(tables.unsqueeze(1), why), self.lot))
