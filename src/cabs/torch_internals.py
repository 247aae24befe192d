"""Every part of PyTorch that is private, undocumented or changed between releases, behind a name of its own.

Each entry says why it is needed and, after "Since", the first release that has it in this form, as far as that is
known; "2.8" stands for 2.8 or before, the oldest release that is tried (docs/versions.md). No other file of the package
uses private names of PyTorch (tests/test_versions.py).

Names of ATen's operations are data, and stay in ``variance/moves``: one that is not known there is an error, never a
wrong number.

This file imports nothing of the package but ``cabs.interrupts``.
"""

from __future__ import annotations

import functools
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
from torch.utils.data import DataLoader
from torch.utils.data._utils import collate, pin_memory

from cabs.interrupts import uninterrupted

# ------------------------------------------------------------------------------------------------- calls that are seen

BACKWARD: set[Callable[..., Any]] = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
"""What runs a backward pass. Why: that modes see these calls is nowhere promised. Since 2.8."""


def keeps_graph(backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the graph that ``Tensor.backward`` or ``autograd.backward`` goes through is there afterwards.

    Why: their signatures differ, and arguments may be given by place. Since 1.0.
    """
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


_SET_GRAD = vars(torch._C.TensorBase)["grad"].__set__


def looks_only(function: Callable[..., Any]) -> bool:
    """Whether a function looks at a tensor's kind or shape, makes one like it, or gives a view, which needs no mark.

    Setting ``.grad`` is no more than that. Why: modes see properties as ``__get__`` and ``__set__`` of a descriptor,
    and functions of C without a module. Since 1.13.
    """
    looks = getattr(function, "__name__", "") in LOOKS and getattr(function, "__module__", "") != "torch.nn.functional"
    return looks or function == _SET_GRAD


ASKS_MODES = "has_torch_function"
"""How the names of the functions begin by which PyTorch's Python code asks whether a mode is active. Since 1.7."""


def asks_modes(function: types.FunctionType) -> bool:
    """Whether a function of PyTorch is Python code that hands itself to modes, around others that do too.

    Why: the others are what is to be measured. Since 1.7.
    """
    return any(name.startswith(ASKS_MODES) for name in function.__code__.co_names)


def opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, entered as if no mode were active, so that the mode sees what it calls in turn.

    Why: a mode that calls a function on is not asked about what happens within. Since 1.7.
    """
    assert isinstance(function, types.FunctionType)
    unseen = {name: lambda *_: False for name in function.__globals__ if name.startswith(ASKS_MODES)}
    scope = {**function.__globals__, **unseen}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


unseen = torch._C.DisableTorchFunction
"""A context in which no mode sees what is called.

Why: the public ``DisableTorchFunctionSubclass`` leaves modes active. Since 2.0.
"""


def end_unseen() -> None:
    """Lets modes see again, if Ctrl-C came just when an ``unseen`` was about to end, which Python then never ends.

    Why: nothing public sets this state; to leave a block that was never entered does. Since 2.8.
    """
    if torch._C._is_torch_function_all_disabled():
        unseen().__exit__(None, None, None)


# --------------------------------------------------------------------------------------------------- stacks of modes


def enter(mode: TorchFunctionMode) -> None:
    """Makes a mode active in this thread until ``leave``, as ``torch.set_default_device`` does with its own.

    It goes to the bottom of the stack: whoever ends a mode takes the topmost for it. Why: the public way, ``with``,
    ends where it began, but a measurement begins in a hook and ends with the step. Since 2.0.
    """
    stack = overrides._get_current_function_mode_stack()
    if [number for number, one in enumerate(stack) if one is mode] != [0]:
        _restack(stack, [mode, *(one for one in stack if one is not mode)])


def leave(mode: TorchFunctionMode) -> None:
    """Ends a mode wherever on the stack of modes it is, and how often; an interrupt may leave it there twice.

    Why: as for ``enter``. Since 2.0.
    """
    stack = overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
    if any(one is mode for one in stack):
        _restack(stack, [one for one in stack if one is not mode])


def _restack(before: list[TorchFunctionMode], after: list[TorchFunctionMode]) -> None:
    with uninterrupted():
        for _ in before:
            overrides._pop_mode()
        for mode in after:
            overrides._push_mode(mode)


TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Why: sees operations below autograd; documented, though only under a private name. Since 2.0."""


def leave_dispatch(mode: TorchDispatchMode) -> None:
    """Ends a mode that sees operations, which is active within a call only, unless that was interrupted.

    Why: as for ``leave``. Since 2.2: modes of PyTorch's own have a key by which they are taken off.
    """
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
    """The innermost call of a module that is being made.

    Why: a call that was interrupted never tells that it has ended. Since 2.0.
    """
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


def forward_hooks_of(module: nn.Module) -> Iterable[Any]:
    """The forward hooks of a module. Why: there is no public way to see them. Since 1.0."""
    return module._forward_hooks.values()


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, to be exchanged in place.

    Why: by ``setattr`` a buffer cannot be exchanged where a module guards its attributes. Since 1.0.
    """
    return module._buffers


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is ``torch.compile``'s, or was compiled in place. Why: nothing public tells. Since 2.2."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@functools.cache
def keep_out_of_compiled_code(*functions: Callable[..., Any]) -> None:
    """Lets compiled models run functions, and whatever of this package they call, as ordinary Python.

    Why: ``torch.compiler.disable`` wraps every call, at a cost that is felt where calls are many. Since 2.8. To be
    called on first use, since it takes a second to import.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.decorators import skip

    trace_rules.add(__package__)
    for function in functions:
        skip(function)


Dropout = _DropoutNd
"""What all kinds of dropout derive from. Why: the public classes would have to be listed. Since 1.0."""

# ----------------------------------------------------------------------------------------------------------- autograd

NO_BACKWARD = -1


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""A number that is the same throughout one call of backward, and NO_BACKWARD outside of any.

Why: gradients that come from one backward pass belong together. Since 2.0.
"""


def at_the_end_of_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward pass that runs now has ended, unless it fails or is interrupted.

    Why: hooks of tensors come before the end; DDP and fully_shard do it this way too. Since 1.0.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


class OwnDerivatives:
    """Whether derivatives are being taken by this package itself, which hooks on parameters are called for too."""

    depth = 0

    def __enter__(self) -> None:
        OwnDerivatives.depth += 1

    def __exit__(self, *exception: object) -> None:
        OwnDerivatives.depth -= 1


def saved_tensors_are_packed() -> bool:
    """Whether what autograd keeps is packed away (checkpointing, offloading), so that only autograd may keep it.

    Why: ``saved_tensors_hooks`` can be entered but not asked for. Since 2.7 or 2.8; 2.6 has no such getter.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def only_reverse_mode() -> bool:
    """Whether neither functorch's transforms nor forward-mode derivatives are active.

    Why: our own derivatives of an operation know reverse mode alone. Since 2.8.
    """
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def notes_of(node: Any) -> dict[str, Any]:
    """A dictionary that a node of autograd's graph keeps for anybody.

    Why: declared as a method, and a property in fact. Since 2.1, where ``torch.autograd.graph.Node`` became public.
    """
    notes: dict[str, Any] = node.metadata
    return notes


def leaf_of(node: Any) -> Tensor | None:
    """The leaf tensor whose gradient a node adds up, None if it does something else.

    Why: the way back from the graph to parameters; ``AccumulateGrad`` is not documented. Since 1.0.
    """
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


ISOMETRIES = {
    "AliasBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "UnsqueezeBackward0",
    "UnsafeViewBackward0", "ViewBackward0",
}  # fmt: skip
"""Autograd's names for operations that only move numbers around."""


def is_isometry(node: Any) -> bool:
    """Whether norms pass through a node unchanged.

    Why: a quick way where it is so; a name that is not known here takes the long way to the same number. Since 1.10.
    """
    return node.name() in ISOMETRIES


# --------------------------------------------------------------------------------------------- tensors and operations


def storage_of(tensor: Tensor) -> Any | None:
    """A tensor's memory; None for kinds of tensors that have none of their own (sparse, nested).

    Why: owners are attributes of it. That all tensors in the same memory give the same object, and that it lives as
    long as the memory does, is nowhere promised. Since 2.1.
    """
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def base_of(tensor: Tensor) -> Tensor | None:
    """What a tensor is a view of, for autograd. Why: there is no public way to ask. Since 1.0."""
    return tensor._base


def schema_of(operation: Any) -> Any:
    """Names of an operation of ATen, its arguments and returns, and what it writes to.

    Why: what modes below autograd see are such operations, and nothing public describes them. Since 1.12.
    """
    return operation._schema


def is_pointwise(name: str) -> bool:
    """Whether PyTorch says of an operation of ATen that it works element by element. Since 2.0, for ever more of them.

    Why: some two hundred operations need no line in ``variance/moves`` then.
    """
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) or getattr(torch.ops.aten, name, None)
    return packet is not None and torch.Tag.pointwise in getattr(packet, packet.overloads()[0]).tags


