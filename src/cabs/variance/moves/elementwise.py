"""Operations that treat every element alike, and losses, which may add them up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cabs.variance.moves.registry import Call, joined, moves
from cabs.variance.owners import SEVERAL, SUM, collapse, join

KEEPS_SUMS = {
    "add", "sub", "rsub", "neg", "mul", "div", "clone", "_to_copy", "copy", "sum", "mean", "cat", "stack", "index",
    "index_select", "gather", "flip", "roll", "repeat", "constant_pad_nd", "where",
}  # fmt: skip
"""Linear operations: a sum over examples goes through them and still is one."""


def is_elementwise(function: Any) -> bool:
    """Whether PyTorch itself says that an operation works element by element."""
    return torch.Tag.pointwise in function.tags


@moves(
    "_to_copy", "native_dropout", "bernoulli", "tril", "triu", "_prelu_kernel", "rsub", "rrelu_with_noise", "_conj",
    "_neg_view_copy", "isin", "alpha_dropout", "feature_dropout", "_fused_dropout", "bucketize", "lift_fresh",
    "_autocast_to_reduced_precision", "_autocast_to_full_precision", "nan_to_num", "celu", "elu", "hardshrink",
    "softshrink", "threshold", "log_sigmoid_forward", "fake_quantize_per_tensor_affine", "sigmoid", "contiguous",
    "_pin_memory", "complex", "polar", "heaviside", "special_xlog1py", "binomial", "poisson", "floor_divide", "pow",
)  # fmt: skip
def elementwise(call: Call, output: Tensor) -> Tensor | None:
    return joined(call, output.dim())


@moves("mul", "div")
def product(call: Call, output: Tensor) -> Tensor | None:
    tables = call.tables()
    if not tables:
        return None
    table = join(tables, output.dim())
    if len(tables) > 1 and any(int(t.max()) == SUM for t in tables if t.numel()):
        return torch.where(table == SUM, SEVERAL, table)  # not linear in both
    return table


@moves("copy")
def copy(call: Call, output: Tensor) -> Tensor | None:
    return joined(call, output.dim(), "src")


@moves("fill", "zero", "normal", "uniform", "exponential", "random", "log_normal", "cauchy", "geometric")
def overwritten(call: Call, output: Tensor) -> Tensor | None:
    return None


@moves(
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided",
)  # fmt: skip
def shaped_like(call: Call, output: Tensor) -> Tensor | None:
    return None


@moves("bernoulli_", "searchsorted")
def by_second(call: Call, output: Tensor) -> Tensor | None:
    return joined(call, output.dim(), "self")


@moves(
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
def elementwise_loss(call: Call, output: Tensor) -> Tensor | None:
    if call.get("reduction", 1) == 0:
        return joined(call, output.dim())
    return total(joined(call, call["self"].dim()))


@moves("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "multilabel_margin_loss_forward")
def loss_of_classes(call: Call, output: Tensor) -> Tensor | None:
    scores = call["self"]
    table = collapse(call.of("self"), [1 % scores.dim()]).squeeze(1) if scores.dim() > 1 else call.of("self")
    target = call.table(call["target"])
    if target is not None and target.dim() == table.dim():
        table = torch.where(table < 0, target, table)
    if call.get("reduction", 1) == 0 and output.dim() == table.dim():
        return table
    return total(table)


def total(table: Tensor | None) -> Tensor | None:
    """The owner of a sum over everything."""
    if table is None:
        return None
    owner = collapse(table, range(table.dim()), SUM)
    return owner.reshape(())
