"""A batch that several processes share: who takes which examples.

Ranks count the examples that all of them have taken so far, t = 0, 1, 2, …, and rank r of W takes those with
t mod W = r. So shares of any batch are disjoint, complete, and differ by at most one example, no matter which batch
sizes came before; and a position in the data means the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from cabs.loader.chunks import Part


class Shard:
    """The examples of one rank among all that are handed out.

    Args:
        rank: The process's number, from 0.
        world_size: How many there are.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.some_index: Any = None
        """An index that went by, no matter whose."""

    def count(self, first: int, examples: int) -> int:
        """How many of `examples` examples are this rank's, the first of them being number `first`."""

        def before(number: int) -> int:
            return (number - self.rank + self.world_size - 1) // self.world_size

        return before(first + examples) - before(first)

    def largest(self, examples: int) -> int:
        """The largest share of a batch that any rank has."""
        return -(-examples // self.world_size)

    def parts(self, parts: Generator[Part, None, None], first: int) -> Generator[Part, None, None]:
        """This rank's examples of a stream of indices that begins with example number `first`."""
        if self.world_size == 1:
            yield from parts
            return
        for part in parts:
            self.some_index = part.data[0]
            mine = part.data[(self.rank - first) % self.world_size :: self.world_size]
            first += part.count
            if len(mine):
                yield Part(part.epoch, part.start, len(mine), mine)
