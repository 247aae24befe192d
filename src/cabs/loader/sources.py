"""Where examples come from: tensors in memory, this process, or worker processes.

A source is a stream of parts and a function that makes a batch of them. In this process the parts are indices
and nothing is loaded before a batch is complete; workers send chunks of loaded examples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from cabs.loader.chunks import (
    Chunk,
    Collate,
    Part,
    collated_chunk,
    collates_by_parts,
    join,
    own,
    sample_chunk,
)
from cabs.loader.order import Buffer, Position, Seed, parts_from
from cabs.torch_loading import end_workers


@dataclass(frozen=True)
class Source:
    """A stream of parts, and what makes a batch of some of them."""

    parts: Generator[Part, None, None]
    make_batch: Callable[[list[Part]], Any]


@dataclass
class Size:
    """The batch size of the moment, shared by the loader and whatever loads for it."""

    value: int
    world_size: int = 1

    def chunk(self) -> int:
        """Whole batches, so that a size at rest needs no cutting: one, or up to four as long as they are small.

        A message between processes costs as much as loading some tens of light examples, but the examples may
        be heavy, and every chunk is memory and delay.
        """
        share = -(-self.value // self.world_size)
        return share * min(4, -(-64 // share))


def _indices(parts: list[Part]) -> list[Any]:
    blocks = (part.data.tolist() if isinstance(part.data, Tensor) else part.data for part in parts)
    return list(chain.from_iterable(blocks))


def fetch(dataset: Any, collate_fn: Collate) -> Callable[[list[Part]], Any]:
    """Makes batches of indices by loading exactly their examples, here and now."""

    def make_batch(parts: list[Part]) -> Any:
        indices = _indices(parts)
        if getattr(dataset, "__getitems__", None):
            return collate_fn(dataset.__getitems__(indices))
        return collate_fn([dataset[index] for index in indices])

    return make_batch


def gather(tensors: tuple[Tensor, ...], rows: Tensor | None) -> Callable[[list[Part]], Any]:
    """Makes batches of indices with one gather per tensor; `rows` are a subset's indices into the tensors."""

    length = len(tensors[0]) if rows is None else len(rows)

    def make_batch(parts: list[Part]) -> Any:
        indices = [
            part.data if isinstance(part.data, Tensor) else _from_front(torch.as_tensor(part.data), length)
            for part in parts
        ]
        index = indices[0] if len(indices) == 1 else torch.cat(indices)
        if rows is not None:
            index = rows.index_select(0, index)
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in tensors]

    return make_batch


def _from_front(index: Tensor, length: int) -> Tensor:
    # Samplers and subsets may count from the end; index_select, several times faster than indexing, may not.
    return torch.where(index < 0, index + length, index)


def tensors_of(dataset: Any) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """The tensors behind a `TensorDataset`, or a `Subset` of one with its rows; None for others."""
    kind = type(dataset)
    # Subclasses may have changed what an example is.
    if kind is TensorDataset:
        tensors = dataset.tensors
        return (tensors, None) if all(tensor.layout is torch.strided for tensor in tensors) else None
    if kind is not Subset:
        return None
    inner = tensors_of(dataset.dataset)
    if inner is None:
        return None
    try:
        rows = torch.as_tensor(dataset.indices)
    except (TypeError, ValueError, RuntimeError):
        return None
    if rows.dtype != torch.int64 or rows.dim() != 1:
        return None
    rows = _from_front(rows, len(dataset.dataset))
    return inner[0], rows if inner[1] is None else inner[1].index_select(0, rows)


def collate_samples(collate_fn: Collate) -> Callable[[list[Part]], Any]:
    """Makes batches of loaded examples."""
    return lambda parts: collate_fn(list(chain.from_iterable(part.data for part in parts)))


def join_chunks(parts: list[Part]) -> Any:
    """Makes batches of chunks that went through `default_collate` as far as they could."""
    if not any(part.collated for part in parts):
        return collate_samples(default_collate)(parts)
    return join([part.data if part.collated else default_collate(part.data) for part in parts])


