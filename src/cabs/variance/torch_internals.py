"""Whatever leans on parts of PyTorch that are private or may change, each with why it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from cabs.interrupts import uninterrupted

NO_BACKWARD = -1

BACKWARD: set[Callable[..., Any]] = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
"""What runs a backward pass, and is seen by modes (``autograd.backward`` since some version after 2.4)."""


def keeps_graph(backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the graph that ``Tensor.backward`` or ``autograd.backward`` goes through is there afterwards."""
    names = backward.__code__.co_varnames  # which begin with the arguments'
    values = dict(zip(names, args, strict=False)) | kwargs
    return bool(values.get("retain_graph") or values.get("create_graph"))


LOOKS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "item",
    "tolist", "numpy", "__len__", "__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__", "__hash__",
    "is_floating_point", "is_complex", "is_nonzero", "data_ptr", "element_size", "untyped_storage", "get_device",
    "register_hook", "requires_grad_", "retain_grad", "is_same_size", "is_tensor", "register_post_accumulate_grad_hook",
    "has_names", "__reduce_ex__", "__deepcopy__", "__dlpack__", "__array__", "__contains__", "is_set_to", "_is_view",
    "detach", "view", "permute", "transpose", "expand", "unsqueeze", "squeeze", "expand_as", "view_as", "unflatten",
    "chunk", "split", "unbind", "select", "narrow", "movedim", "swapaxes", "swapdims", "unfold", "diagonal", "t",
    "broadcast_tensors",
    "broadcast_to", "alias", "view_as_real", "view_as_complex", "new_empty", "new_zeros", "new_ones", "new_full",
    "new_tensor", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "__get__",
}  # fmt: skip
"""Names of functions that look at a tensor, make one like it, or give a view of it."""


def looks_only(function: Callable[..., Any]) -> bool:
    """Whether a function looks at a tensor's kind or shape, makes one like it, or gives a view, which needs no mark."""
    return getattr(function, "__name__", "") in LOOKS and getattr(function, "__module__", "") != "torch.nn.functional"


def enter(mode: TorchFunctionMode) -> None:
    """Makes a mode active in this thread until ``leave``, as ``torch.set_default_device`` does with its own.

    It goes to the bottom of the stack: whoever ends a mode takes the topmost for it.
    """
    stack = overrides._get_current_function_mode_stack()
    if [number for number, one in enumerate(stack) if one is mode] != [0]:
        _restack(stack, [mode, *(one for one in stack if one is not mode)])


def leave(mode: TorchFunctionMode) -> None:
    """Ends a mode wherever on the stack of modes it is, and how often; an interrupt may leave it there twice."""
    stack = overrides._get_current_function_mode_stack()
    if any(one is mode for one in stack):
        _restack(stack, [one for one in stack if one is not mode])


def _restack(before: list[TorchFunctionMode], after: list[TorchFunctionMode]) -> None:
    with uninterrupted():
        for _ in before:
            overrides._pop_mode()
        for mode in after:
            overrides._push_mode(mode)


def leave_dispatch(mode: TorchDispatchMode) -> None:
    """The same for a mode that sees operations, which is active within a call only, unless that was interrupted."""
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    if any(one is mode for one in stack):
        with uninterrupted():
            for one in reversed(stack):
                _python_dispatch._pop_mode(getattr(one, "_mode_key", None))
            for one in stack:
                if one is not mode:
                    _python_dispatch._push_mode(one)


def frame_of_call() -> FrameType | None:
    """The innermost call of a module that is being made."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def is_running(call: FrameType) -> bool:
    """Whether a call is still being made, by the caller of this function or further out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


_CALL = nn.Module._call_impl.__code__
"""What calls a module's hooks and its forward, once for each call."""


def at_the_end_of_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward pass that runs now has ended, unless it fails or is interrupted."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


unseen = torch._C.DisableTorchFunction
"""A context in which no mode sees what is called."""


class OwnDerivatives:
    """Whether derivatives are being taken by this package itself, which hooks on parameters are called for too."""

    depth = 0

    def __enter__(self) -> None:
        OwnDerivatives.depth += 1

    def __exit__(self, *exception: object) -> None:
        OwnDerivatives.depth -= 1


def current_backward() -> int:
    """A number that is the same throughout one call of backward, and NO_BACKWARD outside of any."""
    return torch._C._current_graph_task_id()


def saved_tensors_are_packed() -> bool:
    """Whether what autograd keeps is packed away (checkpointing, offloading), so that only autograd may keep it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def only_reverse_mode() -> bool:
    """Whether neither functorch's transforms nor forward-mode derivatives are active."""
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def notes_of(node: Any) -> dict[str, Any]:
    """A dictionary that a node of autograd's graph keeps for anybody; declared as a method, and a property in fact."""
    notes: dict[str, Any] = node.metadata
    return notes
