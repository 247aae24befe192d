"""⟨G_i, Σ_i G_i⟩: the gradients of single examples along that of the batch.

Several passes or processes may make up a batch, and its gradient is whole only after the last of them. Until then the
factors of the examples measured are kept, as copies that keep nothing else alive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from cabs.variance.factors import PerExample

NOT_ALIKE = (
    "⟨g_i, g⟩ was not measured for the same examples in all layers: set measures_dots before the backward pass, and "
    "max_examples to a number, or to None for all"
)

FLOAT = torch.float32
"""What is computed with at least."""


class Dots:
    """What one backward pass leaves for it.

    Attributes:
        sums: Σ_i G_i of each parameter.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}
        self._examples: dict[int, PerExample] = {}

    def take(self, key: int, gradients: PerExample) -> None:
        """Takes G_i of a parameter."""
        self._examples[key] = copied(gradients)

    def take_sum(self, key: int, total: Tensor) -> None:
        """Takes Σ_i G_i of a parameter, which may be clipped where it is before long."""
        self.sums[key] = total.to_dense() if total.is_sparse else total.clone()

    def along(self, vectors: Mapping[int, Tensor]) -> Tensor:
        """Σ over parameters of ⟨G_i, vector⟩."""
        each = [gradients.dots(vectors[key]).to(torch.float64) for key, gradients in self._examples.items()]
        if len({dots.shape for dots in each}) != 1:
            raise RuntimeError(NOT_ALIKE)
        return torch.stack(each).sum(0)


def sums_of_squares(
    passes: Sequence[tuple[Dots, float, float]],
    weight: float,
    examples: int,
    parameters: Sequence[Tensor],
    total: Callable[[Tensor], Tensor],
) -> Tensor:
    """Σ_i (⟨g_i, g⟩ − ‖g‖²)² over the examples measured of some passes, and how many these are.

    Args:
        passes: each with w and s, where its G_i = s w g_i: the weight of an example in the gradient that is stepped
            with, and the factor of a GradScaler.
        weight: Σ_i w_i of all their examples.
        examples: how many these are, for in the gradient of all processes each counts alike.
        parameters: in the same order on all processes.
        total: adds numbers up over the processes.
    """
    if any(parameter.is_complex() for parameter in parameters):
        raise NotImplementedError("⟨g_i, g⟩ of complex parameters is not measured: use a rule such as NormTest")
    sizes = [parameter.numel() for parameter in parameters]
    sums = torch.zeros(sum(sizes) + 1, dtype=torch.float64)
    sums[-1] = examples
    for parameter, part in zip(parameters, sums[:-1].split(sizes), strict=True):
        for one, _, scale in passes:
            if id(parameter) in one.sums:
                part += one.sums[id(parameter)].flatten().to(part) * (examples / weight / scale)
    sums = total(sums)
    flat = sums[:-1] / sums[-1]
    mean = {
        id(parameter): part.reshape(parameter.shape).to(parameter.device, torch.promote_types(parameter.dtype, FLOAT))
        for parameter, part in zip(parameters, flat.split(sizes), strict=True)
    }
    along = [one.along(mean).cpu() / (w * scale) for one, w, scale in passes]
    squares = [(dots - flat @ flat).square().sum() for dots in along]
    return torch.stack([torch.stack([*squares, flat.new_zeros(())]).sum(), flat.new_tensor(sum(map(len, along)))])


def copied(gradients: PerExample) -> PerExample:
    """The same, in memory of its own."""
    other = copy.copy(gradients)
    for name, value in vars(gradients).items():
        if isinstance(value, Tensor):
            setattr(other, name, value.clone())
        elif name == "uses":
            setattr(other, name, [copied(use) for use in value])
    return other
