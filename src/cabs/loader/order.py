"""Which example comes when: the one place that turns (seed, epoch) into a stream of indices."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from cabs.loader.chunks import Part

Position = tuple[int, int]  # an epoch, and how many of its examples came before
OpenEpoch = Callable[[int], Iterator[Part]]  # the examples of one epoch, from its first


class Seed:
    """The seed of all orders; drawn when it is first needed, so that an earlier `torch.manual_seed` counts."""

    def __init__(self, value: int | None, generator: torch.Generator | None) -> None:
        self.value = value
        self._generator = generator

    def fix(self) -> int:
        """The seed, drawn from the generator (or torch's global one) if it was not given."""
        if self.value is None:
            device = "cpu" if self._generator is None else self._generator.device
            drawn = torch.empty((), dtype=torch.int64, device=device).random_(generator=self._generator)
            self.value = int(drawn.item())
        return self.value

    def generator(self, *purpose: int | str) -> torch.Generator:
        """A generator that depends on the seed and the purpose alone."""
        # A hash, because seed + epoch would make epoch 1 of seed 0 the same as epoch 0 of seed 1.
        text = ":".join(map(str, (self.fix(), *purpose)))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


class EpochSampler(Sampler[int]):
    """The order of a map-style dataset as a function of seed and epoch."""

    def __init__(self, dataset: Sized, shuffle: bool, seed: Seed) -> None:
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of the given epoch."""
        self.epoch = epoch

    def indices(self) -> Tensor:
        """All indices of the epoch, in order."""
        if not self._shuffle:
            return torch.arange(len(self))
        return torch.randperm(len(self), generator=self._seed.generator("order", self.epoch))

    def __iter__(self) -> Iterator[int]:
        indices: list[int] = self.indices().tolist()
        return iter(indices)

    def __len__(self) -> int:
        return len(self._dataset)


class Buffer:
    """Parts on their way to the consumer.

    Attributes:
        count: How many examples it holds.
        wanted: How many more the next batch needs.
    """

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()
        self.count = 0
        self.wanted = 0

    def add(self, part: Part) -> None:
        """Appends examples."""
        self._parts.append(part)
        self.count += part.count

    def take(self, count: int) -> list[Part]:
        """Removes the first `count` examples."""
        assert count <= self.count
        self.count -= count
        taken = []
        while count:
            part = self._parts.popleft()
            if part.count > count:
                part, rest = part.split(count)
                self._parts.appendleft(rest)
            taken.append(part)
            count -= part.count
        return taken


def parts_from(position: Position, endless: bool, open_epoch: OpenEpoch) -> Generator[Part, None, None]:
    """The examples from `position` to the end of its epoch, or of all epochs after it too."""
    first, skip = position
    for epoch in count(first):
        seen = 0
        for part in open_epoch(epoch):
            seen += part.count
            if seen > skip:
                yield part.split(skip - part.start)[1] if part.start < skip else part
            del part  # or the examples would live until the next are there
        if not endless:
            return
        if not seen:
            raise RuntimeError(f"epoch {epoch} of the stream is empty: the dataset or sampler gave no example at all")
        skip = 0


def index_epochs(sampler: Iterable[Any], seed: Seed, wanted: Callable[[], int]) -> OpenEpoch:
    """Opens epochs of indices; `wanted` says how many to ask a sampler for at a time."""

    def open_epoch(epoch: int) -> Iterator[Part]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if isinstance(sampler, EpochSampler):
            indices = sampler.indices()
            if len(indices):
                yield Part(epoch, 0, len(indices), indices)
            return
        # A sampler's draws come from a generator of this epoch, so that random samplers can be resumed.
        generator = seed.generator("sampler", epoch)
        with _global_rng(generator):
            source = iter(sampler)
        start = 0
        while True:
            with _global_rng(generator):
                block = list(islice(source, wanted()))
            if not block:
                return
            yield Part(epoch, start, len(block), block)
            start += len(block)

    return open_epoch


@contextmanager
def _global_rng(generator: torch.Generator) -> Iterator[None]:
    """Makes torch's global generator draw from this one in the block, and restores it afterwards."""
    outside = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(outside)
