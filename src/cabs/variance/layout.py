"""Where an operation's tensors have the examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where in an operation's tensors the examples are: m of them along one dimension."""

    examples: int
    dim: int = 0

    def holds(self, tensor: Tensor, features: int = 0) -> bool:
        """Whether the examples have a dimension of their own, which is none of the last ``features``."""
        return tensor.dim() - features > self.dim and tensor.shape[self.dim] == self.examples

    def holds_rows(self, tensor: Tensor) -> bool:
        """Whether examples and positions are flattened into the first dimension."""
        return tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % self.examples == 0

    def first(self, tensor: Tensor, features: int = 0) -> Tensor:
        """A view with the examples in the first dimension, positions of flattened rows in the second."""
        if self.holds(tensor, features):
            return tensor.movedim(self.dim, 0)
        if not self.holds_rows(tensor):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not hold {self.examples} examples")
        if self.dim == 0:
            return tensor.unflatten(0, (self.examples, -1))
        return tensor.unflatten(0, (-1, self.examples)).movedim(1, 0)
