"""Squared norms of tensors, in enough precision."""

from __future__ import annotations

import torch
from torch import Tensor

PART = 1 << 18
"""How many squares are held at a time."""


def wide(tensor: Tensor) -> Tensor:
    """Half precision is widened before it is squared or summed: norms are accumulated in float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def squared_norm(tensor: Tensor, weights: Tensor | None = None) -> Tensor:
    """The squared norm of a whole tensor, as the dot product that reads it once with all threads.

    Args:
        tensor: of any shape; may be sparse.
        weights: what to multiply the squares by, a tensor of that shape.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        weights = None if weights is None else weights[tuple(tensor.indices())]
        tensor = tensor.values()
    flat = wide(tensor)
    flat = flat if flat.dim() == 1 else flat.flatten()
    if weights is not None:
        parts = zip(flat.split(PART), weights.to(flat.device).flatten().split(PART), strict=True)
        return torch.stack([torch.dot((x * x.conj()).real, w.to(x.real.dtype)) for x, w in parts]).sum()
    return torch.vdot(flat, flat).real if flat.is_complex() else torch.dot(flat, flat)


def is_zero(tensor: Tensor) -> bool:
    """Whether a tensor, which may be sparse, holds nothing but zeros."""
    return not bool((tensor.coalesce().values() if tensor.is_sparse else tensor).any())
