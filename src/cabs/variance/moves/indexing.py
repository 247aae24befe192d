"""Operations that pick elements, or lay tensors side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.variance.moves.registry import Call, always, dims_of, joined, moves, nobodys
from cabs.variance.owners import NOBODY, SUM, aligned, collapse, compact, full, join


@moves("index", "_unsafe_index", reads=always)
def index(call: Call, output: Tensor) -> Tensor | None:
    tensor, places = call["self"], call["indices"]
    table = call.table(tensor)
    if table is None:
        return owners_of_places(call, output.dim())  # what is nobody's belongs to whoever looked it up
    picked = spread(table, tensor.shape, places)[tuple(on_cpu(places))]
    if picked.numel() and int(picked.min()) < 0 and (looked_up := owners_of_places(call, output.dim())) is not None:
        picked = torch.where(picked < 0, looked_up, picked)
    return compact(picked)


def owners_of_places(call: Call, picked: int) -> Tensor | None:
    """The owners of so many dimensions that are picked, by whose the indices are: None if these are nobody's."""
    places, owners = [], []
    for place in call["indices"]:
        table = None if place is None else call.table(place)
        if place is None or not _is_mask(place):
            places.append(place)
            owners.append(table)
        else:  # a place for each element that is set, which is whose that is
            where = place.nonzero().cpu().unbind(1)
            places += where
            owners += [None if table is None else full(table, place.shape)[where]] * len(where)
    known = [table for table in owners if table is not None]
    if not known:
        return None
    dims = max(place.dim() for place in places if place is not None)
    looked_up = join(known, dims)
    given = [d for d, place in enumerate(places) if place is not None]
    first = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    return compact(looked_up.reshape((1,) * first + tuple(looked_up.shape) + (1,) * (picked - first - dims)))


def _is_mask(place: Tensor) -> bool:
    return place.dtype in (torch.bool, torch.uint8)


def on_cpu(places: Sequence[Tensor | None]) -> list[Any]:
    return [slice(None) if i is None else i.cpu() for i in places]


def spread(table: Tensor, shape: Sequence[int], places: Sequence[Tensor | None]) -> Tensor:
    """The table with full length along the dimensions that are indexed."""
    dims: list[int] = []
    d = 0
    for place in places:
        count = place.dim() if place is not None and _is_mask(place) else 1
        if place is not None:
            dims += range(d, d + count)
        d += count
    return full(table, shape, dims)


@moves("index_select", "gather", "take_along_dim", reads=always)
def gather(call: Call, output: Tensor) -> Tensor | None:
    tensor, dim, places = call["self"], call["dim"] % max(1, call["self"].dim()), call["index"]
    table = call.table(tensor)
    if table is None:
        looked_up = call.table(places)
        if looked_up is None or looked_up.dim() == output.dim():
            return looked_up
        return looked_up.reshape([-1 if d == dim else 1 for d in range(output.dim())])
    if table.shape[dim] == 1:
        return cut(table, output.shape)
    if places.dim() == tensor.dim() and not (places.dim() == 1 and output.dim() != 1):
        wide = full(table, tensor.shape)
        wide = cut(wide, [max(n, tensor.shape[d]) if d == dim else n for d, n in enumerate(places.shape)])
        return compact(wide.gather(dim, places.cpu()))
    return compact(table.index_select(dim, places.cpu().reshape(-1)))


def cut(table: Tensor, shape: Sequence[int]) -> Tensor:
    for d, n in enumerate(shape):
        if table.shape[d] > n and table.shape[d] > 1:
            table = table.narrow(d, 0, n)
    return table


@moves("masked_select", reads=always)
def masked_select(call: Call, output: Tensor) -> Tensor | None:
    mask = call["mask"].cpu()
    shape = torch.broadcast_shapes(mask.shape, call["self"].shape)
    table = joined(call, len(shape), "self") if call.tables("self") else joined(call, len(shape))
    return None if table is None else compact(table.expand(shape)[mask.expand(shape)])


