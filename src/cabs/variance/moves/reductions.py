"""Operations along dimensions: sums, extremes, softmax, sorting, norms, pools, and others that take some whole."""

from __future__ import annotations

import torch
from torch import Tensor

from cabs.variance.moves.elementwise import alike, equally_many
from cabs.variance.moves.registry import Call, Move, dims_of, joined, moves, nobodys
from cabs.variance.owners import SEVERAL, SUM, UNKNOWN, aligned, collapse, join


def _reduced(call: Call, output: Tensor, otherwise: int) -> Tensor:
    table = call.of("self")
    dims = dims_of(call.get("dim"), table.dim())
    table = collapse(table, dims, otherwise)
    if output.dim() != table.dim():
        table = table.reshape([n for d, n in enumerate(table.shape) if d not in dims])
    return table


def _equally_many(call: Call) -> bool:
    """Whether everyone has as many of the elements that a mean is of as everyone else."""
    table = call.of("self")
    dims = dims_of(call.get("dim"), table.dim())
    kept = [d for d in range(table.dim()) if d not in dims]
    if all(table.shape[d] == 1 for d in kept):
        return equally_many(table)
    rows = table.permute(*kept, *dims).flatten(0, len(kept) - 1)
    return all(map(equally_many, rows.unique(dim=0)))


@moves("sum", "mean", "nansum", reads=lambda call, output: output.dim() == 0 and not call["self"].requires_grad)
def summed(call: Call, output: Tensor) -> Tensor | None:
    table, numbers = _reduced(call, output, SUM), call["self"]
    if call.name == "mean" and not _equally_many(call):
        return torch.where(table == SUM, SEVERAL, table)  # one example has more entries than another
    if output.dim() == 0 and not numbers.requires_grad and table.numel() and int(table) == SUM:
        own = call.of("self")
        if alike(numbers.detach().cpu(), own):
            return None  # as many for one example as for the other: a plain number
    return table


@moves(
    "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod", "var", "std", "var_mean", "std_mean",
    "norm", "linalg_vector_norm", "logsumexp", "median", "nanmedian", "mode", "kthvalue", "aminmax", "count_nonzero",
)  # fmt: skip
def reduced(call: Call, output: Tensor) -> Tensor | None:
    if isinstance(call.get("other"), Tensor):
        return joined(call, output.dim())  # max(x, y)
    return _reduced(call, output, SEVERAL)


@moves(
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin", "_cummax_helper", "sort",
    "argsort", "topk", "logcumsumexp", "glu", "_fft_r2c", "_fft_c2c", "_fft_c2r", "linalg_cross",
    "quantile",
)  # fmt: skip
def along(call: Call, output: Tensor) -> Tensor | None:
    table = joined(call, max(table.dim() for table in call.tables()))
    assert table is not None
    dims = dims_of(call.get("dim", -1), table.dim())
    return collapse(table, dims)


def _last(count: int) -> Move:
    """Operations that take the last dimensions of their arguments whole, one batch of them like the other."""

    def move(call: Call, output: Tensor) -> Tensor | None:
        return whole_last(call.tables(), count, output.dim())

    return move


def whole_last(tables: list[Tensor], count: int, dims: int) -> Tensor | None:
    if not tables:
        return None
    if len(tables) == 1 and tables[0].dim() == dims and all(n == 1 for n in tables[0].shape[max(0, dims - count) :]):
        return tables[0]  # the same places, pooled
    leading = [collapse(t, range(max(0, t.dim() - count), t.dim())) for t in tables]
    leading = [t.reshape(t.shape[: max(0, t.dim() - count)]) for t in leading]
    most = max(t.dim() for t in leading)
    table = join(leading, most)
    # What is left behind the batch may have fewer dimensions, or more.
    if dims >= most:
        return table.reshape([*table.shape, *(1,) * (dims - most)])
    return collapse(table, range(table.dim())).reshape((1,) * dims)


