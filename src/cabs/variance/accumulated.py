"""What the backward passes of a batch have added up to so far."""

from __future__ import annotations

from torch import Tensor


class Accumulated:
    """Σ_i G_i of the backward passes that a batch has had so far, by parameter.

    It is in ``.grad``, unless something else is there too: an old gradient, a penalty's, or what a hook made of it.
    Then it is kept here.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._in_grad: set[int] = set()

    def before(self, parameter: Tensor) -> Tensor | None:
        """The sum of the passes before this one; None if there was none."""
        kept = self._kept.get(id(parameter))
        return parameter.grad if kept is None and id(parameter) in self._in_grad else kept

    def add(self, parameter: Tensor, total: Tensor, received: Tensor) -> None:
        """Takes a pass's Σ_i G_i, and the gradient that is about to be added to ``.grad``."""
        key = id(parameter)
        alone = total.data_ptr() == received.data_ptr() and (parameter.grad is None or key in self._in_grad)
        if alone and key not in self._kept:
            self._in_grad.add(key)
        else:
            before = self.before(parameter)
            self._kept[key] = total if before is None else before + total
            self._in_grad.discard(key)
