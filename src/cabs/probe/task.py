"""What is probed: the loss of random batches of a dataset, as the user's loop would compute it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from cabs.loader.chunks import Collate, Part
from cabs.loader.sources import fetch
from cabs.scheduler.observing import mean_loss


@dataclass(frozen=True)
class Task:
    """A model on its data.

    Attributes:
        model: the module that is trained.
        dataset: map-style.
        loss: the mean loss of a batch, or the losses of its examples.
        collate_fn: makes a batch of a list of examples.
    """

    model: nn.Module
    dataset: Any
    loss: Callable[[Any], Any]
    collate_fn: Collate = default_collate

    def draw(self, count: int) -> list[int]:
        """Random examples, drawn one by one: each is independent of all others.

        So what is found is about the dataset, however small it is, without a correction.
        """
        return torch.randint(len(self.dataset), (count,)).tolist()

    def batch(self, size: int) -> Any:
        """A batch of random examples."""
        return self.batch_of(self.draw(size))

    def batch_of(self, indices: list[int]) -> Any:
        """A batch of these examples."""
        return fetch(self.dataset, self.collate_fn)([Part(0, 0, len(indices), indices)])

    def mean_loss(self, batch: Any, size: int) -> Tensor:
        """F of a batch, with its graph."""
        found = self.loss(batch)
        if not isinstance(found, Tensor):
            raise TypeError(
                f"loss returned {type(found).__name__}: it must return the loss of the batch that it is given, a tensor"
            )
        if found.dim() == 1 and len(found) != size:
            raise ValueError(
                f"loss returned {len(found)} numbers for a batch of {size} examples: one each, or the mean"
            )
        mean = mean_loss(found)
        if not math.isfinite(value := mean.item()):
            raise ValueError(
                f"the loss of {size} examples is {value}: nothing can be measured before it is finite; look at the "
                "data, the initial weights, and the learning rate if some steps were made first"
            )
        if not mean.requires_grad:
            raise ValueError(
                "the loss has no graph, so it has no gradient: it must be computed with the model that is passed, "
                "outside of torch.no_grad() and inference_mode()"
            )
        return mean

    def backward(self, size: int) -> float:
        """Leaves the gradient of a new batch in ``.grad``, and returns its loss."""
        self.clear()
        loss = self.mean_loss(self.batch(size), size)
        loss.backward()
        return loss.item()

    def clear(self) -> None:
        """Takes the gradients away."""
        for parameter in self.model.parameters():
            parameter.grad = None
