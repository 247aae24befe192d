"""What the Trainer's loss is a mean of.

The Trainer counts the items of a whole step, tokens say, and passes ``num_items_in_batch`` to the model, or to
``compute_loss_func``. Some losses divide the sum over a microbatch by it, so that those of all microbatches add up to
the step's; others ignore it and are means over the microbatch. Signatures do not tell which, so the loss is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cabs.loader.deliveries import Batch, Delivery


class Step:
    """All microbatches of a step, as the Trainer gets them.

    Args:
        batch: the batch that the loader handed out.
    """

    def __init__(self, batch: Batch) -> None:
        made = batch.load()
        self.batch = batch
        self.microbatches = [one if size else _none_of(one) for one, size in zip(made, batch.sizes, strict=True)]
        """For counting: a placeholder, which keeps a rank in step, has no rows here."""


def _none_of(microbatch: Any) -> Any:
    return {name: value[:0] if isinstance(value, Tensor) else value for name, value in microbatch.items()}


@dataclass(frozen=True)
class Reduction:
    """How the loss of a microbatch is made.

    Attributes:
        divided: whether it is a sum over the microbatch divided by the items of the whole step, or a mean.
        scale: what ``compute_loss`` multiplies it by; several processes may make it their number.
        shared: whether the items of the step are those of all processes, or of this one.
    """

    divided: bool = False
    scale: float = 1.0
    shared: bool = True

    def of_mean(self, delivery: Delivery) -> float:
        """What the loss of a microbatch is multiplied by to be a mean over its examples, as a scheduler takes it."""
        if not self.divided or not delivery.size:
            return 1 / self.scale
        return (delivery.examples if self.shared else delivery.share) / delivery.size / self.scale


def asked(trainer: Any, microbatch: Mapping[str, Any], items: Tensor | int) -> Reduction | None:
    """Computes the loss of a microbatch for different numbers of items.

    Returns:
        None if this loss does not tell, being zero or not finite.

    Raises:
        NotImplementedError: it is neither a mean nor a sum over the items.
    """
    args = trainer.args
    loss, halved = _losses(trainer, microbatch, items, 2 * items)
    divided, is_mean = _close(loss, 2 * halved), _close(loss, halved)
    if (divided and is_mean) or not math.isfinite(loss):
        return None
    if not divided and not is_mean:
        raise NotImplementedError(
            f"the loss of {type(trainer.model).__name__} divides one part of itself by num_items_in_batch and not the "
            "other (an auxiliary loss?), so that it would change with the number of microbatches: train in one "
            "process, with per_device_train_batch_size = max_batch_size, or leave that part out"
        )
    if args.world_size <= 1 or not args.average_tokens_across_devices:
        return Reduction(divided, shared=False)
    # Whether it is multiplied by the number of processes depends on who has overridden compute_loss.
    args.average_tokens_across_devices = False
    try:
        (alone,) = _losses(trainer, microbatch, items)
    finally:
        args.average_tokens_across_devices = True
    return Reduction(divided, float(round(loss / alone)))


def _losses(trainer: Any, microbatch: Mapping[str, Any], *items: Any) -> list[float]:
    model: nn.Module = trainer.model
    training = [module for module in model.modules() if module.training]
    model.eval()  # neither dropout nor statistics
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            return [
                float(trainer.compute_loss(model, trainer.prepared(microbatch), num_items_in_batch=number))
                for number in items
            ]
    finally:
        for module in training:
            module.training = True


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other))


def _labels(trainer: Any, microbatch: Mapping[str, Any]) -> Tensor:
    """The labels that the Trainer counts."""
    if "shift_labels" in microbatch:
        return microbatch["shift_labels"]
    labels: Tensor = microbatch["labels"]
    return labels[..., 1:] if getattr(trainer, "_loss_shifts_labels", False) else labels


def items_of_examples(trainer: Any, step: Step) -> Tensor:
    """How many items each example of a step has."""
    labels = [_labels(trainer, one) for one in step.microbatches]
    return torch.cat([each.ne(-100).flatten(1).sum(1) if each.dim() > 1 else each.ne(-100) for each in labels])
