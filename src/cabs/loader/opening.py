"""Starts to load a loader's examples at some position."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from cabs.loader.chunks import Part, collates_by_parts
from cabs.loader.order import Buffer, Position, index_epochs, parts_from
from cabs.loader.sources import Source, Workers, collate_samples, fetch, gather, iterable_parts, tensors_of

if TYPE_CHECKING:
    from cabs.loader.adaptive import AdaptiveLoader


def open_source(loader: AdaptiveLoader, position: Position, buffer: Buffer) -> Source:
    """Starts to load at a position."""
    tensors = tensors_of(loader.dataset) if collates_by_parts(loader.collate_fn) else None
    workers = _loading_workers(loader) if loader.num_workers and tensors is None else None
    if loader._iterable:
        if workers is not None:
            return Source(workers.iterable(position, loader.stream, loader._seed), workers.make_batch)
        parts = iterable_parts(loader.dataset, position, loader.stream, buffer)
        return Source(parts, collate_samples(loader.collate_fn))
    if workers is not None:
        indices = _indices(loader, position, loader._size.chunk)
        return Source(workers.indexed(indices, position, loader._seed), workers.make_batch)
    make_batch = fetch(loader.dataset, loader.collate_fn) if tensors is None else gather(*tensors)
    return Source(_indices(loader, position, lambda: max(1, buffer.wanted)), make_batch)


def _indices(loader: AdaptiveLoader, position: Position, wanted: Callable[[], int]) -> Generator[Part, None, None]:
    """This process's indices from a position on; the sampler is asked for no more than are wanted."""
    assert loader.sampler is not None
    epochs = index_epochs(loader.sampler, loader._seed, lambda: wanted() * loader.world_size)
    return loader._shard.parts(parts_from(position, loader.stream, epochs), loader._progress.total)


def _loading_workers(loader: AdaptiveLoader) -> Workers:
    if loader._workers is not None:
        return loader._workers
    workers = Workers(loader.dataset, loader.collate_fn, loader._size, loader.chunk_size, loader._options)
    if loader.persistent_workers:
        loader._workers = workers
    return workers
