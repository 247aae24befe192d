"""Bringing the rows of each example together, wherever in a tensor they are and however many it has."""

from __future__ import annotations

import torch
from torch import Tensor

from cabs.variance.owners import SUM, Lot, Owners, full

EVERY = slice(None)


class Rows:
    """Where the rows of m examples are in the tensors of an operation.

    Args:
        owners: of the operation's output, whose leading dimensions are those of its input too.
        lot: the examples.
    """

    def __init__(self, owners: Owners, lot: Lot) -> None:
        self.owners = owners
        self.lot = lot

    @property
    def examples(self) -> int:
        return self.lot.examples

    def chosen(self, chosen: slice) -> range:
        return range(self.examples)[chosen]

    def run_along(self, leading: int) -> bool:
        """Whether owners differ along leading dimensions only."""
        return all(d < leading for d in self.owners.varying)

    def one_each(self, tensor: Tensor, leading: int) -> bool:
        """Whether every example has exactly one row."""
        return tensor.shape[:leading].numel() == self.examples and self.owners.pattern(self.examples) == (1, 1)

    def arrange(self, tensor: Tensor, leading: int, chosen: slice = EVERY, *, zero: bool = False) -> Tensor:
        """Shape (examples chosen, rows of each, *the rest): the rows of each example together.

        Args:
            tensor: something with a row at each place of its leading dimensions.
            leading: how many dimensions those are.
            chosen: which examples.
            zero: fill up with zeros the examples that have fewer rows than others, rather than with anything.
        """
        owners, rest = self.owners, tensor.shape[leading:]
        if self.examples == 1 and owners.settled:
            return tensor.reshape(1, -1, *rest)
        pattern = owners.pattern(self.examples)
        if pattern is not None and len(owners.varying) == 1:
            dim = owners.varying[0]
            # Scattered examples are brought together: what follows reads them more than once.
            if pattern == (1, 1):
                some = _some(tensor if dim == 0 else tensor.movedim(dim, 0), chosen)
                if leading == 1:
                    return some.unsqueeze(1)
            else:
                times, repeats = pattern
                some = _some(tensor.unflatten(dim, (times, self.examples, repeats)).movedim(dim + 1, 0), chosen)
            return some.reshape(some.shape[0], -1, *rest)
        places, missing = self._places(tensor.shape[:leading], chosen)
        rows = tensor.reshape(-1, *rest)[places.to(tensor.device)]
        if zero and missing is not None:
            rows = rows.masked_fill(missing.to(tensor.device).reshape(*missing.shape, *(1,) * len(rest)), 0)
        return rows

    def first(self, tensor: Tensor, chosen: slice, *, zero: bool = False) -> Tensor:
        """The examples chosen in the first dimension of a tensor that broadcasts to the output, everything else behind.

        Where a tensor does not vary with the examples, the first dimension has a length of 1. With ``zero``, examples
        that have nothing in the tensor get zeros, not anything.
        """
        varying, pattern = list(self.owners.varying), self.owners.pattern(self.examples)
        if not varying:  # all is one example's
            mine = torch.tensor(self.chosen(chosen), device=tensor.device) == self.owners.table.item()
            return tensor.unsqueeze(0) * mine.reshape(-1, *(1,) * tensor.dim()) if zero else tensor.unsqueeze(0)
        if pattern is not None and len(varying) == 1:
            dim = varying[0]
            if tensor.shape[dim] == 1:
                tensor = tensor if pattern == (1, 1) else tensor.unsqueeze(dim).unsqueeze(dim)
                return tensor.movedim(dim if pattern == (1, 1) else dim + 1, 0)
            if pattern == (1, 1):
                return _some(tensor.movedim(dim, 0), chosen)
            return _some(tensor.unflatten(dim, (pattern[0], self.examples, pattern[1])).movedim(dim + 1, 0), chosen)
        moved = tensor.movedim(varying, list(range(len(varying))))
        rest = moved.shape[len(varying) :]
        if all(tensor.shape[d] == 1 for d in varying):
            return moved.reshape(1, 1, *rest)
        rows = Rows(Owners(self.owners.table.movedim(varying, list(range(len(varying))))), self.lot)
        shape = rows.owners.table.shape[: len(varying)]
        return rows.arrange(moved.expand(*shape, *rest), len(varying), chosen, zero=zero)

    def _places(self, shape: torch.Size, chosen: slice) -> tuple[Tensor, Tensor | None]:
        """For each example the numbers of its rows, filled up to equally many, and where they were filled up."""
        key = ("places", shape, self.examples, chosen.start, chosen.stop, chosen.step)
        return self.owners.derived(key, lambda: self._find_places(shape, chosen))

    def _find_places(self, shape: torch.Size, chosen: slice) -> tuple[Tensor, Tensor | None]:
        table = self.owners.table
        ids = full(table.reshape(table.shape[: len(shape)]), shape).reshape(-1)
        wanted = torch.tensor(self.chosen(chosen))
        order = torch.argsort(ids, stable=True)
        ids = ids[order]
        first = torch.searchsorted(ids, wanted)
        counts = torch.searchsorted(ids, wanted, right=True) - first
        most = max(1, int(counts.max())) if len(counts) else 1
        steps = torch.arange(most)
        missing = steps >= counts.unsqueeze(1)
        places = (first.unsqueeze(1) + steps).clamp(max=max(0, len(order) - 1))
        places = order[places] if len(order) else places
        return places.masked_fill(missing, 0), missing if bool(missing.any()) else None

    def mask(self, example: int, device: torch.device) -> Tensor:
        """Where an example's elements are, a tensor that broadcasts to the output."""
        return (self.owners.table == example).to(device)

    def strays(self, tensor: Tensor) -> bool:
        """Whether a gradient is not zero at elements that are no single example's."""
        if self.owners.settled:
            return False
        table = self.owners.table
        loose = ((table < 0) | (table >= SUM)).to(tensor.device)
        return bool((tensor.masked_fill(~loose, 0) != 0).any())

    @property
    def why_not(self) -> str:
        """Why gradients at elements that are no single example's cannot be measured."""
        why = self.owners.why
        if self.owners.highest < SUM:
            return (
                "rows that are no example's (made of parameters or constants alone) run through it, and have a gradient"
            )
        if self.owners.highest == SUM:
            return f"it is applied to what the examples were added up to ({why}): apply it to each example, then add up"
        reason = f"it is applied after examples were mixed ({why}), so that no gradient is a single example's"
        if self.lot.doubtful:
            reason += (
                f"; tensors of shape {', '.join(map(str, self.lot.doubtful))} have as many rows as there are examples "
                "and were taken for theirs: one that all examples share needs another first dimension, of length 1"
            )
        return reason


def _some(tensor: Tensor, examples: slice) -> Tensor:
    return tensor if examples == EVERY else tensor[examples].clone()
