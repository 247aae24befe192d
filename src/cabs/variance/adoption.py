"""Parameters of which every element meets one example only, such as a class token that is put beside each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.variance.moves.indexing import beside
from cabs.variance.owners import SUM, Owners, collapse, join

OwnersOf = Callable[[Tensor], Owners | None]
Adoption = Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any], OwnersOf], Mapping[int, Tensor]]


def _side_by_side(
    leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], owners: OwnersOf
) -> Mapping[int, Tensor]:
    """What is laid beside examples belongs to those in whose places it is along the other dimensions."""
    tensors = [(n, value) for n, value in enumerate(leaves) if isinstance(value, Tensor)]
    dims = max(value.dim() for _, value in tensors)
    dim = next((value for value in leaves if isinstance(value, int)), 0) % dims
    found = [(value, owners(value)) for _, value in tensors if value.dim() == dims]
    known = [(value, owner) for value, owner in found if owner is not None]
    table = beside([owner.table for _, owner in known], [value.shape for value, _ in known], dim)
    assert table is not None
    table = collapse(table, [dim])
    return {n: table for n, _ in tensors} if int(table.max()) < SUM else {}


def _stacked(
    leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], owners: OwnersOf
) -> Mapping[int, Tensor]:
    tensors = [(n, value) for n, value in enumerate(leaves) if isinstance(value, Tensor)]
    found = [owner.table for _, value in tensors if (owner := owners(value)) is not None]
    table = join(found, tensors[0][1].dim())
    return {n: table for n, _ in tensors} if not table.numel() or int(table.max()) < SUM else {}


def _batch_by_batch(
    leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], owners: OwnersOf
) -> Mapping[int, Tensor]:
    """Matrices multiplied one by one: each belongs to the examples of those it meets."""
    tensors = [(n, value) for n, value in enumerate(leaves) if isinstance(value, Tensor) and value.dim() > 2]
    dims = max((value.dim() for _, value in tensors), default=0)
    tables = [
        collapse(owner.table, [owner.table.dim() - 2, owner.table.dim() - 1])
        for value in leaves
        if isinstance(value, Tensor) and (owner := owners(value)) is not None and owner.table.dim() > 2
    ]
    if not tables:
        return {}
    table = join(tables, dims)
    if int(table.max()) >= SUM:
        return {}
    found = {}
    for n, value in tensors:
        shape = (1,) * (dims - value.dim()) + tuple(value.shape)
        if all(shape[d] == size for d, size in enumerate(table.shape) if size > 1):
            found[n] = table.reshape(table.shape[dims - value.dim() :])
    return found


ADOPTIONS: dict[Callable[..., Any], Adoption] = {
    **dict.fromkeys([torch.cat, torch.concat, torch.concatenate], _side_by_side),
    torch.stack: _stacked,
    **dict.fromkeys(
        [torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, F.scaled_dot_product_attention],
        _batch_by_batch,
    ),
}
"""Operations in which every element of a parameter may meet the elements of one example only."""
