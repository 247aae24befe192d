"""One pass over a loader: batches cut to the size of the moment, and how far the consumer has got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cabs.loader.chunks import Part, collates_by_parts
from cabs.loader.deliveries import Batch, Delivery, shared_sizes
from cabs.loader.opening import open_source
from cabs.loader.order import Buffer
from cabs.loader.sources import Source, fetch
from cabs.torch_loading import pin

if TYPE_CHECKING:
    from cabs.loader.adaptive import AdaptiveLoader


@dataclass
class Progress:
    """How far the consumer has got. Each iterator has its own; the loader reads the newest one's."""

    epoch: int = 0
    consumed: int = 0
    total: int = 0
    begun: bool = False


def count_batches(examples: int, batch_size: int, drop_last: bool) -> int:
    """The batches of an epoch, all of one size but for the last."""
    full, rest = divmod(examples, batch_size)
    if drop_last:
        return full or min(1, examples)
    joined = rest == 1 and full > 0 and batch_size > 1
    return full + (rest > 0 and not joined)


class Batches(Iterator[Any]):
    """One pass over the loader.

    If a dataset or a collate function fails, or Ctrl-C interrupts, the batch does not count as delivered, and the
    next call tries it again.
    """

    def __init__(self, loader: AdaptiveLoader, progress: Progress) -> None:
        self._loader = loader
        self._progress = progress
        self._source: Source | None = None
        self._buffer = Buffer()
        self._ended = False
        self._pins = loader.pin_memory and can_pin()

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return self._next_batch()
        except BaseException:
            self._drop_source()
            raise

    def _next_batch(self) -> Any:
        loader, progress = self._loader, self._progress
        if loader.on_request is not None:
            loader.on_request()
        if self._source is None:
            self._source = open_source(loader, (progress.epoch, progress.consumed), self._buffer)
        examples, share = self._fill_for(self._source, loader.batch_size)
        # A size beyond the whole epoch would never come: then the epoch is the batch.
        short = examples < loader.batch_size and progress.consumed > 0
        if examples == 0 or (short and loader.drop_last):
            self._end()
            raise StopIteration
        parts = self._buffer.take(share)
        before, delivered = replace(progress), loader.delivery
        batch = self._deliver(examples, share, parts, lambda: self._take_back(before, delivered))
        self._advance(examples, parts)
        return batch

    def _deliver(self, examples: int, share: int, parts: list[Part], failed: Callable[[], None]) -> Any:
        """The batch, or its microbatches."""
        loader = self._loader
        most, least = loader.max_microbatch_size, loader.least_microbatches
        if most == "auto":
            raise RuntimeError(
                'max_microbatch_size="auto" is found by the scheduler: make it with trial=…, before the first batch'
            )
        # A batch that cannot be made is not delivered; a microbatch that cannot takes its batch back.
        batch = self._make(parts) if most is None else None
        loader.batches_begun += 1
        number, rows = loader.batches_begun, collates_by_parts(loader.collate_fn)

        def deliver(microbatch: Any, size: int, left: int) -> None:
            loader.delivery = Delivery(number, examples, share, size, left, rows)
            if loader.on_delivery is not None:
                loader.on_delivery(microbatch, loader.delivery)

        if most is None:
            deliver(batch, share, 0)
            return batch
        sizes = shared_sizes(share, loader._shard.largest(examples), most, least)
        return Batch(examples, sizes, parts, self._make, deliver, failed)

    def _make(self, parts: list[Part]) -> Any:
        loader = self._loader
        if not parts:
            filler = Part(0, 0, 1, [int(loader._shard.some_index)])
            batch = fetch(loader.dataset, loader.collate_fn)([filler])
        else:
            assert self._source is not None
            batch = self._source.make_batch(parts)
        batch = pin(batch) if self._pins else batch
        return batch if loader.place is None else loader.place(batch)

    def _fill_for(self, source: Source, size: int) -> tuple[int, int]:
        """Loads for a batch of about `size`; how many examples it has, and how many of them are ours.

        A last example that would be left alone goes into the batch before it: it has no variance, and batch
        normalization fails on it.
        """
        loader, shard, progress = self._loader, self._loader._shard, self._progress
        length = loader._length()
        left = None if length is None or loader.stream else length - progress.consumed
        joins_last = size > 1 and not loader.stream and not loader.drop_last
        if joins_last and left == size + 1:
            size += 1
        if shard.world_size == 1:
            looks_ahead = joins_last and left is None
            self._fill(source, size + 2 if looks_ahead else size)
            if looks_ahead and self._buffer.count == size + 1:
                size += 1
            examples = min(size, self._buffer.count)
            return examples, examples
        assert length is not None
        examples = size if left is None else min(size, left)
        share = shard.count(progress.total, examples)
        self._fill(source, max(1, share))
        if self._buffer.count < share:
            raise RuntimeError(f"the sampler gave fewer indices than the {length} that its length promises")
        return examples, share

    def _advance(self, examples: int, parts: list[Part]) -> None:
        progress = self._progress
        progress.total += examples
        if self._loader.world_size == 1:
            progress.epoch = parts[-1].epoch
            progress.consumed = parts[-1].start + parts[-1].count
            return
        length = self._loader._length()
        assert length is not None
        progress.consumed += examples
        while progress.consumed > length:
            progress.consumed -= length
            progress.epoch += 1

    def _take_back(self, before: Progress, delivered: Delivery) -> None:
        """A microbatch could not be made: the batch counts as not delivered."""
        self._drop_source()
        self._loader.delivery = delivered
        vars(self._progress).update(vars(before))

    def _fill(self, source: Source, size: int) -> None:
        while self._buffer.count < size:
            self._buffer.wanted = size - self._buffer.count
            part = next(source.parts, None)
            if part is None:
                return
            self._buffer.add(part)

    def _end(self) -> None:
        self._ended = True
        self._progress.epoch += 1
        self._progress.consumed = 0
        self._progress.begun = False

    def at_end(self) -> bool:
        """Whether no batch of the loader's present size is left; examples may be loaded ahead in order to tell."""
        loader, progress = self._loader, self._progress
        if self._ended or loader.stream:
            return self._ended
        least = loader.batch_size if loader.drop_last and progress.consumed > 0 else 1
        length = loader._length()
        if length is not None:
            return length - progress.consumed < least
        if self._source is None:
            self._source = open_source(loader, (progress.epoch, progress.consumed), self._buffer)
        self._fill(self._source, least)
        return self._buffer.count < least

    def close(self) -> None:
        """Ends the pass early, with its workers."""
        self._ended = True
        self._drop_source()

    def _drop_source(self) -> None:
        if self._source is not None:
            # Not left to the garbage collector: a traceback may hold on to it.
            self._source.parts.close()
        self._source, self._buffer = None, Buffer()


def can_pin() -> bool:
    """Whether there is an accelerator to pin memory for."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type != "mps"
