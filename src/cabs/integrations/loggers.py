"""What a scheduler does, in the logs that people look at. No logger is imported unless it is used."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from cabs.integrations import missing
from cabs.scheduler import Step

_CLIPPED = {"min": -1.0, None: 0.0, "max": 1.0}

Log = Callable[[Step], None]
"""Takes the record of a step, ``scheduler.last``."""


def scalars(step: Step) -> dict[str, float]:
    """A step's numbers under the names that they have in every log.

    What is not known or not finite is left out: nothing was measured, or the rule measures nothing.

    Args:
        step: the record of the step, ``scheduler.last``.

    Returns:
        ``cabs/batch_size``, ``cabs/raw_batch_size``, ``cabs/variance``, ``cabs/noise_share``, ``cabs/noise_scale``,
        ``cabs/loss_average``, ``cabs/examples`` (all so far), and ``cabs/clipped``: -1 if the least size decided, 1 if
        the largest did, else 0.
    """
    if not isinstance(step, Step):
        raise TypeError(f"a step's record is scheduler.last after scheduler.step(loss), not {step!r}")
    numbers = {
        "batch_size": step.batch_size,
        "raw_batch_size": step.raw_batch_size,
        "variance": step.variance,
        "noise_share": step.noise_share,
        "noise_scale": step.noise_scale,
        "loss_average": step.loss_average,
        "examples": step.examples_total,
        "clipped": _CLIPPED[step.clipped],
    }
    return {f"cabs/{name}": float(number) for name, number in numbers.items() if math.isfinite(number)}


def log_to(function: Callable[..., Any], *, step: str | None = "step", every: int = 1) -> Log:
    """Makes a log of any function that takes a dict: ``wandb.log``, ``mlflow.log_metrics``, ``trackio.log``.

    Example::

        log = log_to(mlflow.log_metrics)
        …
        scheduler.step(loss)
        log(scheduler.last)

    Args:
        function: called with the numbers of a step, see ``scalars``.
        step: the argument of the function that says where on the axis they are: it gets the examples seen so far.
            None for functions without one, or that count calls themselves: the examples are in the dict too.
        every: log the first step and then one of so many.
    """
    if not callable(function):
        raise TypeError(f"{function!r} is no function that takes a dict, such as wandb.log or mlflow.log_metrics")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}: it must be a positive number of steps")
    count = 0

    def log(record: Step) -> None:
        nonlocal count
        numbers = scalars(record)
        if count % every == 0:
            function(numbers, **({} if step is None else {step: record.examples_total}))
        count += 1

    return log


class TensorBoard:
    """Writes a scheduler's scalars to TensorBoard, against the examples seen so far.

    Example::

        with TensorBoard("runs/cabs") as log:
            …
            scheduler.step(loss)
            log(scheduler.last)

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter`` that you have, or a directory to write to.
        every: log the first step and then one of so many.
    """

    def __init__(self, writer: Any, *, every: int = 1) -> None:
        self._own = isinstance(writer, (str, os.PathLike))
        self.writer = _writer(writer) if self._own else writer
        if not hasattr(self.writer, "add_scalar"):
            raise TypeError(f"{writer!r} is neither a directory nor a torch.utils.tensorboard.SummaryWriter")
        self._log = log_to(self._write, step="examples", every=every)

    def _write(self, numbers: Mapping[str, float], examples: int) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, global_step=examples)

    def __call__(self, step: Step) -> None:
        """Writes the numbers of a step, ``scheduler.last``."""
        self._log(step)

    def close(self) -> None:
        """Writes what is still to be written, and closes the file unless the writer is yours."""
        (self.writer.close if self._own else self.writer.flush)()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _writer(directory: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise missing("loggers", error) from error
    return SummaryWriter(directory)
