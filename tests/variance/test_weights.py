"""Weighted norms, Σ_j P_j g_ij², against the loop over single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cabs import GradientVariance
from cabs.variance import factors
from cabs.variance.factors import OneHot, Outer, PerExample, Positions, Sum
from cabs.variance.operations.convolution import geometry_of
from cabs.variance.operations.correlation import Correlation
from cases import CASES, Case, losses
from compare import assert_equal, by_loop, measure, trained

NAMES = {case.name: case for case in CASES}


def some_weights(model: nn.Module) -> dict[Tensor, Tensor]:
    """From 0 to large, and zero here and there."""
    return {p: torch.rand_like(p).pow(4) * 50 * (torch.rand_like(p) > 0.1) for p in trained(model)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_loop(case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.make(4)
    weights = some_weights(model)
    expected = by_loop(model, inputs, case.dim, weights=weights)
    assert_equal(measure(model, inputs, case.dim, weights=weights), expected)
    few = measure(model, inputs, case.dim, weights=weights, max_examples=2)
    torch.testing.assert_close(few.squared_norms(), expected.squared_norms[[0, 2]], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(few.mean_squared_norm, expected.mean_squared_norm, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ones_change_nothing(case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.make(3)
    ones = {p: torch.ones_like(p) for p in trained(model)}
    for estimator in ("exact", "paper"):
        plain = measure(model, inputs, case.dim, estimator=estimator)
        torch.testing.assert_close(
            measure(model, inputs, case.dim, estimator=estimator, weights=ones).traces(), plain.traces()
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_stay_as_they_are(case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.make(4)
    model.zero_grad()
    losses(model(inputs), case.dim).mean().backward()
    expected = [p.grad for p in model.parameters()]
    measure(model, inputs, case.dim, weights=some_weights(model))
    for theirs, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["mlp", "convolutional network", "tied, by module", "called twice", "lstm"])
def test_accumulated_frozen_and_in_groups(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = NAMES[name].make(6)
    next(model.parameters()).requires_grad_(False)
    parameters, weights = trained(model), some_weights(model)
    groups = [parameters[1:], parameters[:1]]
    with GradientVariance(model, weights=weights, groups=groups) as variance:
        for piece in (inputs[:2], inputs[2:3], inputs[3:]):
            (losses(model(piece)).sum() / 6).backward()
    assert_equal(variance, by_loop(model, inputs, groups=groups, weights=weights))


@pytest.mark.parametrize("name", ["mlp", "convolutional network", "tied, by module", "transformer layer"])
def test_between_microbatches(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = NAMES[name].make(6)
    weights, pieces = some_weights(model), list(inputs.split(2))

    def norm(gradients: list[Tensor]) -> Tensor:
        return sum((weights[p] * g.square()).sum() for p, g in zip(trained(model), gradients, strict=True))  # type: ignore[return-value]

    each = [torch.autograd.grad(losses(model(piece)).mean(), trained(model)) for piece in pieces]
    mean = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
    with GradientVariance(model, "microbatch", weights=weights) as variance:
        for piece in pieces:
            (losses(model(piece)).mean() / 3).backward()
    expected = 2 * 3 / 2 * (torch.stack([norm(list(g)) for g in each]).mean() - norm(mean))
    torch.testing.assert_close(variance.trace(), expected)
    torch.testing.assert_close(variance.mean_squared_norm, norm(mean))


shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 7))


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([1, 10**9]), st.integers(0, 2**31))
def test_every_form(shape: tuple[int, int, int, int], cache: int, seed: int) -> None:
    torch.manual_seed(seed)
    m, groups, t, q = shape
    left, right = torch.randn(m, groups, t, q).double(), torch.randn(m, groups, t, 5).double()
    matrix = torch.Size((groups * q, 5))
    index, delta = torch.randint(0, groups * q, (m, t)), torch.randn(m, t, 5).double()
    terms = torch.randn(m, groups * q, t, 5).double()
    forms: list[PerExample] = [Outer(left, right, matrix), OneHot(index, delta, matrix), Positions(terms, (2,))]
    each = [[Outer(left[:, :, [k]], right[:, :, [k]], matrix) for k in range(t)],
        [OneHot(index[:, [k]], delta[:, [k]], matrix) for k in range(t)],
        [Positions(terms[:, :, [k]], (2,)) for k in range(t)]]  # fmt: skip
    weights = torch.rand(matrix).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "CACHE_BYTES", cache)
        for form in [*forms, Sum(forms), Sum([forms[0], forms[0]])]:
            expected = (weights * form.dense().square()).flatten(1).sum(1)
            torch.testing.assert_close(form.squared_norms(weights), expected)
        for form, positions in zip(forms, each, strict=True):
            apart = sum((weights * one.dense().square()).flatten(1).sum(1) for one in positions)  # type: ignore[attr-defined]
            torch.testing.assert_close(form.positionwise(weights), apart)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.sampled_from([0, 10**9]), st.sampled_from([1, 10**9])
)
def test_every_convolution(spatial: int, groups: int, stride: int, narrow: int, cache: int) -> None:
    torch.manual_seed(spatial + 10 * groups + 100 * stride)
    kernel = [3, 2, 1][:spatial]
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1](2 * groups, 3 * groups, kernel, groups=groups)
    geometry = geometry_of(layer.weight, stride, 1, 1, groups)
    x = torch.randn(3, 2 * groups, *[5, 4, 3][:spatial]).double()
    out = [(n + 2 - k) // stride + 1 for n, k in zip(x.shape[2:], kernel, strict=True)]
    delta = torch.randn(3, 3 * groups, *out).double()
    form, weights = Correlation(x, delta, geometry, layer.weight.shape), torch.rand(layer.weight.shape).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "CACHE_BYTES", cache)
        patch.setattr("cabs.variance.operations.correlation.NARROW", narrow)
        expected = (weights * form.dense().square()).flatten(1).sum(1)
        torch.testing.assert_close(form.squared_norms(weights), expected)
        norms, total = form.squared_norms_and_sum(weights) or (None, None)
        torch.testing.assert_close(norms, expected)
        torch.testing.assert_close(total, form.dense().sum(0))
        outer = form._outer()
        squares = torch.einsum("mgtq,mgtp->mgqp", outer.left.square(), outer.right.square()).reshape(3, *weights.shape)
        torch.testing.assert_close(form.positionwise(weights), (weights * squares).flatten(1).sum(1))


def test_weights_are_read_in_every_pass() -> None:
    model, inputs = NAMES["mlp"].make(5)
    weights = some_weights(model)
    variance = measure(model, inputs, weights=weights)
    before = variance.trace()
    for tensor in weights.values():
        tensor.mul_(3)
    with variance:
        losses(model(inputs)).mean().backward()
    torch.testing.assert_close(variance.trace(), 3 * before)
    next(iter(weights.values()))[0, 0] = -1
    with pytest.raises(ValueError, match=r"weights of 0.weight are not all finite and at least 0"), variance:
        losses(model(inputs)).mean().backward()


def wrong(kind: str, model: nn.Module) -> Any:
    weights: dict[Any, Any] = some_weights(model)
    first = next(iter(weights))
    if kind == "names":
        return {name: torch.ones_like(p) for name, p in model.named_parameters()}
    if kind == "foreign":
        return {**weights, nn.Parameter(torch.ones(3)): torch.ones(3)}
    if kind == "missing":
        del weights[first]
    elif kind == "number":
        weights[first] = 1.0
    elif kind == "shape":
        weights[first] = torch.ones(2)
    elif kind == "complex":
        weights[first] = torch.ones_like(first, dtype=torch.complex64)
    else:
        weights[first] = torch.ones_like(first)
        weights[first][0, 0] = {"negative": -1e-3, "nan": float("nan"), "infinite": float("inf")}[kind]
    return list(weights) if kind == "list" else weights


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("names", "'0.weight' for a key"),
        ("foreign", r"shape \(3,\) for a key"),
        ("missing", "nothing for 0.weight"),
        ("number", "weights of 0.weight are float"),
        ("shape", r"weights of 0.weight have shape \(2,\), and the parameter has \(4, 5\)"),
        ("complex", "reals"),
        ("negative", "at least 0"),
        ("nan", "finite"),
        ("infinite", "finite"),
    ],
)
def test_wrong_weights(kind: str, words: str) -> None:
    model, _ = NAMES["mlp"].make(2)
    with pytest.raises((ValueError, TypeError), match=words):
        GradientVariance(model, weights=wrong(kind, model))
    with pytest.raises(TypeError, match="must map each parameter"):
        GradientVariance(model, weights=[torch.ones(3)])  # type: ignore[arg-type]


def test_frozen_parameters_need_none() -> None:
    model, inputs = NAMES["mlp"].make(4)
    next(model.parameters()).requires_grad_(False)
    weights = some_weights(model)
    assert len(weights) < len(list(model.parameters()))
    assert_equal(measure(model, inputs, weights=weights), by_loop(model, inputs, weights=weights))


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(7, 3, sparse=True).double()
    inputs = torch.randint(0, 7, (5, 4))
    weights = some_weights(model)
    measured = measure(model, inputs, weights=weights)
    model.sparse = False  # which the loop cannot stack
    assert_equal(measured, by_loop(model, inputs, weights=weights))


def test_fewer_examples_are_measured_of_large_batches() -> None:
    model, inputs = NAMES["linear on sequences"].make(160)
    weights = some_weights(model)
    auto = {"weights": weights, "max_examples": "auto"}
    sizes = [len(measure(model, inputs[:m], **auto).squared_norms()) for m in (6, 16, 64, 80, 160)]
    assert sizes == [6, 8, 8, 8, 10]
    mlp, inputs = NAMES["mlp"].make(4)
    assert measure(mlp, inputs).cheap
    assert not measure(mlp, inputs, weights=some_weights(mlp)).cheap
