"""What a call is given, looked through once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cabs.variance.hollow import leads_to_parameters
from cabs.variance.owners import SUM, Owners

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
        parameters: whether any other requires a gradient, and leads to parameters.
        hollow: whether any other requires a gradient, and none of all leads anywhere.
    """

    __slots__ = ("_found", "_values", "hollow", "owned", "parameters", "tensors")

    def __init__(self, values: Any, owners: Callable[[Tensor], Owners | None]) -> None:
        self.tensors: list[Tensor] = []
        self.owned: list[Owners] = []
        self.parameters = self.hollow = False
        self._found: list[Owners | None] = []
        self._values = pending = [values]
        for value in pending:  # which grows on the way
            if type(value) in PLAIN:
                continue
            if isinstance(value, Tensor):
                found = owners(value)
                self.tensors.append(value)
                self._found.append(found)
                if found is not None:
                    self.owned.append(found)
                elif value.requires_grad:
                    if leads_to_parameters(value):
                        self.parameters = True
                    else:
                        self.hollow = True
            elif isinstance(value, (tuple, list)):
                pending.extend(value)
            elif isinstance(value, dict):
                pending.extend(value.values())
        if self.hollow:
            self.hollow = not any(map(leads_to_parameters, self.tensors))

    @property
    def mixed(self) -> bool:
        """Whether some are not one example's alone, nor a sum over examples."""
        return any(owners.highest > SUM for owners in self.owned)

    def key(self, *more: Hashable) -> tuple[Any, ...]:
        """All that the owners of an outcome may depend on where numbers in tensors play no part.

        To be asked for before the call is made, which may change its arguments. Owners are known by their ids here:
        whoever keeps the key keeps ``owned`` too.
        """
        key: list[Any] = [*more]
        found = iter(self._found)
        for value in self._values:
            kind = type(value)
            if kind in PLAIN:
                key.append(value)
            elif isinstance(value, Tensor):
                strided = value.layout is torch.strided and not value.is_nested
                layout: object = (value.shape, value.stride()) if strided else object()
                owners = next(found)
                trains = value.requires_grad if owners is not None else leads_to_parameters(value)
                key.append((id(owners), layout, value.dtype, value.requires_grad, trains))
            elif isinstance(value, (tuple, list)):
                key.append((len(value),))
            elif isinstance(value, dict):
                key.append(tuple(value))
            elif kind is slice:
                key.append((slice, value.start, value.stop, value.step))
            else:
                key.append((kind, value))  # x[True] is not x[1]
        return tuple(key)
