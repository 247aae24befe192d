"""Products that sum over a dimension: each output depends on a row of one factor and a column of the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cabs.variance.moves.putting import put
from cabs.variance.moves.reductions import whole_last
from cabs.variance.moves.registry import Call, Move, always, moves, nobodys
from cabs.variance.owners import NOBODY, SEVERAL, SUM, UNKNOWN, aligned, collapse, compact, full, join


def contraction(*factors: tuple[str, str], output: str) -> Move:
    """How ownership moves through a product written with letters, like an einsum.

    Args:
        factors: names of arguments, each with a letter for every dimension; a letter that the output does not have is
            summed over.
        output: the letters of the output.
    """

    def move(call: Call, out: Tensor) -> Tensor | None:
        tables = []
        known = [name for name, _ in factors if call.table(call.get(name)) is not None]
        for name, letters in factors:
            table = call.table(call.get(name))
            if table is None:
                continue
            if len(letters) > table.dim():  # broadcast, as the first argument of addmm is
                letters = letters[len(letters) - table.dim() :]
            tables.append(_to_letters(table, letters, output, SUM if len(known) == 1 else SEVERAL))
        if not tables:
            return None
        table = join(tables, len(output))
        sums = [t for t in tables if t.numel() and int(t.max()) == SUM]
        multiplied = [name for name in known if name != "self" or len(factors) == 2]  # of three, the first is added
        if sums and len(multiplied) > 1:
            return torch.where(table == SUM, SEVERAL, table)  # a product of two sums is none
        return table

    return move


def _to_letters(table: Tensor, letters: str, output: str, otherwise: int) -> Tensor:
    gone = [d for d, letter in enumerate(letters) if letter not in output]
    table = collapse(table, gone, otherwise)
    kept = [letter for letter in letters if letter in output]
    table = table.reshape([n for d, n in enumerate(table.shape) if d not in gone])
    order = sorted(range(len(kept)), key=lambda d: output.index(kept[d]))
    table = table.permute(order)
    sizes = iter(table.shape)
    return table.reshape([next(sizes) if letter in kept else 1 for letter in output])


moves("mm", "_sparse_mm", "_int_mm")(contraction(("self", "nk"), ("mat2", "kp"), output="np"))
moves("bmm")(contraction(("self", "bnk"), ("mat2", "bkp"), output="bnp"))
moves("addmm", "_addmm_activation")(
    contraction(("self", "np"), ("mat1", "nk"), ("mat2", "kp"), output="np"),
)
moves("baddbmm")(contraction(("self", "bnp"), ("batch1", "bnk"), ("batch2", "bkp"), output="bnp"))
moves("addbmm")(contraction(("self", "np"), ("batch1", "bnk"), ("batch2", "bkp"), output="np"))
moves("mv")(contraction(("self", "nk"), ("vec", "k"), output="n"))
moves("addmv")(contraction(("self", "n"), ("mat", "nk"), ("vec", "k"), output="n"))
moves("dot")(contraction(("self", "k"), ("tensor", "k"), output=""))
moves("vdot")(contraction(("self", "k"), ("other", "k"), output=""))
moves("addr")(contraction(("self", "np"), ("vec1", "n"), ("vec2", "p"), output="np"))
moves("ger", "outer")(contraction(("self", "n"), ("vec2", "p"), output="np"))


@moves("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution")
def convolution(call: Call, output: Tensor) -> Tensor | None:
    """An output's channel depends on the channels of its group, at all positions."""
    tables = []
    groups = int(call.get("groups", 1))
    table = call.table(call["input"])
    if table is not None:
        table = collapse(table, range(2, table.dim()))
        tables.append(_by_group(table, 1, call["input"].shape[1], groups, output.shape[1]))
    for name in ("weight", "bias"):
        table = call.table(call.get(name))
        if table is None:
            continue
        if name == "weight":
            table = _by_output(table, call, groups)
        tables.append(table.reshape(1, -1, *(1,) * (output.dim() - 2)))
    return join(tables, output.dim()) if tables else None


def _by_output(table: Tensor, call: Call, groups: int) -> Tensor:
    """Whose the weights of each output channel are; transposed, a group has its inputs first, then its outputs."""
    table = collapse(table, range(2, table.dim())).flatten(1)
    if not call.get("transposed"):
        return collapse(table, [1])
    if table.numel() == 1:
        return table
    return compact(collapse(full(table, call["weight"].shape[:2]).unflatten(0, (groups, -1)), [1]).flatten())