@moves("nonzero", reads=always)
def nonzero(call: Call, output: Tensor) -> Tensor | None:
    """The row for each element found belongs to that element's owner."""
    table = full(call.of("self"), call["self"].shape)
    if table.dim() == 0:
        return table.reshape(1, 1)
    return compact(table[tuple(output.cpu().unbind(1))].unsqueeze(1))


@moves("repeat_interleave", reads=always)
def repeat_interleave(call: Call, output: Tensor) -> Tensor | None:
    """Only the form that makes indices of counts; the others are made of it."""
    table = full(call.of("repeats"), call["repeats"].shape)
    return compact(table[output.cpu()])


@moves("flip")
def flip(call: Call, output: Tensor) -> Tensor | None:
    table = call.of("self")
    return table.flip([d for d in dims_of(call["dims"], table.dim()) if table.shape[d] > 1])


@moves("roll")
def roll(call: Call, output: Tensor) -> Tensor | None:
    table = call.of("self")
    if not call.get("dims"):
        return compact(full(table, call["self"].shape).roll(call["shifts"]))
    for d, shift in zip(dims_of(call["dims"], table.dim()), call["shifts"], strict=True):
        table = table.roll(shift, d) if table.shape[d] > 1 else table
    return table


@moves("repeat")
def repeat(call: Call, output: Tensor) -> Tensor | None:
    table = aligned(call.of("self"), output.dim())
    return compact(table.repeat([r if n > 1 else 1 for r, n in zip(call["repeats"], table.shape, strict=True)]))


@moves("constant_pad_nd")
def pad(call: Call, output: Tensor) -> Tensor | None:
    table, widths = call.of("self"), list(call["pad"])
    sides = [widths[2 * d : 2 * d + 2] if 2 * d < len(widths) else [0, 0] for d in range(table.dim())]
    mine = [n for d, side in enumerate(sides) for n in (side if table.shape[-1 - d] > 1 else (0, 0))]
    return F.pad(table, mine, value=NOBODY) if any(mine) else table


@moves("cat", "_cat", "concat")
def cat(call: Call, output: Tensor) -> Tensor | None:
    tensors = [t for t in call["tensors"] if t.dim() == output.dim()]
    return beside(
        [call.table(t) for t in tensors], [t.shape for t in tensors], dims_of(call.get("dim", 0), output.dim())[0]
    )


@moves("stack", "_stack")
def stack(call: Call, output: Tensor) -> Tensor | None:
    dim = dims_of(call.get("dim", 0), output.dim())[0]
    tables = [call.table(t) for t in call["tensors"]]
    shapes = [torch.Size([*t.shape[:dim], 1, *t.shape[dim:]]) for t in call["tensors"]]
    return beside([None if t is None else t.unsqueeze(dim) for t in tables], shapes, dim)


def beside(tables: Sequence[Tensor | None], shapes: Sequence[torch.Size], dim: int) -> Tensor | None:
    """The owners of tensors laid side by side along a dimension.

    What is nobody's (a class token, padding) goes to those whose places it stands at along the other dimensions.
    """
    known = [t for t in tables if t is not None]
    if not known:
        return None
    neighbours = join([collapse(t, [dim]) for t in known], known[0].dim())
    adopted = neighbours if int(neighbours.max() if neighbours.numel() else 0) < SUM else nobodys(known[0].dim())
    parts = [adopted if t is None else t for t in tables]
    if all(p.shape[dim] == 1 for p in parts) and all(torch.equal(p, parts[0]) for p in parts[1:]):
        return parts[0]
    rest = torch.broadcast_shapes(*(collapse_shape(p.shape, dim) for p in parts))
    wide = [
        p.expand([s[dim] if d == dim else n for d, n in enumerate(rest)]) for p, s in zip(parts, shapes, strict=True)
    ]
    return compact(torch.cat(wide, dim))


def collapse_shape(shape: Sequence[int], dim: int) -> list[int]:
    return [1 if d == dim else n for d, n in enumerate(shape)]
