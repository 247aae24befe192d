"""Layers on random shapes and options, against the loop; and the ``paper`` estimator against its definition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cabs import GradientVariance
from cabs.variance import factors, operations
from cabs.variance.factors import OneHot, Outer, PerExample, Positions, Sum
from cabs.variance.operations.convolution import Correlation, geometry_of
from cases import CASES, Case, losses, randomized
from compare import assert_equal, by_loop, measure

few = settings(max_examples=40, deadline=None)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[type, dict[str, Any], tuple[int, ...]]:
    spatial = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    sizes = st.tuples(*[st.integers(1, 3)] * spatial)
    options: dict[str, Any] = {
        "in_channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": draw(sizes),
        "dilation": draw(st.integers(1, 2)),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    if draw(st.booleans()):
        options["padding"] = draw(st.sampled_from(["same", "valid"]))
    else:
        options["stride"] = draw(sizes)
        options["padding"] = draw(st.integers(0, 2))
    if draw(st.booleans()):
        options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    side = [2 * (k - 1) + 1 + draw(st.integers(2, 4)) for k in options["kernel_size"]]
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1]
    return kind, options, tuple(side)


@few
@given(convolutions(), st.sampled_from([1, 10**9]))
def test_every_way_to_the_norms_of_a_convolution(
    drawn: tuple[type, dict[str, Any], tuple[int, ...]], cache: int
) -> None:
    kind, options, side = drawn
    spatial = len(side)
    stride = options.get("stride", (1,) * spatial)
    layer = kind(**{**options, "padding_mode": "zeros"})
    geometry = geometry_of(layer.weight, stride, options["padding"], options["dilation"], options["groups"])
    x = torch.randn(3, options["in_channels"], *side, dtype=torch.float64)
    reach = [n + sum(pad) - d * (k - 1) - 1 for n, pad, d, k in zip(
        side, geometry.padding, geometry.dilation, geometry.kernel, strict=True)]  # fmt: skip
    out = [n // s + 1 for n, s in zip(reach, geometry.stride, strict=True)]
    delta = torch.randn(3, options["out_channels"], *out, dtype=torch.float64)
    form = Correlation(x, delta, geometry, layer.weight.shape)
    dense = form.dense()
    expected = dense.flatten(1).square().sum(1)
    ways = [Correlation._by_patch_grams, Correlation.squared_norms]
    ways += [Correlation._by_pixel_grams] if all(s == 1 for s in geometry.stride) else []
    for way in ways:
        torch.testing.assert_close(way(form), expected, msg=way.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "CACHE_BYTES", cache)
        torch.testing.assert_close(form.squared_norms(), expected)
        patch.setattr(Correlation, "_cheapest", lambda self, sum_too=False: (Correlation._explicitly, 100))
        for narrow in (0, 10**9):  # by rows of the kernel, and all of it at once
            patch.setattr(operations.correlation, "NARROW", narrow)
            norms, total = form.squared_norms_and_sum() or (None, None)
            torch.testing.assert_close(norms, expected)
            torch.testing.assert_close(total, dense.sum(0))
    torch.testing.assert_close(form[1:].dense(), dense[1:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@few
@given(convolutions(), st.integers(2, 4))
def test_convolutions(drawn: tuple[type, dict[str, Any], tuple[int, ...]], examples: int) -> None:
    kind, options, side = drawn
    model = kind(**options).double()
    inputs = torch.randn(examples, options["in_channels"], *side, dtype=torch.float64)
    assert_equal(measure(model, inputs), by_loop(model, inputs))
    assert_positionwise(model, inputs)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@few
@given(convolutions(), st.sampled_from(["exact", "paper"]), st.sampled_from([None, 2]), st.integers(0, 3))
def test_gradients_of_convolutions_are_autograds(
    drawn: tuple[type, dict[str, Any], tuple[int, ...]], estimator: str, most: int | None, frozen: int
) -> None:
    kind, options, side = drawn
    model = kind(**options).double()
    inputs = torch.randn(3, options["in_channels"], *side, dtype=torch.float64, requires_grad=bool(frozen % 2))
    model.weight.requires_grad_(frozen < 2 or not options["bias"])
    wanted = [t for t in (inputs, *model.parameters()) if t.requires_grad]
    factors = torch.randn_like(model(inputs))

    def gradients() -> list[Tensor]:
        first = torch.autograd.grad((model(inputs) * factors).sum(), wanted)
        graph = torch.autograd.grad((model(inputs) * factors).sum(), wanted, create_graph=True)
        total = sum(g.square().sum() for g in graph)
        second = torch.autograd.grad(total, wanted, materialize_grads=True) if total.requires_grad else ()
        return [*first, *graph, *second]

    expected = gradients()
    with GradientVariance(model, estimator, max_examples=most):
        torch.testing.assert_close(gradients(), expected)


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> tuple[type, dict[str, Any], tuple[int, ...]]:
    spatial = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2]))
    stride = draw(st.integers(1, 3))
    options = {
        "in_channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": draw(st.tuples(*[st.integers(1, 3)] * spatial)),
        "stride": stride,
        "padding": draw(st.integers(0, 1)),
        "output_padding": draw(st.integers(0, stride - 1)),
        "dilation": draw(st.integers(1, 2)),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    options["dilation"] = max(options["dilation"], options["output_padding"])
    side = tuple(draw(st.tuples(*[st.integers(4, 5)] * spatial)))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[spatial - 1]
    return kind, options, side


@few
@given(transposed_convolutions(), st.integers(2, 4))
def test_transposed_convolutions(drawn: tuple[type, dict[str, Any], tuple[int, ...]], examples: int) -> None:
    kind, options, side = drawn
    model = kind(**options).double()
    inputs = torch.randn(examples, options["in_channels"], *side, dtype=torch.float64)
    assert_equal(measure(model, inputs), by_loop(model, inputs))


@few
@given(st.lists(st.integers(1, 6), max_size=3), st.integers(1, 7), st.integers(1, 7), st.booleans(), st.integers(2, 5))
def test_linear(positions: list[int], inputs: int, outputs: int, bias: bool, examples: int) -> None:
    model = nn.Linear(inputs, outputs, bias).double()
    x = torch.randn(examples, *positions, inputs, dtype=torch.float64)
    assert_equal(measure(model, x), by_loop(model, x))
    assert_positionwise(model, x)


@few
@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 5), st.sampled_from(["layer", "rms", "group", "instance"]))
def test_norms(channels: int, length: int, examples: int, kind: str) -> None:
    width = 2 * channels
    model = randomized(
        {
            "layer": nn.LayerNorm(length + 1),
            "rms": nn.RMSNorm((width, length + 1)),
            "group": nn.GroupNorm(2, width),
            "instance": nn.InstanceNorm1d(width, affine=True),
        }[kind]
    ).double()
    x = torch.randn(examples, width, length + 1, dtype=torch.float64)
    assert_equal(measure(model, x), by_loop(model, x))
    assert_positionwise(model, x)


@few
@given(
    st.integers(1, 6), st.integers(1, 5), st.integers(2, 5), st.booleans(), st.sampled_from(["table", "sum", "mean"])
)
def test_embeddings(rows: int, length: int, examples: int, padding: bool, kind: str) -> None:
    options: dict[str, Any] = {"padding_idx": 0 if padding else None}
    model: nn.Module = (
        nn.Embedding(rows, 3, **options) if kind == "table" else nn.EmbeddingBag(rows, 3, mode=kind, **options)
    )
    model = model.double()
    x = torch.randint(0, rows, (examples, length))
    assert_equal(measure(model, x), by_loop(model, x))


@few
@given(
    st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]), st.integers(1, 2), st.booleans(), st.booleans(), st.booleans(),
    st.integers(1, 4), st.integers(2, 4),
)  # fmt: skip
def test_recurrent(kind: Any, layers: int, both: bool, bias: bool, first: bool, length: int, examples: int) -> None:
    model = kind(2, 3, layers, bias=bias, bidirectional=both, batch_first=first).double()
    dim = 0 if first else 1
    x = torch.randn(*((examples, length) if first else (length, examples)), 2, dtype=torch.float64)
    assert_equal(measure(model, x, dim), by_loop(model, x, dim))


@few
@given(st.integers(1, 2), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 4), st.integers(2, 4))
def test_attention(heads: int, bias: bool, zero: bool, first: bool, length: int, examples: int) -> None:
    inner = nn.MultiheadAttention(4, heads, bias=bias, add_zero_attn=zero, batch_first=first).double()

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            return self.inner(x, x, x, attn_mask=mask, need_weights=bias)[0]

    dim = 0 if first else 1
    x = torch.randn(*((examples, length) if first else (length, examples)), 4, dtype=torch.float64)
    assert_equal(measure(Self(), x, dim), by_loop(Self(), x, dim))


# -- the paper's estimator: squares before sums over positions


def positionwise_gradients(model: nn.Module, inputs: Tensor) -> Tensor:
    """Σ_t ‖∂ℓ_i/∂(the parameter used at position t)‖², by giving every position its own copy of the parameters.

    Works for one layer whose parameters act on positions alike: the output at t is computed from the copy of t, so
    the gradient of the copy is the position's own.
    """
    totals = []
    for i in range(len(inputs)):
        output = model(inputs[i : i + 1])
        delta = torch.autograd.grad(losses(output).sum(), output)[0].detach()
        places = positions_of(model, delta)
        total = torch.zeros((), dtype=inputs.dtype)
        for place in places:
            alone = torch.zeros_like(delta)
            alone[place] = delta[place]
            gradients = torch.autograd.grad(model(inputs[i : i + 1]), list(model.parameters()), alone)
            total = total + sum(g.square().sum() for g in gradients)
        totals.append(total)
    return torch.stack(totals)


def positions_of(model: nn.Module, delta: Tensor) -> list[Any]:
    """Indices of the outputs at each position: channels come second in convolutions, last in others."""
    if isinstance(model, (nn.LayerNorm, nn.RMSNorm)):
        return grid(delta.shape[: delta.dim() - len(model.normalized_shape)])
    if isinstance(model, nn.Linear):
        return grid(delta.shape[:-1])
    return [(slice(None), slice(None), *place) for place in grid(delta.shape[2:])]


def grid(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, shape)))


def assert_positionwise(model: nn.Module, inputs: Tensor) -> None:
    if isinstance(model, (nn.LayerNorm, nn.RMSNorm)) and inputs.dim() == len(model.normalized_shape) + 1:
        return  # one position: the two estimators are one
    variance = measure(model, inputs, estimator="paper")
    torch.testing.assert_close(variance.squared_norms(), positionwise_gradients(model, inputs), rtol=1e-9, atol=1e-11)
    exact = measure(model, inputs)
    torch.testing.assert_close(variance.mean_squared_norm, exact.mean_squared_norm, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paper_runs_on_every_model(case: Case) -> None:
    model, inputs = case.make(4)
    variance = measure(model, inputs, case.dim, estimator="paper")
    assert (variance.squared_norms() > 0).all()


def test_the_two_estimators_differ_where_positions_correlate() -> None:
    model = nn.Conv2d(2, 3, 3).double()
    inputs = torch.randn(5, 2, 6, 6, dtype=torch.float64) + 1
    assert measure(model, inputs).trace() > 1.2 * measure(model, inputs, estimator="paper").trace()


# -- the forms that gradients come in


@pytest.mark.parametrize("chunk", [1, 10**9])
@pytest.mark.parametrize("shape", [(1, 1, 3, 2), (2, 1, 9, 8), (3, 2, 2, 9), (5, 1, 7, 2), (4, 3, 1, 4)], ids=str)
def test_forms_agree_with_themselves(
    shape: tuple[int, int, int, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "CACHE_BYTES", chunk)
    m, groups, t, q = shape
    p = 5
    left, right = torch.randn(m, groups, t, q).double(), torch.randn(m, groups, t, p).double()
    matrix = torch.Size((groups * q, p))
    index = torch.randint(0, groups * q, (m, t))
    forms: list[PerExample] = [
        Outer(left, right, matrix),
        OneHot(index, torch.randn(m, t, p).double(), matrix),
        Positions(torch.randn(m, t, groups * q, p).double(), (1,)),
    ]
    forms += [Sum(forms), Sum([forms[0], forms[0]])]
    for form in forms:
        dense = form.dense()
        assert dense.shape == (m, *matrix)
        torch.testing.assert_close(form.squared_norms(), dense.flatten(1).square().sum(1))
        torch.testing.assert_close(form[1:].dense(), dense[1:])
        square = form.squared_norm_of_sum()
        if square is not None:
            torch.testing.assert_close(square, dense.sum(0).square().sum())


def test_functional_convolution_in_a_flattened_video() -> None:
    """Frames folded into the batch: the frames of one example belong together."""

    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            m, t = x.shape[:2]
            return F.relu(self.conv(x.flatten(0, 1))).unflatten(0, (m, t)).mean((3, 4))

    model = Video().double()
    inputs = torch.randn(3, 4, 1, 4, 4, dtype=torch.float64)
    assert_equal(measure(model, inputs), by_loop(model, inputs))