def _by_group(table: Tensor, dim: int, size: int, groups: int, outputs: int) -> Tensor:
    if table.shape[dim] == 1 or groups == 1:
        return collapse(table, [dim])
    grouped = collapse(table.unflatten(dim, (groups, size // groups)), [dim + 1]).squeeze(dim + 1)
    return grouped.repeat_interleave(outputs // groups, dim)


@moves("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped(call: Call, output: Tensor) -> Tensor | None:
    """Rows times one of several matrices, chosen by where a row stands."""
    rows, matrices, *_ = call.values.values()
    if rows.dim() != 2 or matrices.dim() != 3:
        return torch.full((1,) * output.dim(), UNKNOWN)
    own = call.table(rows)
    table = nobodys(2) if own is None else collapse(own, [1])
    other = call.table(matrices)
    return table if other is None else join([table, collapse(other, range(3)).reshape(1, 1)], 2)


@moves("_cdist_forward", "_euclidean_dist")
def distances(call: Call, output: Tensor) -> Tensor | None:
    """Every row of one against every row of the other."""
    one, other = (collapse(call.of(name), [call[name].dim() - 1]) for name in ("x1", "x2"))
    return join([one, other.mT], output.dim())


def _solved(matrices: str, sides: str, vectors: bool = False) -> Move:
    """Solutions of linear equations: column by column of the right side, or row by row from the left.

    Args:
        matrices: the argument with the equations.
        sides: the argument with the right sides.
        vectors: whether one vector for each matrix will do.
    """

    def move(call: Call, output: Tensor) -> Tensor | None:
        matrix, side = call.of(matrices), call.of(sides)
        if not output.is_floating_point() and not output.is_complex():
            return whole_last([matrix], 2, output.dim())  # pivots and errors
        matrix = collapse(matrix, [matrix.dim() - 2, matrix.dim() - 1])
        if vectors and call[sides].shape == call[matrices].shape[:-1]:
            matrix, along = matrix.squeeze(-1), side.dim() - 1
        else:
            along = side.dim() - (2 if call.get("left", True) else 1)
        return join([matrix, collapse(side, [along])], output.dim())

    return move


moves("linalg_solve_triangular")(_solved("self", "B"))
moves("_linalg_solve_ex")(_solved("A", "B", vectors=True))
moves("linalg_lu_solve")(_solved("LU", "B"))
moves("cholesky_solve")(_solved("input2", "self"))


@moves("_trilinear")
def trilinear(call: Call, output: Tensor) -> Tensor | None:
    tables: list[Tensor] = []
    dims = 0
    for number in ("1", "2", "3"):
        added: Sequence[int] = call[f"expand{number}"]
        dims = call[f"i{number}"].dim() + len(added)
        table = call.table(call[f"i{number}"])
        if table is not None:
            for d in sorted(added):
                table = table.unsqueeze(d)
            tables.append(table)
    if not tables:
        return None
    summed = list(call["sumdim"])
    table = collapse(join(tables, dims), summed)
    return table.reshape([n for d, n in enumerate(table.shape) if d not in summed])


@moves("embedding")
def embedding(call: Call, output: Tensor) -> Tensor | None:
    tables = [call.of("indices").unsqueeze(-1)] if call.table(call["indices"]) is not None else []
    weight = call.table(call["weight"])
    if weight is not None:
        tables.append(aligned(collapse(weight, range(weight.dim())), output.dim()))
    return join(tables, output.dim()) if tables else None


@moves("_embedding_bag", "_embedding_bag_forward_only", reads=always)
def embedding_bag(call: Call, output: Tensor) -> Tensor | None:
    """A bag belongs to the owner of its entries, or to whoever says where it begins."""
    if output.dim() != 2:
        return None
    table = call.table(call["indices"])
    if table is None:
        bags = call.table(call["offsets"])
        return None if bags is None else bags[: output.shape[0]].unsqueeze(1)
    entries = full(table, call["indices"].shape)
    numbers = torch.bucketize(torch.arange(len(entries)), call["offsets"].cpu(), right=True) - 1
    return put(torch.full((output.shape[0],), NOBODY), 0, numbers, entries, adds=True).unsqueeze(1)
