"""Tensors that require a gradient and lead to no parameter, since what they owe to any had no elements.

An expert that gets no tokens, or an exit that nobody takes, returns a tensor without elements. It has no owners, and
what it is added to requires a gradient from then on though nothing comes of it. Such a tensor is as good as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cabs.torch_internals import base_of, notes_of

HOLLOW = "cabs_hollow"
"""Where autograd's node of such a tensor says that it is one."""


def is_hollow_node(node: Any) -> bool:
    """Whether no gradient comes to anything through a node of autograd's graph."""
    return HOLLOW in notes_of(node)


def leads_to_parameters(tensor: Tensor) -> bool:
    """Whether a gradient of a tensor gets anywhere."""
    if not tensor.requires_grad or not tensor.numel():
        return False
    node = tensor.grad_fn
    if node is None:
        return True
    base = base_of(tensor)  # views are not seen being made
    base_node = None if base is None else base.grad_fn
    return not (is_hollow_node(node) or (base_node is not None and is_hollow_node(base_node)))


def noting_hollow(call: Callable[[], Any], tensors: Sequence[Tensor]) -> Any:
    """Makes a call to which nothing is given that leads to parameters, and notes that nothing comes of it either.

    Args:
        call: makes it.
        tensors: all that it is given, and may write to.
    """
    bases = [base for tensor in tensors if (base := base_of(tensor)) is not None]
    touched = [tensor for tensor in (*tensors, *bases) if not leads_to_parameters(tensor)]
    output = call()
    made = [output] if isinstance(output, Tensor) else output if isinstance(output, (tuple, list)) else []
    for tensor in (*made, *touched):
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            notes_of(tensor.grad_fn)[HOLLOW] = True
    return output
