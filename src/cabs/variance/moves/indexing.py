"""Operations that pick elements, put them somewhere, or lay tensors side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.variance.moves.registry import Call, always, dims_of, joined, moves, nobodys
from cabs.variance.owners import NOBODY, SUM, UNKNOWN, aligned, collapse, compact, full, join, within


@moves("index", "_unsafe_index", reads=always)
def index(call: Call, output: Tensor) -> Tensor | None:
    tensor, places = call["self"], call["indices"]
    table = call.table(tensor)
    if table is None:
        return _of_indices(call, output)
    picked = _spread(table, tensor.shape, places)[tuple(_on_cpu(places))]
    return compact(picked)


def _of_indices(call: Call, output: Tensor) -> Tensor | None:
    """What is looked up in a table that is nobody's belongs to whoever looked it up."""
    places = [i for i in call["indices"] if i is not None]
    tables = [call.table(i) for i in places]
    if all(t is None for t in tables):
        return None
    if any(i.dtype in (torch.bool, torch.uint8) for i in places):
        return torch.full((1,) * output.dim(), UNKNOWN)
    dims = max(i.dim() for i in places)
    looked_up = join([t for t in tables if t is not None], dims)
    given = [d for d, i in enumerate(call["indices"]) if i is not None]
    first = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    behind = output.dim() - first - dims
    return looked_up.reshape((1,) * first + tuple(looked_up.shape) + (1,) * behind)


def _on_cpu(places: Sequence[Tensor | None]) -> list[Any]:
    return [slice(None) if i is None else i.cpu() for i in places]


def _spread(table: Tensor, shape: Sequence[int], places: Sequence[Tensor | None]) -> Tensor:
    """The table with full length along the dimensions that are indexed."""
    dims: list[int] = []
    d = 0
    for place in places:
        count = place.dim() if place is not None and place.dtype in (torch.bool, torch.uint8) else 1
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
        return _cut(table, output.shape)
    if places.dim() == tensor.dim() and not (places.dim() == 1 and output.dim() != 1):
        wide = full(table, tensor.shape)
        wide = _cut(wide, [max(n, tensor.shape[d]) if d == dim else n for d, n in enumerate(places.shape)])
        return compact(wide.gather(dim, places.cpu()))
    return compact(table.index_select(dim, places.cpu().reshape(-1)))


def _cut(table: Tensor, shape: Sequence[int]) -> Tensor:
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


# -- putting


@moves("index_add", "index_reduce", reads=always)
def index_add(call: Call, output: Tensor) -> Tensor | None:
    return _put_rows(call, output, "source", adds=True)


@moves("index_copy", reads=always)
def index_copy(call: Call, output: Tensor) -> Tensor | None:
    return _put_rows(call, output, "source", adds=False)


def _put_rows(call: Call, output: Tensor, source: str, adds: bool) -> Tensor | None:
    dim = call["dim"] % max(1, output.dim())
    into, rows = call.of("self"), call.of(source)
    named = call.table(call["index"])
    if call.table(call[source]) is None and named is not None:
        rows = named.reshape([-1 if d == dim else 1 for d in range(output.dim())])  # theirs who say where it goes
    rest = torch.broadcast_shapes(collapse_shape(into.shape, dim), collapse_shape(rows.shape, dim))
    into = into.expand([output.shape[dim] if d == dim else n for d, n in enumerate(rest)])
    rows = rows.expand([call[source].shape[dim] if d == dim else n for d, n in enumerate(rest)])
    places = call["index"].cpu().reshape([-1 if d == dim else 1 for d in range(output.dim())]).expand(rows.shape)
    return compact(put(into, dim, places.long(), rows, adds))


def put(into: Tensor, dim: int, places: Tensor, owners: Tensor, adds: bool) -> Tensor:
    """Owners after some were put at places along a dimension, in the place of others or in addition to them."""
    if not adds:
        return into.clone().scatter_(dim, places, owners)
    high = into.scatter_reduce(dim, places, owners, "amax")
    low = torch.where(into < 0, UNKNOWN, into)
    low = low.scatter_reduce(dim, places, torch.where(owners < 0, UNKNOWN, owners), "amin")
    return within(low, high, SUM)


