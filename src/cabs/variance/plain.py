"""What is made of parameters and plain numbers, which may be constants, or an example's that nobody marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cabs.variance.choosing import works_elementwise
from cabs.variance.hollow import leads_to_parameters
from cabs.variance.registry import OPERATIONS

DATA = "cabs_data"
"""Where autograd's node of an operation on parameters and plain numbers says that these may be an example's."""

MAKER = "_cabs_maker"
"""Where a tensor made of parameters alone keeps the call that made it."""

COMPARES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "dist", "dot", "vdot"}
"""Names of functions that put each number of a parameter beside one other number, as a distance does."""


def brings_data(function: Callable[..., Any], tensors: Sequence[Tensor]) -> bool:
    """Whether a call on parameters brings in numbers that may be an example's.

    Constants have the parameters' own shape: a mask, the values to stay near to. What looks rows up by number, makes
    more of a parameter than there is of it, or multiplies it with a matrix, is what layers and losses do with data.
    """
    own = [tensor for tensor in tensors if leads_to_parameters(tensor)]
    plain = [tensor for tensor in tensors if not leads_to_parameters(tensor)]
    if not plain or function in OPERATIONS:
        return bool(plain)
    name = getattr(function, "__name__", "")
    if name in COMPARES or works_elementwise(function):
        shapes = [_once(tensor) for tensor in own]
        into = torch.broadcast_shapes(*shapes) if name not in COMPARES else shapes[0]
        return not all(_fits(tensor.shape, into) for tensor in plain)
    if all(tensor.dtype is torch.bool for tensor in plain):
        return any(tensor.shape != own[0].shape for tensor in plain)  # a mask of some of its elements
    return any(tensor.numel() > 1 or not tensor.is_floating_point() for tensor in plain)


def _once(tensor: Tensor) -> torch.Size:
    """A tensor's shape before it was expanded."""
    return torch.Size(1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _fits(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Whether numbers of a shape can be broadcast to another that stays what it is."""
    leading = len(shape) - len(into)
    if any(n != 1 for n in shape[: max(0, leading)]):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(into), strict=False))
