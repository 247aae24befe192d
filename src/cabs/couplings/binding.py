"""A coupling at work on an optimizer."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from cabs.couplings.base import Coupling, State
from cabs.couplings.kinds import SGD


class Coupled:
    """α of each parameter group and P of each parameter, as an optimizer has them now.

    Args:
        optimizer: the optimizer.
        coupling: how to read it; None if nobody knows, and only learning rates are asked for.
    """

    def __init__(self, optimizer: Any, coupling: Coupling | None) -> None:
        self._optimizer = optimizer
        self._coupling = coupling
        self._group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}

    @property
    def diagonal(self) -> bool:
        """Whether there are weights at all."""
        return self._coupling is not None and self._coupling.diagonal

    @property
    def plain(self) -> bool:
        """Whether P is known to be 1, so that α tr Σ is the noise of a step."""
        return self._coupling is not None and not self._coupling.diagonal

    @property
    def built_in(self) -> bool:
        """Whether the weights are known to make sense."""
        return type(self._coupling).__module__ == SGD.__module__

    def alphas(self) -> tuple[float, ...]:
        """α of each group, which must make sense."""
        return tuple(self._alpha(number) for number in range(len(self._optimizer.param_groups)))

    def weights(self, parameter: Tensor) -> Tensor | None:
        """P of a parameter; None as long as there is none.

        Where parameters of a group differ in α, having made different numbers of steps, the group's stands for all of
        them and the rest is in P.
        """
        assert self._coupling is not None
        number = self._group_of.get(id(parameter))
        state = self._state(parameter)
        if number is None or (weights := self._coupling.weights(self._optimizer.param_groups[number], state)) is None:
            return None
        if parameter.is_complex():
            raise NotImplementedError(
                f"{type(self._optimizer).__name__} steps the real and the imaginary part of a complex parameter, of "
                f"shape {tuple(parameter.shape)}, each by its own size, which no P of that shape says: make it two"
            )
        ours, theirs = self._coupling.alpha(self._optimizer.param_groups[number], state), self._alpha(number)
        return weights if ours == theirs else weights * (ours / theirs)

    def _alpha(self, number: int) -> float:
        group = self._optimizer.param_groups[number]
        if self._coupling is None:
            alpha = float(group["lr"])
        else:
            states = (self._state(p) for p in group["params"]) if getattr(self._optimizer, "state", None) else ()
            first = next(filter(None, states), {})
            alpha = float(self._coupling.alpha(group, first))
        if not math.isfinite(alpha) or alpha < 0:
            several = len(self._optimizer.param_groups) > 1
            where = f" of parameter group {number}" if several else ""
            raise ValueError(f"the learning rate{where} is {alpha}: it must be a finite number of at least 0")
        return alpha

    def _state(self, parameter: Tensor) -> State:
        # Looked for anew each time: loading an optimizer's state replaces it. A plain lookup would make one.
        return getattr(self._optimizer, "state", {}).get(parameter, {})
