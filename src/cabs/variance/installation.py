"""Hooks that tell when a model, or any part of it, is called, and whether compiled code is what runs then."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from cabs import torch_compiler, torch_internals
from cabs.hooks import Hook, InnerHook, displace
from cabs.torch_internals import NO_BACKWARD, current_backward
from cabs.variance.interception import Interceptor
from cabs.variance.registry import LAYERS


class Beside(Protocol):
    """Who measures compiled code by what a few examples show outside of it."""

    @property
    def runs(self) -> bool:
        """Whether these examples are being run now."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Told that compiled code is about to run: whether it may, measured beside."""

    def leave(self, output: Any) -> None:
        """Told what came of it."""


class Installation:
    """Hooks that tell when the model, or any part of it called on its own, begins a forward pass.

    Args:
        model: the module.
        interceptor: what is to be active from then on.
        active: whether there is anything to measure.
        begin: told the arguments of every outermost call; returns them, or others to be taken in their place.
        end_forward: told when an outermost call has ended.
        measure_layer: called with the module, inputs and output of each layer that has a formula of its own.
        beside: measures compiled code.
        end: ends the measurement that this is part of.
    """

    def __init__(
        self,
        model: nn.Module,
        interceptor: Interceptor,
        active: Callable[[], bool],
        begin: Callable[[Any, Any], tuple[Any, Any]],
        end_forward: Callable[[nn.Module, Any, Any], None],
        measure_layer: Callable[[nn.Module, Any, Any], Any],
        beside: Beside,
        end: Callable[[], None],
    ) -> None:
        self._interceptor = interceptor
        self._begin, self._end_forward = begin, end_forward
        self._measure_layer = measure_layer
        self._outermost: FrameType | None = None
        """Where the outermost call of a module is being made."""
        self._active, self._beside = active, beside
        self.in_compiled_code = False
        """Whether the model was ever called by compiled code: by what ``torch.compile`` made of it, say."""
        self._compiled: nn.Module | None = None
        """The module whose compiled code runs now, and is measured beside it."""
        displace(model)
        torch_compiler.keep_out_of_compiled_code(Hook.__call__, Interceptor.__torch_function__)
        self._handles = []
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks, and is not seen into
            known = type(module).__module__.startswith("torch.")
            if known and module is not model and next(module.parameters(), None) is None:
                continue  # an activation, say: called on its own it is nothing to measure
            kind = Hook if module is model else InnerHook
            self._handles.append(module.register_forward_pre_hook(kind(self._enter, end), with_kwargs=True))
            if type(module) in LAYERS:
                self._handles.append(module.register_forward_pre_hook(Hook(self._hide, end)))
                self._handles.append(module.register_forward_hook(Hook(self._unhide, end), always_call=True))
            self._handles.append(
                module.register_forward_hook(kind(self._leave, end), with_kwargs=True, always_call=True)
            )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._beside.runs or torch.compiler.is_compiling():  # is being exported, say
            return None
        caller = torch_compiler.leave_compiled_code()
        try:
            # A forward pass that was interrupted never tells that it has ended, but its call is no longer being made.
            inside = self._outermost is not None and torch_internals.is_running(self._outermost)
            if not inside:
                self.in_compiled_code |= bool(caller)
                self.forget()
                if not torch.is_grad_enabled():
                    return None
                if self._sees():
                    self._interceptor.begin()
                self._outermost = torch_internals.frame_of_call()
                args, kwargs = self._begin(args, kwargs)
            if self._compiled is None and self._sees() and (caller or torch_compiler.is_compiled(module)):
                if self._beside.enter(module, args, kwargs):
                    self._compiled = module
                    self._interceptor.end()
                else:
                    caller = None  # it goes on as plain Python
            return None if inside else (args, kwargs)
        finally:
            torch_compiler.enter_compiled_code(caller)

    def _sees(self) -> bool:
        return self._active() and current_backward() == NO_BACKWARD and not self._interceptor.hidden

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._beside.runs or torch.compiler.is_compiling():
            return
        caller = torch_compiler.leave_compiled_code()
        try:
            if self._compiled is module:
                self._compiled = None
                self._interceptor.begin()
                if output is not None:
                    self._beside.leave(output)
            if self._outermost is not None and self._outermost is torch_internals.frame_of_call():
                self._outermost = None
                if output is not None and self._active():  # None: an error ended it
                    self._end_forward(module, args, kwargs)
        finally:
            torch_compiler.enter_compiled_code(caller)

    def forget(self) -> None:
        """Takes a forward pass that was interrupted for ended."""
        self._outermost = self._compiled = None

    def _hide(self, module: nn.Module, args: Any) -> None:
        self._interceptor.hidden += 1

    def _unhide(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._interceptor.hidden -= 1
        return self._measure_layer(module, args, output) if self._outermost is not None and self._active() else output
