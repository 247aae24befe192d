"""Seeing every call that brings examples and parameters together.

A ``TorchFunctionMode`` sees each call of a PyTorch function, from the moment the examples are known until their
gradients have been measured: in the model, before it and behind it. Tensors made of examples are marked with whose they
are (``owners.py``); a tensor that requires a gradient without a mark is a parameter, or made of parameters alone (a
slice, a normalised weight, a low-rank product). A call that has both is a *use*.

Working on functions rather than modules is what makes tied weights, functional calls, bare parameters and losses that
use a weight themselves ordinary cases.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from cabs import torch_compiler, torch_internals
from cabs.torch_internals import NO_BACKWARD, current_backward, in_transform
from cabs.variance.following import Following
from cabs.variance.given import Given
from cabs.variance.hollow import noting_hollow
from cabs.variance.inputs import tensors_in
from cabs.variance.looks import looks_only, reads_numbers
from cabs.variance.memory import Marks
from cabs.variance.mixing import Mixing
from cabs.variance.owners import SUM, Owners
from cabs.variance.plain import DATA, MAKER, brings_data
from cabs.variance.probing import Probe
from cabs.variance.registry import INVOCATIONS, OPERATIONS
from cabs.variance.writes import BESIDE, writes


class Listener(Protocol):
    """Whose business it is what to do about what is seen."""

    @property
    def mixing(self) -> Mixing:
        """Told what may make examples depend on one another."""

    def measure(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> Any:
        """Makes a call that is a use."""

    def hidden_use(self, tensors: list[Tensor]) -> None:
        """Told the tensors of a call that would be a use if autograd were on."""

    def looking(self) -> AbstractContextManager[None]:
        """For derivatives that are only looked at, not trained with."""

    def begin_backward(self, roots: list[Tensor]) -> None:
        """Told what backward is called on."""


class Interceptor(TorchFunctionMode):
    """Sees the calls.

    Args:
        marks: the owners of tensors.
        listener: what to report to; once it is gone, calls go by.
    """

    def __init__(self, marks: Marks, listener: Listener) -> None:
        super().__init__()
        self._marks = marks
        self._listener = weakref.ref(listener)
        self.following = Following(marks)
        self.hidden = 0
        """How many layers with a formula of their own are running: what they do is theirs."""
        self.probe: Probe | None = None
        """Who takes down what uses give, in a forward pass without gradients."""
        self.idle = False
        """Whether a backward pass has ended and no forward pass has begun since: what goes on is not about examples."""
        _INTERCEPTORS.add(self)
        _rest_before_optimizers_step()

    def __exit__(self, *error: object) -> None:
        torch_internals.pop(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.idle or looks_only(func):
            output = func(*args, **kwargs)
            if not self.idle and reads_numbers(func):
                self._note_read(args[0], output)
            return output
        listener = self._listener()
        if listener is None or self._marks.lot is None or self.hidden or _differentiates() or in_transform():
            return func(*args, **kwargs)
        if func in torch_internals.BACKWARD:
            grads = func is torch.autograd.grad
            if not grads:
                listener.begin_backward(tensors_in(args[0] if args else kwargs["tensors"]))
            looks = grads and not kwargs.get("create_graph")
            with self, listener.looking() if looks else nullcontext():
                output = _opened(func)(*args, **kwargs)  # with what is computed again in a backward pass
            # The optimizer's step comes next, say, unless the same forward pass is to be differentiated again.
            inside = current_backward() != NO_BACKWARD  # another backward pass, which goes on
            self.idle = not (grads or inside or torch_internals.keeps_graph(func, args, kwargs))
            if self.idle:
                torch_compiler.run_as_python(False, self)
            return output
        given = Given((args, kwargs) if kwargs else args, self._marks.get)
        if not given.owned:
            if given.parameters and writes(func) and self._marks.beside(given.tensors[0]):
                raise NotImplementedError(BESIDE)
            call = functools.partial(func, *args, **kwargs)
            output = noting_hollow(call, given.tensors) if given.hollow else call()
            if given.parameters:
                self._note_maker(func, args, kwargs, given, output)
            return output
        if func is F.batch_norm or func is F.embedding or func is F.embedding_bag:
            listener.mixing.look_at_statistics(func, args, kwargs)
        if not given.parameters or not torch.is_grad_enabled():
            output = self.following.call(func, args, kwargs, given)
            if given.parameters and self.probe is not None:
                self.probe.record(func, args, kwargs, output)
            elif given.parameters:
                listener.hidden_use(given.tensors)
        elif func in COMPOSITES:
            with self:
                return COMPOSITES[func](self, func, args, kwargs)
        elif _is_made_of_others(func):
            with self:
                return _opened(func)(*args, **kwargs)
        else:
            output = listener.measure(func, args, kwargs, given)
            self.following.mixtures.clear()  # a use of what was mixed is refused, not warned about
            return output
        places, self.following.mixtures = self.following.mixtures, []
        if places or given.mixed:
            with torch_internals.unseen():
                places = places or self._met(given, output)
                if places:
                    listener.mixing.mixed([t for t in tensors_in(output) if t.requires_grad], places)
        return output

    def _met(self, given: Given, output: Any) -> list[str]:
        """Where a mixture was made that had no gradient yet, and now goes into something that has one."""
        told = any(t.requires_grad and _is_mixed(self._marks.get(t)) for t in given.tensors)
        found = [self._marks.get(tensor) for tensor in ([] if told else tensors_in(output)) if tensor.requires_grad]
        return [str(owners.why) for owners in found if owners is not None and _is_mixed(owners)]

    def _note_maker(self, func: Callable[..., Any], args: Any, kwargs: Any, given: Given, output: Any) -> None:
        """Notes on what was made of parameters how, and whether numbers came in that may be an example's."""
        if func in OPERATIONS and isinstance(output, Tensor):
            setattr(output, MAKER, (func, args, kwargs))
        lot = self._marks.lot
        assert lot is not None
        # What a loader hands out is known, but for what Python code made of it.
        unknown = func in OPERATIONS or lot.read or not lot.given
        if unknown and brings_data(func, given.tensors):
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    torch_internals.notes_of(tensor.grad_fn)[DATA] = True

    def _note_read(self, tensor: Any, numbers: Any) -> None:
        lot = self._marks.lot
        owners = self._marks.get(tensor) if lot is not None and isinstance(tensor, Tensor) else None
        if lot is not None and owners is not None:
            lot.note_read(owners, numbers)

    def abandon(self) -> None:
        """Sees nothing any more. It leaves later: the garbage collector may call this in the middle of anything."""
        self.idle = True
        torch_compiler.run_as_python(False, self)

    def rest(self) -> None:
        """Sees no more calls until it begins again, if what goes on is not about examples."""
        if self.idle:
            self.end()

    def begin(self, as_python: bool = True) -> None:
        """Becomes active, whatever an interrupted pass has left behind.

        Args:
            as_python: let compiled code run as plain Python; not where that is what calls the model next.
        """
        self.idle, self.hidden, self.probe = False, 0, None
        self.following.mixtures.clear()
        torch_internals.end_unseen()
        torch_internals.leave_dispatch(self.following)
        torch_internals.enter(self)
        torch_compiler.run_as_python(as_python, self)

    def end(self) -> None:
        """Sees no more calls."""
        torch_internals.leave(self)
        torch_compiler.run_as_python(False, self)
        torch_internals.leave_dispatch(self.following)

    def measure(self, func: Callable[..., Any], *args: Any) -> Any:
        """Makes a call that is a use, or follows it if it is none."""
        listener = self._listener()
        with torch_internals.unseen():
            given = Given(args, self._marks.get)
            if listener is not None and given.parameters:
                return listener.measure(func, args, {}, given)
            return self.following.call(func, args, {}, given)

    def differentiate(self, outputs: Any, inputs: Sequence[Tensor], deltas: Any) -> Sequence[Tensor | None]:
        """Gradients of outputs; calls on the way (of activations that are computed again) are seen."""
        grad = _opened(torch.autograd.grad)
        with nullcontext() if torch_internals.is_active(self) else self:
            found: Sequence[Tensor | None] = grad(outputs, inputs, deltas, allow_unused=True)
        return found

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call and marks what comes of it."""
        return self.following.call(func, args, kwargs, Given((args, kwargs), self._marks.get))


COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Operations made of several uses that are not Python: ``(interceptor, function, args, kwargs)`` to the output."""


def _differentiates() -> bool:
    """Whether a backward pass calls, as compiled ones do; what is computed again in it has gradients."""
    return not torch.is_grad_enabled() and current_backward() != NO_BACKWARD


def _is_mixed(owners: Owners | None) -> bool:
    return owners is not None and owners.highest > SUM


@functools.cache
def _is_made_of_others(func: Callable[..., Any]) -> bool:
    """Whether a function is Python code around other functions, which are seen on their own then."""
    if not isinstance(func, types.FunctionType) or func in OPERATIONS or func in INVOCATIONS:
        return False
    return torch_internals.asks_modes(func)


_opened = functools.cache(torch_internals.opened)


_INTERCEPTORS: weakref.WeakSet[Interceptor] = weakref.WeakSet()


@functools.cache
def _rest_before_optimizers_step() -> None:
    """Lets interceptors rest while any optimizer makes a step, which is hundreds of calls."""

    def rest(*_: Any) -> None:
        for interceptor in list(_INTERCEPTORS):
            interceptor.rest()

    register_optimizer_step_pre_hook(rest)