def iterable_parts(
    dataset: Iterable[Any], position: Position, endless: bool, buffer: Buffer
) -> Generator[Part, None, None]:
    """Examples of an iterable dataset, loaded here, as many as the next batch needs."""

    def open_epoch(epoch: int) -> Iterator[Part]:
        source, start = iter(dataset), 0
        while samples := list(islice(source, max(1, buffer.wanted))):
            yield Part(epoch, start, len(samples), samples)
            start += len(samples)

    return parts_from(position, endless, open_epoch)


class _ChunkSampler:
    """Cuts the stream of indices into what workers load at a time, and remembers where each chunk belongs."""

    def __init__(self, chunk_size: Callable[[], int]) -> None:
        self.chunk_size = chunk_size
        self._parts: Iterator[Part] = iter(())
        self.places: deque[Position] = deque()

    def restart(self, parts: Iterator[Part]) -> None:
        self._parts = parts
        self.places = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        for part in self._parts:
            rest = part
            while rest.count:
                head, rest = rest.split(min(rest.count, self.chunk_size()))
                self.places.append((head.epoch, head.start))
                yield _indices([head])


class Workers:
    """Processes that load chunks of examples ahead of the consumer.

    Args:
        dataset: Map-style or iterable.
        collate_fn: Makes batches; workers collate chunks themselves where that comes to the same.
        size: The batch size of the moment.
        chunk_size: What a worker loads at a time; None follows the batch size, or for an iterable dataset
            (whose order depends on it) the first batch size.
        options: Arguments of `DataLoader` about workers.
    """

    def __init__(
        self, dataset: Any, collate_fn: Collate, size: Size, chunk_size: int | None, options: dict[str, Any]
    ) -> None:
        by_parts = collates_by_parts(collate_fn)
        self.make_batch = join_chunks if by_parts else collate_samples(collate_fn)
        self._size = size
        self._generator = torch.Generator()
        self._turn = 0
        self._chunks = _ChunkSampler(lambda: chunk_size or size.chunk())
        if isinstance(dataset, IterableDataset):
            how: dict[str, Any] = {"batch_size": chunk_size}
        else:
            how = {"batch_sampler": self._chunks}
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            collate_fn=collated_chunk if by_parts else sample_chunk,
            generator=self._generator,
            **how,
            **options,
        )

    def indexed(self, parts: Iterator[Part], position: Position, seed: Seed) -> Generator[Part, None, None]:
        """Parts of a map-style dataset, given those of its indices."""
        self._chunks.restart(parts)
        places = self._chunks.places
        return self._received(seed, position, lambda chunk: places.popleft())

    def iterable(self, position: Position, endless: bool, seed: Seed) -> Generator[Part, None, None]:
        """Parts of an iterable dataset, each worker iterating over its own copy."""

        def open_epoch(epoch: int) -> Iterator[Part]:
            seen = 0

            def place(chunk: Chunk) -> Position:
                nonlocal seen
                seen += chunk.count
                return epoch, seen - chunk.count

            return self._received(seed, (epoch, 0), place)

        return parts_from(position, endless, open_epoch)

    def _received(
        self, seed: Seed, position: Position, place: Callable[[Chunk], Position]
    ) -> Generator[Part, None, None]:
        self._turn += 1
        turn = self._turn
        # Workers' own randomness, say in augmentation, follows from the seed too.
        self._generator.set_state(seed.generator("workers", *position).get_state())
        chunks = iter(self._loader)
        keep = False
        try:
            for chunk in chunks:
                part = self._part(chunk, place(chunk))
                del chunk  # Shared memory must not wait for the next chunk to be freed.
                yield part
                del part
                self._check_turn(turn)
            keep = True
        except GeneratorExit:
            keep = self._loader.persistent_workers
            raise
        finally:
            # A traceback may keep the iterator alive; that is no reason to keep its processes.
            if not keep and turn == self._turn:
                end_workers(self._loader, chunks)

    def _part(self, chunk: Chunk, place: Position) -> Part:
        if chunk.count * 64 < self._size.value:
            # Shared memory is an open file; a batch of very many chunks must not hold them all.
            chunk = replace(chunk, data=own(chunk.data))
        return chunk.part(*place)

    def _check_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise RuntimeError(
                "a newer iterator has taken over the persistent workers: finish one before starting the next, "
                "or leave persistent_workers off"
            )
