"""Parameters added to, multiplied with, or otherwise broadcast over the examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cabs.variance.factors import PerExample, Positions
from cabs.variance.interception import is_parameter
from cabs.variance.layout import Layout
from cabs.variance.registry import ELEMENTWISE, operation

ELEMENTWISE.update({
    torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply,
    torch.div, Tensor.div, Tensor.__truediv__, Tensor.__rtruediv__, torch.divide, Tensor.divide,
    torch.true_divide, Tensor.true_divide,
    torch.pow, Tensor.pow, Tensor.__pow__, Tensor.__rpow__, torch.where, Tensor.where,
    torch.maximum, Tensor.maximum, torch.minimum, Tensor.minimum, torch.lerp, Tensor.lerp,
    torch.addcmul, Tensor.addcmul, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__,
    torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__, torch.rsub,
    torch.clamp, Tensor.clamp, torch.atan2, torch.hypot,
})  # fmt: skip


def broadcast_over(delta: Tensor, shape: torch.Size) -> PerExample:
    """The gradients of a parameter that was broadcast to the shape of delta."""
    aligned = (1,) * (delta.dim() - len(shape)) + tuple(shape)
    over = [d for d in range(1, delta.dim()) if aligned[d] == 1]
    return Positions(delta, over, shape)


def _leads(arguments: Mapping[str, Any], layout: Layout) -> bool:
    """Covers sums in which examples lead and parameters are broadcast over them."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    most = max(value.dim() for value in tensors)
    return layout.dim == 0 and all(
        value.dim() < most or value.shape[0] == 1 for value in tensors if is_parameter(value)
    )


def _shape(value: Tensor | float) -> torch.Size:
    return value.shape if isinstance(value, Tensor) else torch.Size()


@operation(
    torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__,
    covers=_leads, input=(), other=(),
)  # fmt: skip
def add(delta: Tensor, input: Tensor | float, other: Tensor | float, *, alpha: float = 1) -> Mapping[str, PerExample]:
    # Autograd keeps neither summand, so neither may this.
    scaled = delta if alpha == 1 else alpha * delta
    return {"input": broadcast_over(delta, _shape(input)), "other": broadcast_over(scaled, _shape(other))}


@operation(torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__, covers=_leads, input=(), other=())
def subtract(
    delta: Tensor, input: Tensor | float, other: Tensor | float, *, alpha: float = 1
) -> Mapping[str, PerExample]:
    return add(delta, input, other, alpha=-alpha)
