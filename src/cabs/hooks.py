"""Hooks in a model that stay behind when it is copied, and that a later measurement can end.

The compiler looks into this file, and into no other of the package: what is here must be simple.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from cabs.torch_internals import forward_hooks_of


class Hook:
    """A hook that stays behind when its model is copied or pickled, and that knows how to end what it is part of."""

    def __init__(self, function: Callable[..., Any], end: Callable[[], None]) -> None:
        self._function = function
        self.end = end

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # which torch.jit.script asks for first
            raise AttributeError("a model that is being measured cannot be scripted: close() the scheduler first")
        raise AttributeError(name)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Something that takes anything and does nothing, and that can be loaded where this package is not installed.
        return getattr, (nullcontext(), "__exit__")


class InnerHook(Hook):
    """A hook that compiled code does not have: it is for calls that others make."""

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        return self._function(*args)


def no_hook(*args: Any) -> None:
    """What a hook is in a copy of its model."""


class Attached:
    """What hooks tie to a model, so that a copy of it would be tied to nothing."""

    INSTEAD = "make another one for the copy of the model"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, since hooks tie it to its model: {self.INSTEAD}"
        )


def displace(model: nn.Module) -> None:
    """Ends what else is installed in a model: two of a kind would see each other's aliases."""
    others = {id(h.end): h.end for m in model.modules() for h in forward_hooks_of(m) if isinstance(h, Hook)}
    if others:
        warnings.warn("the model was being measured already: the new measurement takes over", stacklevel=5)
    for end in others.values():
        end()