BY_LAST_DIMENSIONS = {
    1: (
        "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "_adaptive_avg_pool1d", "adaptive_max_pool1d",
        "upsample_nearest1d", "upsample_linear1d", "_upsample_nearest_exact1d", "reflection_pad1d",
        "replication_pad1d", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_fused_rms_norm_last",
    ),
    2: (
        "max_pool2d_with_indices", "max_pool2d", "mkldnn_max_pool2d", "avg_pool2d", "_adaptive_avg_pool2d",
        "adaptive_avg_pool2d", "adaptive_max_pool2d", "fractional_max_pool2d", "max_unpool2d", "upsample_nearest2d",
        "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa", "reflection_pad2d", "replication_pad2d", "_pdist_forward",
        "col2im", "affine_grid_generator",
        "linalg_inv_ex", "inverse", "cholesky", "linalg_cholesky_ex", "linalg_qr", "linalg_svd", "_linalg_svd",
        "linalg_eigh", "_linalg_eigh", "linalg_eig", "triangular_solve",
        "_linalg_det", "_linalg_slogdet", "linalg_lu_factor_ex", "linalg_matrix_exp", "linalg_householder_product",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps",
    ),
    3: (
        "im2col", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle",
        "grid_sampler_2d", "cudnn_grid_sampler", "max_pool3d_with_indices", "avg_pool3d",
        "_adaptive_avg_pool3d", "adaptive_max_pool3d", "upsample_nearest3d", "upsample_trilinear3d",
        "_upsample_nearest_exact3d", "reflection_pad3d", "replication_pad3d",
    ),
    4: ("grid_sampler_3d",),
}  # fmt: skip

for _count, _names in BY_LAST_DIMENSIONS.items():
    moves(*_names)(_last(_count))


@moves("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def layer_norm(call: Call, output: Tensor) -> Tensor | None:
    name = "input" if "input" in call.values else "self"
    return whole_last(call.tables(name, "weight", "bias"), len(call["normalized_shape"]), output.dim())


@moves("native_group_norm", "group_norm")
def group_norm(call: Call, output: Tensor) -> Tensor | None:
    if call.tables("weight", "bias"):
        return torch.full((1,) * output.dim(), UNKNOWN)
    return whole_last(call.tables("input"), call["input"].dim() - 1, output.dim())


@moves(
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
    "_native_batch_norm_legit_no_training", "miopen_batch_norm", "_batch_norm_with_update", "batch_norm",
    "_batch_norm_with_update_functional", "_batch_norm_no_update", "native_batch_norm_backward",
)  # fmt: skip
def batch_norm(call: Call, output: Tensor) -> Tensor | None:
    """Position by position; that examples share statistics in training mode is told to the user elsewhere."""
    if call.tables("weight", "bias"):
        return torch.full((1,) * output.dim(), UNKNOWN)
    table = call.of("input")
    return table if output.dim() == table.dim() else None


def batch_norm_mixes(table: Tensor | None) -> bool:
    """Whether statistics over all but the second dimension are those of several owners."""
    return table is not None and any(n > 1 for d, n in enumerate(table.shape) if d != 1)


@moves("renorm")
def renorm(call: Call, output: Tensor) -> Tensor | None:
    table = call.of("self")
    return collapse(table, [d for d in range(table.dim()) if d != call["dim"] % table.dim()])


@moves("_ctc_loss", "_cudnn_ctc_loss")
def ctc_loss(call: Call, output: Tensor) -> Tensor | None:
    table = call.of("log_probs")  # (t, m, classes)
    if table.dim() < 3:
        return collapse(table, range(table.dim())).reshape((1,) * output.dim())
    by_example = collapse(table, [0, 2]).reshape(-1)
    return by_example if output.dim() == 1 else aligned(by_example.reshape(-1, 1, 1), output.dim())


@moves("histc", "bincount", "unique_dim", "_unique2", "unique_consecutive")
def counted(call: Call, output: Tensor) -> Tensor | None:
    table = joined(call, max(t.dim() for t in call.tables()))
    assert table is not None
    return collapse(table, range(table.dim())).reshape((1,) * output.dim())


@moves("unfold_backward")
def overlapping(call: Call, output: Tensor) -> Tensor | None:
    """Windows laid over one another and added up: as in istft."""
    table = call.of("grad_in")
    return collapse(table, [call["dim"] % output.dim(), table.dim() - 1]).squeeze(-1)


@moves("equal", "_local_scalar_dense", "is_nonzero", "_nested_tensor_size", "_assert_async")
def plain_value(call: Call, output: Tensor) -> Tensor | None:
    return nobodys(output.dim())


@moves("mkldnn_rnn_layer", "_cudnn_rnn")
def recurrent(call: Call, output: Tensor) -> Tensor | None:
    """Time along the first dimension, the batch along the second."""
    tables = [collapse(t, [d for d in range(t.dim()) if d != t.dim() - 2]) for t in call.tables() if t.dim() > 1]
    return join(tables, output.dim()) if tables and output.dim() == 3 else None
