"""Calls that write a parameter's effect into a tensor: made to return a new one, which is then written there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from cabs.interrupts import gradients_on
from cabs.variance.given import Given
from cabs.variance.hollow import leads_to_parameters
from cabs.variance.invocations import Invocation
from cabs.variance.owners import Owners
from cabs.variance.replays import ADDITIONS, Adopted

OPERATORS = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div",
    "__ipow__": "pow", "__imatmul__": "matmul",
}  # fmt: skip
"""Python's operators that write, and the methods that do the same and return."""

BESIDE = "a parameter is written to where no example is, beside others: use torch.cat or torch.where"
"""Why a call is refused: no table of owners says that a part of the memory is made of parameters."""


class Calls(Protocol):
    """What is asked to make the calls."""

    def measure(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Given
    ) -> Any: ...

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...] = ..., kwargs: Any = ...) -> Any: ...

    def owners(self, tensor: Tensor) -> Owners | None: ...

    def use(self, call: Invocation) -> Any: ...


@cache
def writes(function: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in OPERATORS or name == "__setitem__"


def measure_in_place(calls: Calls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a call of a function that writes."""
    target, *rest = args
    name = function.__name__
    if calls.owners(target) is None and leads_to_parameters(target):
        raise NotImplementedError(
            f"{name} writes examples into a tensor made of parameters: put them together with torch.cat or torch.where"
        )
    if name == "__setitem__":
        with gradients_on(False):
            place = calls.follow(Tensor.__getitem__, (target, rest[0]))
        return calls.follow(function, (target, rest[0], _adopted(calls, place, rest[1])))
    if name == "copy_":
        return calls.follow(function, (target, _adopted(calls, target, rest[0])), kwargs)
    twin = getattr(Tensor, OPERATORS.get(name, name.removesuffix("_")), None)
    if twin is None:
        raise NotImplementedError(f"{name} writes a parameter's effect into a tensor in place, and has no other form")
    before = target if twin in ADDITIONS else calls.follow(target.clone)
    given = Given(((before, *rest), kwargs), calls.owners)
    return calls.follow(Tensor.copy_, (target, calls.measure(twin, (before, *rest), kwargs, given)))


def _adopted(calls: Calls, place: Tensor, value: Any) -> Any:
    """A parameter that is written to where examples are belongs to these."""
    if not isinstance(value, Tensor) or not leads_to_parameters(value) or calls.owners(value) is not None:
        return value
    owners = calls.owners(place)
    if place.numel() == 0:
        return value
    if owners is None:
        raise NotImplementedError(BESIDE)
    while value.dim() > place.dim() and value.shape[0] == 1:
        value = value[0]
    return calls.use(Adopted(value.expand(place.shape).to(place.dtype), owners))
