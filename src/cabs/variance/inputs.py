"""Which of a model's inputs hold the examples, and how many there are, where no loader has said so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 8
"""How deep objects are searched for tensors."""


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    found: list[Tensor] = []
    pending = [value]
    for item in pending:  # which grows on the way
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
    return found


def tensors_within(value: Any) -> list[Tensor]:
    """All tensors in a batch or in a model's arguments, in containers and objects of any kind."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                found.append(value)
            return
        if (
            depth == 0
            or value is None
            or isinstance(value, (str, bytes, int, float, type, nn.Module))
            or callable(value)
        ):
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Mapping):
            items = list(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            items = list(value)
        elif dataclasses.is_dataclass(value):
            items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            items = list(getattr(value, "__dict__", {}).values())
        for item in items:
            look(item, depth - 1)

    look(value, DEPTH)
    return found


class ExamplesOf:
    """Finds the examples among a model's inputs.

    Args:
        dim: which dimension of the inputs runs over the examples.
        count: the user's own way to count them, given all tensors.
        owners: the user's own way to say whose each row is, given all tensors.
    """

    def __init__(self, dim: int, count: Callable[..., int] | None, owners: Callable[..., Tensor] | None) -> None:
        self.dim = dim
        self._count, self._owners = count, owners

    def owners(self, value: Any, tensors: Sequence[Tensor]) -> tuple[int, Tensor] | None:
        """How many examples there are and whose each row is, if the inputs say so or the user does."""
        if self._owners is not None:
            ids = self._owners(*tensors).cpu().long()
            return (int(ids.max()) + 1 if self._count is None else int(self._count(*tensors))), ids
        found = owners_in(value)
        if found is None and self._count is not None:
            examples = int(self._count(*tensors))
            among = None if of_examples(tensors, self.dim, examples) else owners_among(tensors, examples)
            found = None if among is None else (examples, among)
        return None if found is None else (found[0], found[1].cpu().long())

    def count(self, tensors: Sequence[Tensor], among: Sequence[Tensor] | None = None) -> int:
        """The number of examples that a model is called with.

        Args:
            tensors: all that it is called with.
            among: those that may hold examples, if these are not all.

        Raises:
            ValueError: the tensors do not tell, or do not agree.
        """
        if self._count is not None:
            return int(self._count(*tensors))
        among = tensors if among is None else among
        sizes = self._sizes([t for t in among if t.dim() > max(1, self.dim)]) or self._sizes(among)
        if len(sizes) > 1:
            sizes.discard(1)
        if not sizes or sizes == {0}:
            raise ValueError(
                "the model was called with no examples, or with inputs that do not tell how many: pass "
                "count_examples to GradientVariance"
            )
        if len(sizes) > 1:
            found = ", ".join(map(str, sorted(sizes)))
            raise ValueError(
                f"the model's inputs have different lengths ({found}) along dimension {self.dim}, where the examples "
                "are: say how many there are with count_examples, which dimension is theirs with batch_dim, or whose "
                "each row is with owners, of GradientVariance"
            )
        return sizes.pop()

    def _sizes(self, tensors: Sequence[Tensor]) -> set[int]:
        return {t.shape[self.dim] for t in tensors if t.dim() > self.dim}


def of_examples(tensors: Sequence[Tensor], dim: int, examples: int) -> list[Tensor]:
    """Those of the tensors that have an entry for each example.

    What might only look like it is left out, as long as something remains: positions 0, 1, 2, …, and masks with as many
    rows as columns. To leave a tensor out is always right, if slower; to take one for examples that is none is not.
    """
    holding = [t for t in tensors if t.dim() > dim and t.shape[dim] == examples]
    if not holding:
        holding = [t for t in tensors if t.dim() and t.shape[0] == examples]
    certain = [t for t in holding if not _counts_up(t)]
    if any(t.dim() > 1 and not _is_square(t) for t in certain):
        certain = [t for t in certain if not _is_square(t)]
    return certain or holding


def _counts_up(tensor: Tensor) -> bool:
    whole = not tensor.is_floating_point() and tensor.dtype is not torch.bool and tensor.dim() == 1
    return whole and torch.equal(tensor, torch.arange(len(tensor), device=tensor.device, dtype=tensor.dtype))


def _is_square(tensor: Tensor) -> bool:
    masks = tensor.is_floating_point() or tensor.dtype is torch.bool
    return masks and tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] and not tensor.requires_grad


def owners_in(value: Any) -> tuple[int, Tensor] | None:
    """What a batch of graphs says of itself: how many there are, and whose each node is."""
    for item in value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]:
        if isinstance(item, (list, tuple, dict)):
            found = owners_in(item)
            if found is not None:
                return found
        count, owners = getattr(item, "num_graphs", None), getattr(item, "batch", None)
        if isinstance(count, int) and isinstance(owners, Tensor) and owners.dim() == 1:
            return count, owners
    return None


def owners_among(tensors: Sequence[Tensor], examples: int) -> Tensor | None:
    """The one tensor that says, for the rows of others, which of m examples each is: 0, 0, 1, 2, 2, 2, …"""
    lengths = {t.shape[0] for t in tensors if t.dim() > 1}
    found = [t for t in tensors if t.dim() == 1 and len(t) > examples and len(t) in lengths and _numbers(t, examples)]
    return found[0] if len(found) == 1 else None


def _numbers(tensor: Tensor, examples: int) -> bool:
    if tensor.is_floating_point() or tensor.dtype is torch.bool:
        return False
    steps = tensor.diff()
    inside = int(tensor[0]) == 0 and int(tensor[-1]) == examples - 1
    return inside and bool(((steps == 0) | (steps == 1)).all())
