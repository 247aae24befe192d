"""Operations that put elements at places of a tensor, instead of what is there or in addition to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cabs.variance.moves.indexing import collapse_shape, cut, on_cpu, owners_of_places, spread
from cabs.variance.moves.registry import Call, always, moves, nobodys
from cabs.variance.owners import SUM, UNKNOWN, aligned, compact, full, join, within


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
    covers = all(n == output.shape[d] for d, n in enumerate(places.shape) if d != dim)
    if covers and all(t.shape[dim] == 1 and _fits(t, output.shape) for t in known):
        table = join(known, output.dim())
        # What is constant belongs to those on whose line it is. If all is one example's, lines do not tell.
        if table.numel() > 1 or tables[0] is not None:
            return table
    source = tables[2] if tables[2] is not None else tables[1]
    into = full(tables[0] if tables[0] is not None else nobodys(output.dim()), output.shape)
    if source is None:
        source = nobodys(output.dim())
    owners = cut(full(source, call["src"].shape) if tables[2] is not None else source, places.shape).expand(
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
        values = owners_of_places(call, _spots(output.shape, places).dim())  # theirs who say where it goes
        if values is None:
            return None
    into = table if table is not None else nobodys(output.dim())
    owners = values if values is not None else nobodys(call["values"].dim())
    varying = [d for d, n in enumerate(aligned(owners, max(owners.dim(), 1)).shape) if n > 1]
    if table is not None and values is None:
        return table  # what is nobody's goes to those at whose places it is put
    whole = full(into, output.shape) if varying else spread(into, output.shape, places)
    spots = tuple(on_cpu(places))
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


def _spots(shape: Sequence[int], places: Sequence[Tensor | None]) -> Tensor:
    """What is picked of a tensor that has some shape."""
    return nobodys(0).expand(list(shape))[tuple(on_cpu(places))]


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
