"""Which of a model's inputs hold the examples, and how many there are, where no loader has said so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def count_of(tensors: Sequence[Tensor], dim: int, count: Callable[..., int] | None) -> int:
    """The number of examples that a model is called with.

    Args:
        tensors: all tensors among the model's arguments.
        dim: which of their dimensions runs over the examples.
        count: the user's own way to count.

    Raises:
        ValueError: the tensors do not tell, or do not agree.
    """
    if count is not None:
        return int(count(*tensors))
    sizes = _sizes([t for t in tensors if t.dim() > max(1, dim)], dim) or _sizes(tensors, dim)
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
            f"the model's inputs have different lengths ({found}) along dimension {dim}, where the examples are: say how "
            "many examples there are with count_examples, or which dimension is theirs with batch_dim, of GradientVariance"
        )
    return sizes.pop()


def _sizes(tensors: Sequence[Tensor], dim: int) -> set[int]:
    return {t.shape[dim] for t in tensors if t.dim() > dim}


def of_examples(tensors: Sequence[Tensor], dim: int, examples: int) -> list[Tensor]:
    """Those of the tensors that have an entry for each example.

    What might only look like it is left out, as long as something remains: positions 0, 1, 2, …, and masks with as many
    rows as columns. To leave a tensor out is always right, if slower; to take one for examples that is none is not.
    """
    holding = [t for t in tensors if t.dim() > dim and t.shape[dim] == examples]
    if any(t.dim() <= dim for t in tensors):
        holding = holding or [t for t in tensors if t.dim() and t.shape[0] == examples]
    certain = [t for t in holding if not _ambiguous(t, dim, examples)]
    return certain or holding


def _ambiguous(tensor: Tensor, dim: int, examples: int) -> bool:
    if tensor.dim() == 1 and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
        return torch.equal(tensor, torch.arange(examples, device=tensor.device, dtype=tensor.dtype))
    return tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] and not tensor.requires_grad
