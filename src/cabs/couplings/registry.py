"""Which optimizer has which coupling, and how users add their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from cabs.couplings.base import Coupling

COUPLINGS: dict[type, Coupling] = {}
Kind = TypeVar("Kind", bound=type[Coupling])


def register_coupling(*optimizers: type[torch.optim.Optimizer]) -> Callable[[Kind], Kind]:
    """Declares the coupling of optimizers of your own, and of their subclasses::

        @register_coupling(MyOptimizer)
        class MyCoupling(Coupling):
            def weights(self, group, state):
                return 1 / (state["v"].sqrt() + group["eps"]) if state else None

    α is the learning rate, unless there is a method ``alpha(group, state)``.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, type):
            raise TypeError(f"register_coupling takes classes of optimizers, not {optimizer!r}")

    def register(kind: Kind) -> Kind:
        if not (isinstance(kind, type) and issubclass(kind, Coupling)):
            raise TypeError(f"{kind!r} is no coupling: it must be a subclass of cabs.couplings.Coupling")
        COUPLINGS.update(dict.fromkeys(optimizers, kind()))
        return kind

    return register


def coupling_of(optimizer: Any) -> Coupling | None:
    """The coupling of an optimizer's class or the nearest class above it; None if there is none."""
    return next((COUPLINGS[kind] for kind in type(optimizer).__mro__ if kind in COUPLINGS), None)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of wrappers that have one, such as accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
