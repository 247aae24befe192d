"""What the loader hands out: a batch, or its microbatches one after the other."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cabs.loader.chunks import Part
from cabs.loader.order import Buffer


@dataclass(frozen=True)
class Delivery:
    """What was handed out last: a microbatch, which may be a whole batch.

    Attributes:
        batch: The number of the batch, from 1; 0 if nothing was handed out yet.
        examples: Of the batch, on all ranks together.
        share: Of these, this rank's.
        size: Of these, in this microbatch; 0 if it is a placeholder that keeps this rank in step.
        left: How many more microbatches the batch has.
        rows: Whether all tensors of it have a row for each example, as what `default_collate` makes.
    """

    batch: int = 0
    examples: int = 0
    share: int = 0
    size: int = 0
    left: int = 0
    rows: bool = False

    @property
    def fraction(self) -> float:
        """The part of its batch that this microbatch is."""
        return max(1, self.size) / max(1, self.examples)


class Observed:
    """A loader that tells somebody what it hands out. Its copies tell nobody, and nobody moves their size."""

    def __getstate__(self) -> dict[str, Any]:
        free = {"on_delivery": None, "on_request": None, "least_microbatches": 1, "steered": False, "_workers": None}
        return {**vars(self), **free}

    def __repr__(self) -> str:
        loader: Any = self
        what, progress = loader._identity(), loader._progress
        count = "examples" if what["length"] is None else f"{what['length']:,} examples"
        seen = f"epoch {progress.epoch}, {progress.consumed:,} seen in it"
        return f"<{type(self).__name__}: {count}, {what['order']}, next batch {loader.batch_size}, {seen}>"


def microbatch_sizes(examples: int, most: int | None, least_count: int = 1) -> list[int]:
    """Cuts a batch into microbatches of at most `most` examples, of few different sizes.

    Full ones come first, then powers of two, so that a compiled model sees the same few shapes at every step. None is
    a single example unless it must be: batch normalization fails on one.
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
    if len(sizes) < least_count <= examples:
        share, more = divmod(examples, least_count)
        sizes = [share + (number < more) for number in range(least_count)]
    return sizes


def shared_sizes(share: int, largest: int, most: int | None, least_count: int = 1) -> list[int]:
    """The microbatches of a rank whose share is the largest, or one example short of it: equally many for all.

    Where parameters are sharded, ranks wait for one another in every microbatch, so all need the same number.
    """
    sizes = microbatch_sizes(largest, most, least_count)
    sizes[0] -= largest - share
    return sizes


class Batch(Iterator[Any]):
    """A batch as its microbatches, each made when it is asked for.

    Attributes:
        examples: How many examples the batch has, on all ranks together.
        sizes: How many each microbatch has that this rank gets.
    """

    def __init__(
        self,
        examples: int,
        sizes: list[int],
        parts: list[Part],
        make: Callable[[list[Part]], Any],
        deliver: Callable[[Any, int, int], None],
        failed: Callable[[], None],
    ) -> None:
        self.examples = examples
        self.sizes = tuple(sizes)
        self._parts = Buffer()
        for part in parts:
            self._parts.add(part)
        self._make, self._deliver, self._failed = make, deliver, failed
        self._next = 0
        self._ahead: deque[Any] = deque()

    def __repr__(self) -> str:
        return f"<a batch of {self.examples} examples in {len(self)} microbatches>"

    def __len__(self) -> int:
        """How many microbatches it has."""
        return len(self.sizes)

    def load(self) -> list[Any]:
        """The microbatches to come, made now; each still counts as handed out when it is taken.

        For loops that must know the whole batch beforehand, as one that divides by its number of tokens.
        """
        for size in self.sizes[self._next + len(self._ahead) :]:
            self._ahead.append(self._made(size))
        return list(self._ahead)

    def __iter__(self) -> Batch:
        if _is_unpacked(sys._getframe(1)):
            raise TypeError(
                "batches come as microbatches (max_microbatch_size), so a batch is not inputs and targets: write "
                "`for inputs, targets in batch:` inside the loop over the loader, and scheduler.backward(loss) in it"
            )
        return self

    def __next__(self) -> Any:
        if self._next == len(self.sizes):
            raise StopIteration
        size = self.sizes[self._next]
        microbatch = self._ahead.popleft() if self._ahead else self._made(size)
        self._next += 1
        self._deliver(microbatch, size, len(self.sizes) - self._next)
        return microbatch

    def _made(self, size: int) -> Any:
        try:
            return self._make(self._parts.take(size))
        except BaseException:
            self._next = len(self.sizes)
            self._ahead.clear()
            self._failed()
            raise


def _is_unpacked(frame: Any) -> bool:
    """Whether a frame is at `a, b = …` rather than in a loop: the likeliest mistake with microbatches."""
    at = frame.f_code.co_code[frame.f_lasti] if frame.f_lasti >= 0 else -1
    return bool(at == dis.opmap["UNPACK_SEQUENCE"])
