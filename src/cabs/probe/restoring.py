"""Leaves a model, its optimizer and all random numbers exactly as they were, whatever happens in between."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cabs.interrupts import uninterrupted
from cabs.torch_internals import buffers_of

Undo = Callable[[], None]


@contextmanager
def as_before(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Whatever happens inside is undone, also after an error or Ctrl-C. Gradients are set aside for so long.

    Covers values and identity of parameters and buffers, what else modules keep as attributes, gradients, the
    optimizer's state and settings, and the random numbers of torch, Python and numpy.
    """
    undo = [*_modules(model), *_optimizer(optimizer, model), *_randomness()]
    try:
        for parameter in model.parameters():
            parameter.grad = None
        yield
    finally:
        try:
            _undo(undo)
        finally:  # once more, should Ctrl-C have come just before
            _undo(undo)


def _undo(undo: list[Undo]) -> None:
    with uninterrupted(), torch.no_grad():
        for one in undo:
            one()


def _modules(model: nn.Module) -> Iterator[Undo]:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    keep = {**tensors, **{id(module): module for module in model.modules()}}
    for module in model.modules():
        for entries in (module._parameters, buffers_of(module)):
            if isinstance(entries, dict):  # those of a scripted module cannot be replaced
                yield _entries(entries)
        yield _attributes(module, keep)
    for tensor in tensors.values():
        yield _values(tensor)
    for parameter in model.parameters():
        yield _setter(parameter, "grad", parameter.grad)


def _values(tensor: Tensor) -> Undo:
    value = tensor.detach().to("cpu", copy=True)
    return lambda: _put(tensor, value)


def _put(tensor: Tensor, value: Tensor) -> None:
    tensor.detach().copy_(value)


def _ignored(_: object) -> None:
    pass


def _setter(thing: object, name: str, value: object) -> Undo:
    return lambda: setattr(thing, name, value)


def _entries(entries: dict[str, Any]) -> Undo:
    """Which things a dict holds, not what they are."""
    before = dict(entries)

    def undo() -> None:
        if entries.keys() != before.keys() or any(entries[key] is not before[key] for key in before):
            entries.clear()
            entries.update(before)

    return undo


OWN = frozenset(vars(nn.Module())) - {"training"}
"""What every module has: hooks and dicts of parameters, which nothing here changes for good."""


def _attributes(module: nn.Module, keep: dict[int, Any]) -> Undo:
    """What a module keeps besides parameters and buffers: counters, averages that are no buffers, caches."""
    before = {name: value for name, value in vars(module).items() if name not in OWN}
    inside = [content for value in before.values() if (content := _content(value, keep)) is not None]

    def undo() -> None:
        for name in vars(module).keys() - before.keys() - OWN:
            del vars(module)[name]
        vars(module).update(before)
        for content in inside:
            content()

    return undo


def _content(value: Any, keep: dict[int, Any]) -> Undo | None:
    """Undoes changes inside of something that can be changed in place."""
    if isinstance(value, Tensor):
        return None if id(value) in keep else _values(value)
    if isinstance(value, torch.Generator):
        torch_state = value.get_state()
        return lambda: _ignored(value.set_state(torch_state))
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if not isinstance(value, list | dict | set | deque):
        return None
    try:
        # What is in the model itself is not copied: it is put back where it is.
        before = copy.deepcopy(value, dict(keep))
    except Exception:  # a lock, a handle of a process: nothing that a copy could be made of
        before = copy.copy(value)

    def undo() -> None:
        value.clear()
        if isinstance(value, list | deque):
            value.extend(before)
        else:
            value.update(before)

    return undo


def _optimizer(optimizer: Any, model: nn.Module) -> Iterator[Undo]:
    """The optimizer is not stepped here, but a hook of the user's may do that in the backward pass."""
    for group in optimizer.param_groups:
        yield _entries(group)
    keep = {id(parameter): parameter for parameter in model.parameters()}
    for state in list(optimizer.state.values()):
        if isinstance(state, dict):
            yield _entries(state)
            for value in state.values():
                if (content := _content(value, keep)) is not None:
                    yield content
    yield _entries(optimizer.state)


def _randomness() -> Iterator[Undo]:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    yield lambda: torch.set_rng_state(torch_state)
    yield lambda: random.setstate(python_state)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(devices)
    if torch.backends.mps.is_available():
        mps = torch.mps.get_rng_state()
        yield lambda: torch.mps.set_rng_state(mps)
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        numbers = numpy.random.get_state()
        yield lambda: numpy.random.set_state(numbers)


class Randomness:
    """A moment of all random number generators, to go back to."""

    def __init__(self) -> None:
        self._undo = list(_randomness())

    def again(self) -> None:
        _undo(self._undo)


def copied(optimizer: Any) -> Any:
    """An optimizer of the same parameters with a state of its own, without the user's hooks.

    Raises:
        TypeError: it cannot be copied.
    """
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    other = object.__new__(type(optimizer))
    hooks = {name for name in vars(optimizer) if name.endswith("_hooks")}
    # A learning-rate scheduler replaces ``step`` by one that counts the steps of the original.
    rest = {name: value for name, value in vars(optimizer).items() if name not in hooks | {"step"}}
    try:
        vars(other).update(copy.deepcopy(rest, parameters))
    except Exception as error:
        raise TypeError(
            f"{type(optimizer).__name__} cannot be copied ({error}), and the probe makes steps with a copy only"
        ) from error
    vars(other).update({name: type(vars(optimizer)[name])() for name in hooks})
    return other
