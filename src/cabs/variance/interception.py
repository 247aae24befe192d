"""Seeing every operation that brings examples and parameters together, and its gradient when it comes.

While the model runs, a ``TorchFunctionMode`` sees each call of a PyTorch function. A tensor that depends on
the examples carries a mark; one that requires a gradient without the mark is a parameter, or made of
parameters alone (a slice, a normalised weight, a low-rank product). A call that has both is a *use*: its output
goes through an identity that autograd calls with δ in the backward pass, and the parameter goes in through
an alias whose gradient is this use's alone, free of penalties and of other uses.

Working on functions rather than modules is what makes tied weights, functional calls and bare parameters
ordinary cases. Autograd owns whatever is kept: it is freed when autograd frees its own, and an abandoned
forward pass leaves nothing behind.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cabs.variance.registry import LAYERS

MARK = "_cabs_examples"

# Functions that look at a tensor's kind or shape: a parameter among their arguments gets no gradient.
INERT = {
    Tensor.type_as, Tensor.view_as, Tensor.reshape_as, Tensor.expand_as, Tensor.to, Tensor.new_tensor,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
}  # fmt: skip


def marked(tensor: Tensor) -> bool:
    return hasattr(tensor, MARK)


def is_parameter(value: Any) -> bool:
    """Whether a value is a trained parameter, or made of trained parameters alone."""
    return isinstance(value, Tensor) and value.requires_grad and not marked(value)


def mark(value: Any) -> None:
    for tensor in (value,) if isinstance(value, Tensor) else tensors_in(value):
        if not isinstance(tensor, nn.Parameter):
            setattr(tensor, MARK, True)


def unmark(value: Any) -> None:
    for tensor in tensors_in(value):
        if marked(tensor):
            delattr(tensor, MARK)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


class Interceptor(TorchFunctionMode):
    """Sees the calls; what to do about a use is ``measure``'s business.

    Args:
        measure: called as ``measure(interceptor, function, args, kwargs, plain)`` for each use, to make the call;
            ``plain`` if its parameters are just that, nothing made of parameters.
        batch_dim: which dimension of tensors runs over the examples, where no module says otherwise.
    """

    def __init__(self, measure: Callable[..., Any], batch_dim: int) -> None:
        super().__init__()
        self._measure = measure
        self.batch_dim = batch_dim
        self.hidden = 0
        """How many layers with a rule of their own are running: what they do is theirs."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.hidden:
            return func(*args, **kwargs)
        examples = False
        parameters = []
        for tensor in tensors_in((args, kwargs) if kwargs else args):
            if marked(tensor):
                examples = True
            elif tensor.requires_grad:
                parameters.append(tensor)
        if not examples:
            return func(*args, **kwargs)
        if not parameters or func in INERT or not torch.is_grad_enabled():
            output = func(*args, **kwargs)
        elif func in COMPOSITES:
            output = self._compose(func, args, kwargs)
        else:
            output = self._measure(self, func, args, kwargs, all(p.is_leaf for p in parameters))
        mark(output)
        return output

    def _compose(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call of which the parts are seen rather than the whole."""

        def part(*args: Any) -> Any:
            self.hidden += 1
            try:
                output = self._measure(self, func, args, {}, False)
            finally:
                self.hidden -= 1
            mark(output)
            return output

        with self:
            return COMPOSITES[func](self, func, part, args, kwargs)

    @contextmanager
    def examples_in_dim(self, dim: int) -> Iterator[None]:
        previous, self.batch_dim = self.batch_dim, dim
        try:
            yield
        finally:
            self.batch_dim = previous


def _attention(
    interceptor: Interceptor, func: Callable[..., Any], part: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    # Linear maps on (t, m, d) or its flattened rows, whatever the module says of its own inputs.
    with interceptor.examples_in_dim(1):
        return _without_override(func)(*args, **kwargs)


COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {F.multi_head_attention_forward: _attention}
"""Operations made of several uses: ``(interceptor, function, part, args, kwargs)`` to the output."""


def _without_override(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, entered as if no mode were active, so that the mode sees what it calls in turn."""
    assert isinstance(function, types.FunctionType)
    scope = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def saved_tensors_are_packed() -> bool:
    """Whether what autograd keeps is packed away (checkpointing, offloading), so that only autograd may keep it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class Tap(torch.autograd.Function):
    """The identity; shows the gradients that come back, with tensors that autograd kept for it.

    A hook on the tensor costs less and does as well wherever keeping a tensor is just that.
    """

    @staticmethod
    def forward(ctx: Any, show: Callable[..., None], outputs: int, *tensors: Tensor) -> Any:
        ctx.show = show
        ctx.save_for_backward(*tensors[outputs:])
        aliases = tuple(tensor.detach() for tensor in tensors[:outputs])
        return aliases[0] if outputs == 1 else aliases

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        ctx.show(deltas, kept)
        return None, None, *deltas, *(None for _ in kept)


class Hook:
    """A hook that stays behind when its model is copied or pickled, and that knows how to end what it is part of."""

    def __init__(self, function: Callable[..., Any], end: Callable[[], None]) -> None:
        self._function = function
        self.end = end

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return no_hook


def no_hook(*args: Any) -> None:
    """What a hook is in a copy of its model."""


@functools.cache
def keep_out_of_compiled_code() -> None:
    """Lets compiled models run what is here as ordinary Python; on first use, since it takes a second to import."""
    for owner, name in ((Hook, "__call__"), (Interceptor, "__torch_function__")):
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))


class Installation:
    """Runs an interceptor while the model, or any part of it called on its own, is in its forward pass.

    Args:
        model: the module.
        interceptor: what to run.
        begin: told the inputs of every outermost call.
        measure_layer: called with the module, inputs and output of each layer that has a rule of its own.
        end: ends the measurement that this is part of.
    """

    def __init__(
        self,
        model: nn.Module,
        interceptor: Interceptor,
        begin: Callable[[list[Tensor]], None],
        measure_layer: Callable[[nn.Module, Any, Any], Any],
        end: Callable[[], None],
    ) -> None:
        self._interceptor = interceptor
        self._begin = begin
        self._measure_layer = measure_layer
        self._outermost: nn.Module | None = None
        self._batch_dims: list[int] = []
        self.active = True
        displace(model)
        keep_out_of_compiled_code()
        self._handles = []
        for module in model.modules():
            known = type(module).__module__.startswith("torch.")
            if known and module is not model and next(module.parameters(), None) is None:
                continue  # an activation, say: called on its own it is nothing to measure
            first = _batch_first(module)
            self._handles.append(module.register_forward_pre_hook(Hook(self._enter_outermost, end), with_kwargs=True))
            if first is not None:
                self._handles.append(module.register_forward_pre_hook(Hook(self._enter_dim(first), end)))
                self._handles.append(module.register_forward_hook(Hook(self._leave_dim, end), always_call=True))
            if type(module) in LAYERS:
                self._handles.append(module.register_forward_pre_hook(Hook(self._hide, end)))
                self._handles.append(module.register_forward_hook(Hook(self._unhide, end), always_call=True))
            if not known:
                self._handles.append(module.register_forward_hook(Hook(self._mark, end), with_kwargs=True))
            self._handles.append(
                module.register_forward_hook(Hook(self._leave_outermost, end), with_kwargs=True, always_call=True)
            )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_outermost(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._outermost is None and self.active and torch.is_grad_enabled():
            self._outermost = module
            inputs = tensors_in((args, kwargs))
            first = _batch_first(module)
            with self._interceptor.examples_in_dim(self._interceptor.batch_dim if first is None else int(not first)):
                self._begin(inputs)
            mark(inputs)
            self._interceptor.__enter__()

    def _leave_outermost(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._outermost is module:
            self._outermost = None
            self._interceptor.__exit__(None, None, None)
            unmark((args, kwargs, output))

    def _enter_dim(self, first: bool) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._batch_dims.append(self._interceptor.batch_dim)
            if any(tensor.dim() >= 3 for tensor in tensors_in(args)):
                self._interceptor.batch_dim = 0 if first else 1

        return enter

    def _leave_dim(self, module: nn.Module, args: Any, output: Any) -> None:
        self._interceptor.batch_dim = self._batch_dims.pop()

    def _hide(self, module: nn.Module, args: Any) -> None:
        self._interceptor.hidden += 1

    def _unhide(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._interceptor.hidden -= 1
        return self._measure_layer(module, args, output) if self._outermost is not None else output

    def _mark(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """What a module makes of examples depends on them, even where its functions are out of sight."""
        if self._outermost is not None and any(map(marked, tensors_in((args, kwargs)))):
            mark(output)


def displace(model: nn.Module) -> None:
    """Ends what else is installed in a model: two of a kind would see each other's aliases."""
    others = {id(h.end): h.end for m in model.modules() for h in m._forward_hooks.values() if isinstance(h, Hook)}
    if others:
        warnings.warn("the model was being measured already: the new measurement takes over", stacklevel=5)
    for end in others.values():
        end()


def _batch_first(module: nn.Module) -> bool | None:
    """What a module says of its inputs' first dimension, where it says something."""
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        module = module.self_attn
    elif isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return _batch_first(module.layers[0])
    value = getattr(module, "batch_first", None)
    return value if isinstance(value, bool) else None
