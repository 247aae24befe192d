"""Calls that only look at a tensor, so that nothing has to be known about whose it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from cabs.torch_internals import set_grad

LOOKS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "item", "tolist",
    "numpy", "__len__", "__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__", "__hash__",
    "is_floating_point", "is_complex", "is_nonzero", "data_ptr", "element_size", "untyped_storage", "get_device",
    "register_hook", "requires_grad_", "retain_grad", "is_same_size", "is_tensor", "register_post_accumulate_grad_hook",
    "has_names", "__reduce_ex__", "__deepcopy__", "__dlpack__", "__array__", "__contains__", "is_set_to", "_is_view",
    "detach", "view", "permute", "transpose", "expand", "unsqueeze", "squeeze", "expand_as", "view_as", "unflatten",
    "chunk", "split", "unbind", "select", "narrow", "movedim", "swapaxes", "swapdims", "unfold", "diagonal", "t",
    "broadcast_tensors", "broadcast_to", "alias", "view_as_real", "view_as_complex", "new_empty", "new_zeros",
    "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like",
    "randn_like", "__get__", "_record_function_enter_new", "_record_function_exit._RecordFunction",
}  # fmt: skip
"""Names of functions that look at a tensor, make one like it, or give a view of it, and of marks for profilers."""


NUMBERS = {"item", "tolist", "numpy", "__int__", "__float__", "__index__", "__array__"}
"""Those of them that give a tensor's numbers to Python."""


@cache
def reads_numbers(function: Callable[..., Any]) -> bool:
    """Whether a function is one of NUMBERS."""
    return getattr(function, "__name__", "") in NUMBERS


@cache
def looks_only(function: Callable[..., Any]) -> bool:
    """Whether a function is one of LOOKS, or sets ``.grad``."""
    looks = getattr(function, "__name__", "") in LOOKS and getattr(function, "__module__", "") != "torch.nn.functional"
    return looks or function == set_grad
