"""A batch that is larger than memory, or than one process: who takes which examples, in which pieces.

Workers count the examples that all of them have taken so far, t = 0, 1, 2, …, and worker r of W takes those with
t mod W = r. So shares of any batch are disjoint, complete, and differ by at most one example, no matter which batch
sizes came before; and a position in the data means the same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from cabs.loader.order import Buffer
from cabs.loader.pieces import Part


class Shard:
    """The examples of one worker among all that are handed out.

    Args:
        rank: The worker's number, from 0.
        workers: How many there are.
    """

    def __init__(self, rank: int = 0, workers: int = 1) -> None:
        self.rank = rank
        self.workers = workers
        self.some_index: Any = None
        """An index that went by, no matter whose."""

    def count(self, first: int, examples: int) -> int:
        """How many of `examples` examples are this worker's, the first of them being number `first`."""

        def before(number: int) -> int:
            return (number - self.rank + self.workers - 1) // self.workers

        return before(first + examples) - before(first)

    def largest(self, examples: int) -> int:
        """The largest share of a batch that any worker has."""
        return -(-examples // self.workers)

    def parts(self, parts: Generator[Part, None, None], first: int) -> Generator[Part, None, None]:
        """This worker's examples of a stream of indices that begins with example number `first`."""
        if self.workers == 1:
            yield from parts
            return
        for part in parts:
            self.some_index = part.data[0]
            mine = part.data[(self.rank - first) % self.workers :: self.workers]
            first += part.count
            if len(mine):
                yield Part(part.epoch, part.start, len(mine), mine)


def piece_sizes(examples: int, most: int | None, least_pieces: int = 1) -> list[int]:
    """Cuts a batch into pieces of at most `most` examples, of few different sizes.

    Full pieces come first, then powers of two, so that a compiled model sees the same few shapes at every step. No
    piece is a single example unless it must be: batch normalisation cannot do anything with one.
    """
    if most is None or examples <= most:
        sizes = [examples]
    else:
        full, rest = divmod(examples, most)
        sizes = [most] * full
        if rest == 1 and most > 2:
            taken = 2 if most > 3 else 1
            sizes[-1] -= taken
            rest += taken
        odd = [3] if rest % 2 and rest >= 3 else []
        sizes += [1 << bit for bit in reversed(range(rest.bit_length())) if (rest - sum(odd)) >> bit & 1] + odd
    if len(sizes) < least_pieces <= examples:
        share, more = divmod(examples, least_pieces)
        sizes = [share + (number < more) for number in range(least_pieces)]
    return sizes


def shared_sizes(share: int, largest: int, most: int | None, least_pieces: int = 1) -> list[int]:
    """The pieces of a worker whose share is the largest, or one example short of it: equally many for all.

    Workers wait for one another in every piece where parameters are sharded, so one piece more would be for ever.
    """
    sizes = piece_sizes(largest, most, least_pieces)
    sizes[0] -= largest - share
    return sizes


@dataclass
class Delivery:
    """What the loader has handed out for the step at hand.

    Attributes:
        examples: Of the batch, on all workers together.
        share: Of these, this worker's.
        piece: Of these, in the piece at hand; 0 if that only keeps the others company.
        fraction: The part of its batch that this piece is.
        pieces_left: How many more pieces there are.
    """

    examples: int = 0
    share: int = 0
    piece: int = 0
    fraction: float = 1.0
    pieces_left: int = 0


class Batch(Iterator[Any]):
    """A batch as its pieces, each made when it is asked for.

    Attributes:
        examples: How many examples the batch has, on all workers together.
        sizes: How many each piece has that this worker gets.
    """

    def __init__(
        self,
        examples: int,
        sizes: list[int],
        parts: list[Part],
        make: Callable[[list[Part]], Any],
        begin: Callable[[Any, int, int], None],
        failed: Callable[[], None],
    ) -> None:
        self.examples = examples
        self.sizes = tuple(sizes)
        self._parts = Buffer()
        for part in parts:
            self._parts.add(part)
        self._make, self._begin, self._failed = make, begin, failed
        self._next = 0

    def __len__(self) -> int:
        """How many pieces it has."""
        return len(self.sizes)

    def __next__(self) -> Any:
        if self._next == len(self.sizes):
            raise StopIteration
        size = self.sizes[self._next]
        try:
            piece = self._make(self._parts.take(size))
        except BaseException:
            self._next = len(self.sizes)
            self._failed()
            raise
        self._next += 1
        self._begin(piece, size, len(self.sizes) - self._next)
        return piece
