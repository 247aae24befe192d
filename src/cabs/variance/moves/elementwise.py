"""Operations that treat every element alike, and losses, which may add them up."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cabs.torch_internals import is_pointwise
from cabs.variance.moves.registry import Call, joined, moves
from cabs.variance.owners import SEVERAL, SUM, collapse, join

KEEPS_SUMS = {
    "add", "sub", "rsub", "neg", "mul", "div", "clone", "_to_copy", "copy", "sum", "mean", "cat", "stack", "index",
    "index_select", "gather", "flip", "roll", "repeat", "constant_pad_nd", "where", "index_add", "scatter_add", "mm",
    "mv", "bmm", "dot", "addmm", "nansum", "index_put", "scatter",
}  # fmt: skip
"""Linear operations: a sum over examples goes through them and still is one."""


@cache
def is_elementwise(name: str) -> bool:
    """Whether PyTorch itself says of an operation that it works element by element."""
    return is_pointwise(name)


@moves(
    "_to_copy", "native_dropout", "tril", "triu", "_prelu_kernel", "rrelu_with_noise", "_conj",
    "_neg_view_copy", "isin", "alpha_dropout", "feature_dropout", "_fused_dropout", "bucketize", "lift_fresh",
    "_autocast_to_reduced_precision", "_autocast_to_full_precision", "nan_to_num", "celu", "elu", "hardshrink",
    "softshrink", "threshold", "log_sigmoid_forward", "fake_quantize_per_tensor_affine", "sigmoid", "contiguous",
    "_pin_memory", "complex", "polar", "heaviside", "hardswish", "special_xlog1py", "binomial", "poisson",
    "floor_divide", "pow",
)  # fmt: skip
def elementwise(call: Call, output: Tensor) -> Tensor | None:
    return joined(call, output.dim())


@moves("add", "sub", "rsub")
def added(call: Call, output: Tensor) -> Tensor | None:
    tables = call.tables()
    return join(tables, output.dim(), SUM) if tables else None


@moves("mul", "div")
def product(call: Call, output: Tensor) -> Tensor | None:
    tables = call.tables()
    if not tables:
        return None
    table = join(tables, output.dim())
    below = call.table(call["other"]) if call.name == "div" else None
    if below is not None and below.numel() and int(below.max()) == SUM:
        return torch.where(table == SUM, SEVERAL, table)
    if len(tables) > 1 and any(int(t.max()) == SUM for t in tables if t.numel()):
        return torch.where(table == SUM, SEVERAL, table)  # not linear in both
    return table


@moves("copy")
def copy(call: Call, output: Tensor) -> Tensor | None:
    """Numbers that are nobody's go to those in whose places they are put."""
    table = joined(call, output.dim(), "src")
    return call.table(call["self"]) if table is None else table


@moves("fill", "zero", "normal", "uniform", "exponential", "random", "log_normal", "cauchy", "geometric", "bernoulli")
def overwritten(call: Call, output: Tensor) -> Tensor | None:
    return joined(call, output.dim())


@moves(
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided",
)  # fmt: skip
def shaped_like(call: Call, output: Tensor) -> Tensor | None:
    return None


@moves("searchsorted")
def by_second(call: Call, output: Tensor) -> Tensor | None:
    return joined(call, output.dim(), "self")


@moves(
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
def elementwise_loss(call: Call, output: Tensor) -> Tensor | None:
    if call.get("reduction", 1) == 0:
        return joined(call, output.dim())
    table = joined(call, call["self"].dim())
    if table is not None and call.get("reduction", 1) == 1 and not equally_many(table):
        return torch.tensor(SEVERAL)
    return total(table)


def counts_some_only(call: Call, output: Tensor) -> bool:
    """Whether a loss leaves targets out, or weighs them: then it depends on the targets who has how large a share."""
    return call.get("weight") is not None or bool((call["target"] == call.get("ignore_index", -100)).any())


@moves("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", reads=counts_some_only)
def loss_of_classes(call: Call, output: Tensor) -> Tensor | None:
    scores = call["self"]
    table = collapse(call.of("self"), [1 % scores.dim()]).squeeze(1) if scores.dim() > 1 else call.of("self")
    named = call.table(call["target"])
    if named is not None and named.dim() == table.dim():
        table = torch.where(table < 0, named, table)
    reduction = call.get("reduction", 1)
    if reduction == 0 and output.dim() == table.dim():
        return table
    target = call["target"].detach().cpu()
    counted: Tensor = target != call.get("ignore_index", -100)
    if call.get("weight") is not None:
        counted = counted * call["weight"].detach().cpu()[target.clamp(min=0)]
    if reduction == 1 and not alike(counted, table):
        return torch.tensor(SEVERAL)  # each example's share depends on how many entries the others have
    return total(table)


def equally_many(table: Tensor) -> bool:
    """Whether every owner has as many elements as every other."""
    return alike(torch.ones(table.shape), table)  # along dimensions of length 1 all have the same


def counts_everything(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is a loss over classes that weighs all targets alike, so that only shapes matter."""
    if function not in LOSSES or len(args) > 2 or kwargs.get("weight") is not None:
        return False
    target = args[1] if len(args) == 2 else kwargs.get("target")
    if not isinstance(target, Tensor) or target.is_floating_point():
        return False
    return not bool((target == kwargs.get("ignore_index", -100)).any())


LOSSES = {F.cross_entropy, F.nll_loss}


def alike(numbers: Tensor, table: Tensor) -> bool:
    """Whether numbers add up to the same for every owner."""
    if table.numel() <= 1 or int(table.max()) >= SUM:
        return True  # nobody's, one owner's, or told apart no more
    if int(table.min()) < 0:
        return False
    ids, numbers = table.expand(numbers.shape).reshape(-1), numbers.reshape(-1)
    if bool((ids[1:] > ids[:-1]).all()):
        return bool((numbers == numbers[:1]).all())  # one number each
    sums = torch.zeros(int(ids.max()) + 1, dtype=torch.float64).index_add_(0, ids, numbers.double())
    present = torch.bincount(ids) > 0
    return bool((sums[present] == sums[present][0]).all())


def total(table: Tensor | None) -> Tensor | None:
    """The owner of a sum over everything."""
    if table is None:
        return None
    owner = collapse(table, range(table.dim()), SUM)
    return owner.reshape(())
