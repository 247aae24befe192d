"""What ``GradientVariance`` may be made with, and which examples of a batch it measures."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import nn

from cabs.variance.backward import SQUARES

ESTIMATORS = (*SQUARES, "microbatch")
REDUCTIONS = ("mean", "sum")

AUTO_EXAMPLES = 32
"""How many examples of a batch are measured in layers where each of them costs; docs/variance.md has the evidence."""

AUTO_ALL = 64
"""Up to this size a batch is measured whole: convolutions then find the gradient along with the norms, for less."""


def check_arguments(model: Any, estimator: str, reduction: str, max_examples: Any) -> None:
    """Refuses invalid arguments."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: it must be a torch.nn.Module")
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}: choose one of {', '.join(REDUCTIONS)}")
    if max_examples not in (None, "auto") and (not isinstance(max_examples, int) or max_examples < 2):
        raise ValueError(f"max_examples is {max_examples!r}: it must be an integer of at least 2, 'auto' or None")


FEWEST = 8
"""Where every example costs a gradient or a pass of its own, this many or a sixteenth are measured, up to the above."""


def chosen_examples(
    examples: int,
    limit: int | Literal["auto"] | None,
    share: float,
    cheap: bool,
    costly: bool = False,
    least: int = 1,
) -> slice:
    """Which examples to measure: evenly spaced, so that an order within batches does no harm.

    Args:
        examples: how many there are.
        limit: how many of a whole batch to measure at most.
        share: which part of a batch these are.
        cheap: whether all of them cost next to nothing, but for weights.
        costly: whether norms are weighted, or found beside compiled code.
        least: the fewest that will do.
    """
    if limit == "auto" and costly:
        limit = min(AUTO_EXAMPLES, max(FEWEST, round(examples / share / 16)))
    elif limit == "auto":
        limit = None if cheap or examples <= AUTO_ALL * share else AUTO_EXAMPLES
    most = examples if limit is None else max(least, math.ceil(limit * share))
    if examples <= most:
        return slice(None)
    stride = examples // most
    return slice(0, stride * most, stride)
