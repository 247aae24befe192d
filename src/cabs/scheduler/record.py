"""The current step: all that is known of it, from its first batch to ``scheduler.step``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from cabs.loader.deliveries import Delivery


@dataclass
class TakenBatch:
    """A batch that the loader handed out, whole or in microbatches.

    Attributes:
        delivery: its last microbatch so far.
        passes: the backward passes that were made with it, by autograd's numbers.
    """

    delivery: Delivery
    passes: set[int] = field(default_factory=set)


class OpenStep:
    """What the loader handed out for a step, what went through ``scheduler.backward``, and what the optimizer did."""

    def __init__(self) -> None:
        self.batches: list[TakenBatch] = []
        self.losses: Tensor | float = 0.0
        """The sum of the losses of all examples that went through ``scheduler.backward``."""
        self.backwarded = 0
        """How many examples those were."""
        self.company = False
        """Whether this process had a placeholder only."""
        self.exchange: Callable[[], Tensor] | None = None
        """A sum over processes that is under way."""
        self.optimizer_stepped = False

    def take(self, delivery: Delivery, passes: Iterable[int] | None, accumulation: int) -> bool:
        """Notes what the loader hands out.

        Args:
            delivery: a microbatch, or a whole batch.
            passes: the backward passes whose gradients are there; None if nobody knows.
            accumulation: how many batches make a step.

        Returns:
            Whether the batch is of the next step, because this one has all its batches already. It is not noted then.
        """
        if passes is not None:
            self.note_passes(passes)
        if self.batches and self.batches[-1].delivery.batch == delivery.batch:
            self.batches[-1].delivery = delivery
            return False
        used = self.batches if passes is None else self.used()
        if len(used) >= accumulation:
            return True
        # What was taken and not used, or whose gradients were cleared, was dropped by the loop.
        self.batches = [*used, TakenBatch(delivery)]
        return False

    def note_passes(self, passes: Iterable[int]) -> None:
        """Assigns new backward passes to the last batch, and removes those whose gradients were cleared."""
        passes = set(passes)
        for batch in self.batches:
            batch.passes &= passes
        if self.batches:
            self.batches[-1].passes |= passes - {task for batch in self.batches for task in batch.passes}

    def used(self) -> list[TakenBatch]:
        """The batches whose gradients are in the step, as far as backward passes are seen."""
        return [batch for batch in self.batches if batch.passes]

    @property
    def delivery(self) -> Delivery | None:
        """What was handed out last."""
        return self.batches[-1].delivery if self.batches else None

    def examples(self) -> int:
        """Of the step, on all processes together."""
        return sum(batch.delivery.examples for batch in self.batches)

    def share(self) -> int:
        """Of these, this process's."""
        return sum(batch.delivery.share for batch in self.batches)
