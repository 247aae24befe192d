"""The loss of a step, from what Lightning lets a callback see of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Losses:
    """Gathers the losses of the batches that make a step, and notices when it is made.

    Args:
        optimizer: the optimizer.
        accumulation: how many batches make a step.
        scaler: the scaler of losses, if one is in use.
        returned: whether what ``training_step`` returned is what went into ``backward``, as in automatic optimization;
            Lightning has divided it by the batches of a step then.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accumulation: int,
        scaler: torch.amp.GradScaler | None,
        returned: bool,
    ) -> None:
        self._accumulation, self._scaler, self._returned = accumulation, scaler, returned
        self._handle = optimizer.register_step_post_hook(lambda *_: self._note_step())
        self._parts: list[Tensor] = []
        self._backward: list[Tensor] = []
        self._steps, self._attempts = 0, 0

    @property
    def pending(self) -> bool:
        """Whether there are batches whose step is yet to come."""
        return bool(self._parts)

    def begin_batch(self) -> None:
        """A batch comes."""
        self._backward, self._steps, self._attempts = [], 0, 0

    def note_backward(self, loss: Tensor) -> None:
        """``backward`` is called on a loss, scaled if there is a scaler."""
        if not self._returned:
            self._backward.append(loss.detach() if self._scaler is None else loss.detach() / self._scaler.get_scale())

    def note_attempt(self) -> None:
        """A step is to be made."""
        self._attempts += 1

    def _note_step(self) -> None:
        self._steps += 1

    def of_step(self, outputs: Any) -> Tensor | None:
        """The loss of the step that the batch completed; None if it did not, or if the scaler skipped the step.

        Args:
            outputs: what ``training_step`` returned, as callbacks get it.
        """
        if self._steps > 1:
            raise RuntimeError(
                f"training_step made {self._steps} steps of the optimizer with one batch, and a batch has the size of "
                "one step: make one step with each batch"
            )
        part = self._of_batch(outputs)
        if part is not None:
            self._parts.append(part)
        if not self._steps and not self._attempts:
            if len(self._parts) >= self._accumulation:
                raise RuntimeError(
                    f"{len(self._parts)} batches went by without a step of the optimizer: if several make a step, say "
                    "CABSCallback(accumulation=K)"
                )
            return None
        parts, self._parts = self._parts, []
        if not parts or not self._steps:
            return None
        # Of the mean over K batches; at the end of an epoch there may be fewer.
        return torch.stack(parts).sum() * (self._accumulation / len(parts))

    def _of_batch(self, outputs: Any) -> Tensor | None:
        """What a batch adds to the loss of its step."""
        returned = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._returned:
            return returned
        if len(self._backward) == 1 and (self._accumulation > 1 or returned is None):
            return self._backward[0]
        if returned is not None and self._accumulation == 1:
            return returned
        if not self._backward and returned is None and not self._steps:
            return None  # the batch was dropped
        raise RuntimeError(
            f"training_step called self.manual_backward {len(self._backward)} times, so that the loss of the batch is "
            "not known: call it once for each batch, or, if each batch makes a step, return its loss"
        )

    def close(self) -> None:
        """Leaves the optimizer alone."""
        self._handle.remove()