convolution_backward: Callable[..., Any] = torch.ops.aten.convolution_backward
"""(delta, input, weight, size of the bias, stride, padding, dilation, transposed, output padding, groups, which).

Why: ``torch.nn.grad`` takes one operation more for each of the gradients. Since 1.11.
"""

tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
"""Arguments nested in any way. Why: the containers that users register with PyTorch are known there. Since 2.2."""

# ------------------------------------------------------------------------------------------------------- data loaders


def default_collate_is_as_it_came() -> bool:
    """Whether nobody taught ``default_collate`` other types, or padding, through its map. Since 2.0.

    Why: the map's documentation names it by this private place.
    """
    return all(function.__module__ == collate.__name__ for function in collate.default_collate_fn_map.values())


def end_workers(loader: DataLoader[Any], iterator: Any) -> None:
    """Ends the processes of a loader's iterator. Why: publicly they end with the garbage. Since 1.7."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None


pin: Callable[[Any], Any] = pin_memory.pin_memory
"""Pins all tensors of a batch. Why: publicly only tensors can be pinned, one by one. Since 1.2."""


def can_pin() -> bool:
    """Whether there is an accelerator that memory can be pinned for. Since 2.6, where ``torch.accelerator`` came."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type != "mps"


# ----------------------------------------------------------------------------------------------- scalers and processes


def scale_of(scaler: torch.amp.GradScaler | None) -> Tensor | None:
    """What losses are multiplied by at the moment; None without a scaler, or before it has scaled anything.

    Why: ``get_scale`` waits for the device. Since 2.3, where the class came to ``torch.amp``.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return scale


def has_communication_hook(model: DistributedDataParallel) -> bool:
    """Whether a model has a hook for its gradients. Why: it takes one, and a second is a fatal error. Since 2.8."""
    return bool(model._comm_hooks)


def exchange_gradients(model: DistributedDataParallel, exchange: bool) -> None:
    """Says whether the next passes add gradients up over processes.

    Why: ``no_sync`` is a context, and the passes are in the user's loop. Since 1.1.
    """
    model.require_backward_grad_sync = exchange
