"""Tables whose rows are looked up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from cabs.variance.factors import OneHot, PerExample
from cabs.variance.registry import only_first, operation


def _plain(arguments: Mapping[str, Any]) -> bool:
    """Covers tables whose gradient rows are not divided by how often the whole batch looked them up."""
    return not arguments.get("scale_grad_by_freq")


def _looked_up(name: str, tensor: Tensor, arguments: Mapping[str, Any]) -> int:
    return tensor.dim() - (1 if name == "delta" else 0)


@operation(F.embedding, weight=("input",), covers=_plain, leading=_looked_up)
def embedding(
    delta: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Mapping[str, PerExample]:
    return {"weight": _rows(input, delta, weight, padding_idx)}


def _bags(arguments: Mapping[str, Any]) -> bool:
    """Covers one bag of equally many entries for each row, added up or averaged."""
    return (
        arguments["input"].dim() == 2
        and arguments.get("offsets") is None
        and arguments.get("mode", "mean") in ("sum", "mean")
        and _plain(arguments)
    )


@operation(F.embedding_bag, weight=("input", "per_sample_weights"), covers=_bags, leading=only_first)
def embedding_bag(
    delta: Tensor,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Mapping[str, PerExample]:
    # (m, bags of each, entries of a bag)
    each = delta.unsqueeze(2).expand(-1, -1, input.shape[2], -1)
    if per_sample_weights is not None:
        each = each * per_sample_weights.unsqueeze(-1)
    elif mode == "mean":
        counted = input != (-1 if padding_idx is None else padding_idx % weight.shape[0])
        each = each / counted.sum(2).clamp(min=1)[:, :, None, None]
    return {"weight": _rows(input.flatten(1), each.flatten(1, 2), weight, padding_idx)}


def _rows(index: Tensor, delta: Tensor, weight: Tensor, padding_idx: int | None) -> PerExample:
    if padding_idx is not None:
        delta = delta * (index != padding_idx % weight.shape[0]).unsqueeze(-1)
    return OneHot(index, delta, weight.shape)