@moves("scatter", "scatter_add", "scatter_reduce", reads=always)
def scatter(call: Call, output: Tensor) -> Tensor | None:
    """Elements put along a dimension; constants belong to those who say where they go."""
    dim, places = call["dim"] % max(1, output.dim()), call["index"]
    tables = [call.table(call["self"]), call.table(places), call.table(call.get("src"))]
    known = [t for t in tables if t is not None]
    if not known:
        return None
    if output.dim() == 0:
        return join(known, 0)
    if all(t.shape[dim] == 1 for t in known) and all(_fits(t, output.shape) for t in known):
        return join(known, output.dim())
    source = tables[2] if tables[2] is not None else tables[1]
    into = full(tables[0] if tables[0] is not None else nobodys(output.dim()), output.shape)
    if source is None:
        source = nobodys(output.dim())
    owners = _cut(full(source, call["src"].shape) if tables[2] is not None else source, places.shape).expand(
        places.shape
    )
    return compact(put(into, dim, places.cpu(), owners, adds=True))


def _fits(table: Tensor, shape: Sequence[int]) -> bool:
    return all(n in (1, s) for n, s in zip(table.shape, shape, strict=True))


@moves("index_put", "_unsafe_index_put", "_index_put_impl", reads=always)
def index_put(call: Call, output: Tensor) -> Tensor | None:
    places = list(call["indices"])
    table, values = call.table(call["self"]), call.table(call["values"])
    if table is None and values is None:
        looked_up = _of_indices_any(call)
        return torch.full((1,) * output.dim(), UNKNOWN) if looked_up else None
    into = table if table is not None else nobodys(output.dim())
    owners = values if values is not None else nobodys(call["values"].dim())
    varying = [d for d, n in enumerate(aligned(owners, max(owners.dim(), 1)).shape) if n > 1]
    if table is not None and values is None:
        return table  # what is nobody's goes to those at whose places it is put
    whole = full(into, output.shape) if varying else _spread(into, output.shape, places)
    spots = tuple(_on_cpu(places))
    chosen = whole[spots]
    owners = (
        aligned(owners, chosen.dim()) if owners.dim() <= chosen.dim() else owners.reshape(owners.shape[-chosen.dim() :])
    )
    owners = owners.expand(chosen.shape)
    if not call.get("accumulate"):
        changed = whole.clone()
        changed[spots] = owners
        return compact(changed)
    numbers = torch.arange(whole.numel()).reshape(whole.shape)[spots].reshape(-1)
    return compact(put(whole.reshape(-1), 0, numbers, owners.reshape(-1), adds=True).reshape(whole.shape))


def _of_indices_any(call: Call) -> bool:
    return any(i is not None and call.table(i) is not None for i in call["indices"])


@moves("masked_scatter", reads=always)
def masked_scatter(call: Call, output: Tensor) -> Tensor | None:
    """The first elements of the source, one after the other, to where the mask is."""
    mask = call["mask"].cpu().expand(output.shape)
    changed = full(call.of("self"), output.shape).clone()
    source = full(call.of("source"), call["source"].shape).reshape(-1)[: int(mask.sum())]
    own = call.table(call["source"]) is not None
    if own:
        changed[mask] = source
    return compact(changed)


@moves("select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter")
def part_scatter(call: Call, output: Tensor) -> Tensor | None:
    table, source = call.table(call["self"]), call.table(call["src"])
    if source is None or table is None or (table.shape == source.shape and torch.equal(table, source)):
        return table if source is None or table is not None else torch.full((1,) * output.dim(), UNKNOWN)
    return torch.full((1,) * output.dim(), UNKNOWN)


@moves("index_fill")
def index_fill(call: Call, output: Tensor) -> Tensor | None:
    return call.of("self")
