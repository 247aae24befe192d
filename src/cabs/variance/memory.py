"""Owners are kept with the memory of tensors: views find them there by their strides, and writes change them there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cabs.torch_internals import storage_of
from cabs.variance.owners import NOBODY, UNKNOWN, Lot, Owners, compact, full


class Mark:
    """What a piece of memory knows: the owners of one tensor in it, from which those of its views follow.

    Args:
        tensor: it covers all of the memory between its first and its last element.
        owners: whose its elements are.
        lot: the examples.
        rest: whose the rest of the memory is for views that see both: NOBODY's, who wrote nothing there, or UNKNOWN.
    """

    def __init__(self, tensor: Tensor, owners: Owners, lot: Lot, rest: int = NOBODY) -> None:
        self.lot = lot
        self.owners = owners
        self._rest, self._dtype = rest, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        self.item = tensor.element_size()

    @property
    def first(self) -> int:
        """The first byte."""
        return self.offset * self.item

    @cached_property
    def last(self) -> int:
        """The last byte."""
        return _range(self.size, self.stride, self.offset, self.item)[1]

    def of(self, tensor: Tensor) -> Owners | None:
        """The owners of a tensor in the same memory, None if it is nobody's."""
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        item = tensor.element_size()
        if stride == self.stride and size == self.size and offset == self.offset and item == self.item:
            return self.owners
        key = (self.size, self.stride, self.offset, self.item, size, stride, offset, item)
        seen = self.owners.derived(key, lambda: self._seen_from(size, stride, int(offset), item))
        if seen is None and self._rest == NOBODY and tensor.requires_grad and tensor.numel():
            # It has a gradient for what is beside it, and must not pass for a tensor made of parameters.
            dims = len(size)
            return self.owners.derived((NOBODY, dims), lambda: Owners(torch.full((1,) * dims, NOBODY)))
        return seen

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
            if self._rest == UNKNOWN or item != self.item:
                return Owners(table.new_full((1,) * len(size), UNKNOWN), "a view of more memory than the examples have")
            wider = self._widened(min(first, self.first) // item, (max(last, self.last) + 1) // item)
            return wider._seen_from(size, stride, offset, item)
        if table.numel() == 1:
            return Owners(table.reshape((1,) * len(size)), why, self.owners.share)
        if self._keeps_rows(size, stride, offset, item):
            return Owners(table.reshape(-1, *(1,) * (len(size) - 1)), why)
        steps = [s * item for s in stride]
        index = [
            self._coordinate(dim, size, steps, first - self.first, item)
            if n > 1
            else torch.zeros((1,) * len(size)).long()
            for dim, n in enumerate(table.shape)
        ]
        return Owners(compact(table[tuple(index)]), why)

    def _keeps_rows(self, size: Sequence[int], stride: Sequence[int], offset: int, item: int) -> bool:
        """Whether a view is of all rows as they are, each seen in another shape, and a row is one owner's."""
        alike = offset == self.offset and item == self.item and size and self.size
        if not alike or size[0] != self.size[0] or stride[0] != self.stride[0] or self.owners.varying != (0,):
            return False
        within = sum(s * (n - 1) for s, n in zip(stride[1:], size[1:], strict=True))
        own = sum(s * (n - 1) for s, n in zip(self.stride[1:], self.size[1:], strict=True))
        return max(within, own) < self.stride[0]

    def _widened(self, start: int, stop: int) -> Mark:
        """The same for more of the memory, given by the elements at which it starts and stops."""
        table = self.owners.table
        own, end = self.offset - start, (self.last + 1) // self.item - start
        block = math.gcd(own, end, stop - start, *(s for s, n in zip(self.stride, table.shape, strict=True) if n > 1))
        lines = torch.empty(stop, dtype=self._dtype, device="meta")[start:].view(-1, block)
        part = lines[own // block : end // block]
        seen = self.of(part)
        assert seen is not None
        tables = table.new_full((len(lines), 1), self._rest)
        tables[own // block : end // block] = full(seen.table, part.shape, [0])
        return Mark(lines, Owners(tables, self.owners.why), self.lot, self._rest)

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
    if tensor.is_contiguous():
        return True
    first, last = _range(tensor.size(), tensor.stride(), 0, 1)
    return last - first + 1 == tensor.numel() and covers_its_memory_once(tensor)


def _lines(part: Tensor, owners: Owners, total: int) -> tuple[Tensor, Owners] | None:
    """All of the memory by lines, if each example's elements are on a line of its own.

    Whole numbers that stand beside an example's (a start token, padding) are constants: to call them its own does
    no harm, since what is made of them and of another's belongs to several. What layers make of them is known then.
    """
    if len(owners.varying) != 1 or not owners.settled:
        return None
    dim = owners.varying[0]
    count, step, one = part.size(dim), part.stride(dim), part.select(dim, 0)
    if step * count != total or _range(one.size(), one.stride(), int(one.storage_offset()), 1)[1] >= step:
        return None
    every = torch.empty(total, dtype=part.dtype, device="meta").view(count, step)
    return every, Owners(owners.table.reshape(-1, 1))


class Loose:
    """What a tensor without memory of its own (sparse, nested) knows: it is made of examples, nobody can say which."""

    def __init__(self, tensor: Tensor, lot: Lot) -> None:
        self.lot = lot
        why = "a sparse or nested tensor, of which it is not known whose its elements are"
        self._owners = Owners(torch.full((1,) * tensor.dim(), UNKNOWN), why)

    def of(self, tensor: Tensor) -> Owners:
        return self._owners


class Marks:
    """The owners of all tensors of one lot of examples.

    Args:
        slot: the name under which memory keeps its mark; each measurement has its own.
    """

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self.lot: Lot | None = None

    @property
    def examples(self) -> int:
        """m."""
        return 0 if self.lot is None else self.lot.examples

    def get(self, tensor: Tensor) -> Owners | None:
        """The owners of a tensor, None if it is nobody's."""
        storage = storage_of(tensor)
        mark: Mark | Loose | None = getattr(tensor if storage is None else storage, self._slot, None)
        return None if mark is None or mark.lot is not self.lot else mark.of(tensor)

    def _mark(self, storage: Any) -> Mark | None:
        mark: Mark | None = None if storage is None else getattr(storage, self._slot, None)
        return None if mark is None or mark.lot is not self.lot else mark

    def beside(self, tensor: Tensor) -> bool:
        """Whether other parts of a tensor's memory hold examples, though not the tensor."""
        mark = self._mark(storage_of(tensor))
        owners = None if mark is None else mark.of(tensor)
        return mark is not None and (owners is None or owners.highest < 0)

    def set(self, tensor: Tensor, owners: Owners | None, rest: int = NOBODY) -> None:
        """Says whose the elements of a tensor are, just made or written to; it may be a part of its memory only.

        Args:
            tensor: the tensor.
            owners: None if they are nobody's.
            rest: whose other parts of the memory are if nothing is known of them.
        """
        storage = storage_of(tensor)
        if tensor.numel() == 0 or self.lot is None:
            return
        if storage is None:
            setattr(tensor, self._slot, None if owners is None else Loose(tensor, self.lot))
            return
        mark = self._mark(storage)
        alone = mark is None or storage.nbytes() == tensor.numel() * tensor.element_size()
        if owners is None:
            if mark is not None and alone:
                delattr(storage, self._slot)
            elif mark is not None:
                self._set_part(storage, tensor, Owners(torch.full((1,) * tensor.dim(), NOBODY)), mark)
        elif alone and is_dense(tensor):
            setattr(storage, self._slot, Mark(tensor, owners, self.lot, rest))
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
        assert self.lot is not None
        if mark is None and not part.is_floating_point() and (lines := _lines(part, owners, total)) is not None:
            setattr(storage, self._slot, Mark(*lines, self.lot))
            return
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
        setattr(storage, self._slot, Mark(every, Owners(tables.unsqueeze(1), why), self.lot))
