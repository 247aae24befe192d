"""Every part of PyTorch that is private, undocumented or changed between releases, behind a name of its own.

Each entry says why it is needed and since which release it has this form, as far as known. "2.8" means 2.8 or before:
the oldest release that is tried (docs/versions.md). The compiler's are in ``torch_compiler.py``, the data
loader's in ``torch_loading.py``; no other file uses private names of PyTorch (a test holds it so).
Names of ATen's operations are data, and are in ``variance/moves``: an unknown one is an error, never a wrong number.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.autograd import forward_ad
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch, _pytree

from cabs.interrupts import uninterrupted

# ------------------------------------------------------------------------------------------------- calls that are seen

BACKWARD: set[Callable[..., Any]] = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
"""What runs a backward pass. Why: that modes see these calls is not promised anywhere. Since 2.8."""


def keeps_graph(backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``Tensor.backward`` or ``autograd.backward`` keeps the graph. Why: signatures differ. Since 1.0."""
    names = backward.__code__.co_varnames  # the arguments' names come first
    values = dict(zip(names, args, strict=False)) | kwargs
    return bool(values.get("retain_graph") or values.get("create_graph"))


set_grad: Callable[..., Any] = vars(torch._C.TensorBase)["grad"].__set__
"""What modes are told when ``.grad`` is set. Why: it is the method of a descriptor. Since 1.13."""

ASKS_MODES = "has_torch_function"
"""By functions whose names begin so, PyTorch's Python code asks whether a mode is active. Since 1.7."""


def asks_modes(function: types.FunctionType) -> bool:
    """Whether a function is Python code that modes see as one call. Why: measured are the calls in it. Since 1.7."""
    return any(name.startswith(ASKS_MODES) for name in function.__code__.co_names)


def opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, entered as if no mode were active. Why: so the mode sees the calls in it. Since 1.7."""
    assert isinstance(function, types.FunctionType)
    unseen = {name: lambda *_: False for name in function.__globals__ if name.startswith(ASKS_MODES)}
    scope = {**function.__globals__, **unseen}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


unseen = torch._C.DisableTorchFunction
"""A context that hides calls from modes. Why: ``DisableTorchFunctionSubclass`` leaves modes active. Since 2.0."""


def end_unseen() -> None:
    """Lets modes see again after Ctrl-C at the end of an ``unseen``. Why: Python then never leaves it. Since 2.8."""
    if torch._C._is_torch_function_all_disabled():
        unseen().__exit__(None, None, None)


# --------------------------------------------------------------------------------------------------- stacks of modes
def enter(mode: TorchFunctionMode) -> None:
    """Makes a mode active in this thread until ``leave``, at the bottom of the stack: others pop theirs off the top.

    Why: a ``with`` would end where it began, but a measurement begins in a hook and ends with the step. Since 2.0.
    """
    stack = overrides._get_current_function_mode_stack()
    if [number for number, one in enumerate(stack) if one is mode] != [0]:
        _restack(stack, [mode, *(one for one in stack if one is not mode)])


def is_active(mode: TorchFunctionMode) -> bool:
    """Whether a mode sees calls. Why: nothing public tells. Since 2.0."""
    return any(one is mode for one in overrides._get_current_function_mode_stack())


def leave(mode: TorchFunctionMode) -> None:
    """Removes a mode from the stack, also if an interrupt left it there twice. Why: as for ``enter``. Since 2.0."""
    stack = overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
    if any(one is mode for one in stack):
        _restack(stack, [one for one in stack if one is not mode])


def pop(mode: TorchFunctionMode) -> None:
    """Ends a ``with mode``. Why: after Ctrl-C in a call the stack may lack it, and torch's own fails. Since 2.0."""
    if overrides._get_current_function_mode() is mode:
        overrides._pop_mode()


def _restack(before: list[TorchFunctionMode], after: list[TorchFunctionMode]) -> None:
    with uninterrupted():
        for _ in before:
            overrides._pop_mode()
        for mode in after:
            overrides._push_mode(mode)


TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees operations below autograd. Why: documented under a private name only. Since 2.0."""


def leave_dispatch(mode: TorchDispatchMode) -> None:
    """Removes a dispatch mode that an interrupted call has left. Why: PyTorch's own have keys to pop by. Since 2.2."""
    stack = _python_dispatch._get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    if any(one is mode for one in stack):
        with uninterrupted():
            for one in reversed(stack):
                _python_dispatch._pop_mode(getattr(one, "_mode_key", None))
            for one in stack:
                if one is not mode:
                    _python_dispatch._push_mode(one)


# --------------------------------------------------------------------------------------------------- calls of modules
def frame_of_call() -> FrameType | None:
    """The innermost call of a module that runs now. Why: an interrupted call does not say it ended. Since 2.0."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def is_running(call: FrameType) -> bool:
    """Whether a call found by ``frame_of_call`` still runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


_CALL = nn.Module._call_impl.__code__
"""The code that calls a module's hooks and its forward."""


def forward_hooks_of(module: nn.Module) -> Iterable[Any]:
    """The forward hooks of a module. Why: there is no public way to see them. Since 1.0."""
    return module._forward_hooks.values()


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, to be replaced. Why: some modules do not let ``setattr`` do it. Since 1.0."""
    return module._buffers


Dropout = _DropoutNd
"""What all kinds of dropout derive from. Why: the public classes would have to be listed. Since 1.0."""

# ----------------------------------------------------------------------------------------------------------- autograd

NO_BACKWARD = -1

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""A number of the backward pass that runs now, or NO_BACKWARD. Why: tells passes apart. Since 2.0."""


