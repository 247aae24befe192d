"""What a call is given, looked through once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cabs.variance.owners import Owners

PLAIN = {int, float, str, type(None), torch.dtype, torch.device}
"""Kinds of arguments that are nothing but themselves; among these, numbers that are equal mean the same."""


class Given:
    """The tensors among a call's arguments, and whose they are.

    Args:
        values: the arguments, nested in tuples, lists and dictionaries.
        owners: gives the owners of a tensor.

    Attributes:
        tensors: all tensors.
        owned: the owners of those that hold examples.
        parameters: whether any other requires a gradient.
    """

    __slots__ = ("_key", "owned", "parameters", "tensors")

    def __init__(self, values: Any, owners: Callable[[Tensor], Owners | None]) -> None:
        self.tensors: list[Tensor] = []
        self.owned: list[Owners] = []
        self.parameters = False
        self._key: list[Any] = []
        key = self._key.append
        pending = [values]
        for value in pending:  # which grows on the way
            kind = type(value)
            if kind in PLAIN:
                key(value)
            elif isinstance(value, Tensor):
                found, differentiable = owners(value), value.requires_grad
                self.tensors.append(value)
                if found is not None:
                    self.owned.append(found)
                elif differentiable and value.numel():
                    self.parameters = True
                strided = value.layout is torch.strided and not value.is_nested
                layout = (value.shape, value.stride()) if strided else (object(),)
                key((id(found), *layout, value.dtype, differentiable))
            elif isinstance(value, (tuple, list)):
                key((len(value),))
                pending.extend(value)
            elif isinstance(value, dict):
                key(tuple(value))
                pending.extend(value.values())
            elif kind is slice:
                key((slice, value.start, value.stop, value.step))
            else:
                key((kind, value))  # x[True] is not x[1]

    def key(self, *more: Hashable) -> tuple[Any, ...]:
        """All that the owners of an outcome may depend on where numbers in tensors play no part.

        Owners are known by their ids here: whoever keeps the key keeps ``owned`` too.
        """
        return (*more, *self._key)