def at_the_end_of_backward(function: Callable[[], None]) -> None:
    """Calls a function when this backward pass has succeeded. Why: hooks come before its end. Since 1.0."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def saved_tensors_are_packed() -> bool:
    """Whether hooks pack what autograd saves (checkpointing). Why: nothing public tells. Since 2.7 or 2.8, not 2.6."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


notes_of: Callable[[Any], dict[str, Any]] = operator.attrgetter("metadata")
"""A dictionary that a node of autograd's graph keeps for its users. Why: typed as a method. Since 2.1."""

in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func runs. Why: nothing public tells, and its tensors have no memory. Since 2.8."""


def only_reverse_mode() -> bool:
    """Whether no transform or forward-mode derivative is active. Why: our derivatives are reverse only. Since 2.8."""
    return not in_transform() and forward_ad._current_level < 0


def hooks_of(tensor: Tensor) -> Iterable[Any]:
    """The hooks on a tensor that see its gradient. Why: there is no public way to ask. Since 1.0."""
    return (tensor._backward_hooks or {}).values()


def leaf_of(node: Any) -> Tensor | None:
    """The leaf tensor whose gradient a node accumulates, else None. Why: nothing public tells. Since 1.0."""
    return getattr(node, "variable", None)


ISOMETRIES = {
    "AliasBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "UnsqueezeBackward0",
    "UnsafeViewBackward0", "ViewBackward0",
}  # fmt: skip
"""Autograd's names for operations that only move numbers around."""


def is_custom(node: Any) -> bool:
    """Whether a node is a user's ``autograd.Function``, or scripted code. Why: nothing public tells. Since 1.2."""
    if type(node).__name__ == "CppFunction":
        return "CopySlices" not in node.name()
    return not getattr(node, "_forward_cls", nn.Module).__module__.startswith(("torch.", "cabs."))


def saved_by(node: Any) -> list[Tensor]:
    """The tensors that a node keeps for its backward. Why: that they have such names is not promised. Since 1.9."""
    found = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    return [value for value in found if isinstance(value, Tensor)]


def has_other_hooks(leaf: Tensor) -> bool:
    """Whether a leaf has more than one hook, so that its gradient may be changed. Why: no public way. Since 1.0."""
    return len(leaf._backward_hooks or ()) > 1


def is_isometry(node: Any) -> bool:
    """Whether a node leaves norms as they are. Why: saves work; unknown names are only slower. Since 1.10."""
    return node.name() in ISOMETRIES


def looks_up(node: Any) -> bool:
    """Whether a node went by whole numbers it was given, rows or classes. Why: it does not say so. Since 1.10."""
    if node.name().removesuffix("Backward0") not in {"Embedding", "Gather", "Index", "IndexSelect", "NllLoss", "Take"}:
        return False
    given = tree_leaves([getattr(node, f"_saved_{name}", None) for name in ("index", "indices", "target")])
    return any(isinstance(value, Tensor) and value.dtype is not torch.bool for value in given)


# --------------------------------------------------------------------------------------------- tensors and operations
def storage_of(tensor: Tensor) -> Any | None:
    """A tensor's memory; None for kinds of tensors that have none of their own (sparse, nested).

    Why: owners are its attributes. Nothing promises that views share it and that it lives as long. Since 2.1.
    """
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def schema_of(operation: Any) -> Any:
    """Name, arguments, returns and writes of an ATen operation. Why: nothing public tells. Since 1.12."""
    return operation._schema


def is_pointwise(name: str) -> bool:
    """Whether PyTorch tags an ATen operation as pointwise. Why: some 200 need no line in ``moves``. Since 2.0."""
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) or getattr(torch.ops.aten, name, None)
    return packet is not None and torch.Tag.pointwise in getattr(packet, packet.overloads()[0]).tags


convolution_backward: Callable[..., Any] = torch.ops.aten.convolution_backward.default
"""All gradients of a convolution. Why: ``torch.nn.grad`` takes one more operation for each of them. Since 1.11."""

base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""What a tensor is a view of, for autograd. Why: there is no public way to ask. Since 1.0."""

version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was written to. Why: there is no public way to ask. Since 0.4."""

tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
"""Arguments nested in any way. Why: these know the containers that users register with PyTorch. Since 2.2."""


# ----------------------------------------------------------------------------------------------- scalers and processes
def scale_of(scaler: torch.amp.GradScaler | None) -> Tensor | None:
    """The scale of losses; None without a scaler or before its first use. Why: ``get_scale`` waits. Since 2.3."""
    return getattr(scaler, "_scale", None)


def has_communication_hook(model: DistributedDataParallel) -> bool:
    """Whether a model has a communication hook. Why: a second one is a fatal error. Since 2.8."""
    return bool(model._comm_hooks)


def exchange_gradients(model: DistributedDataParallel, exchange: bool) -> None:
    """Whether the next passes sum gradients over processes. Why: ``no_sync`` is a context. Since 1.1."""
    model.require_backward_grad_sync = exchange
