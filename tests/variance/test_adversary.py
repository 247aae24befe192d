"""What tried to get a wrong number out silently, each with its family: exact, warned about, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Linear

from cabs import GradientVariance
from cabs.variance.reference import reference
from compare import assert_equal, trained
from families import Made, param

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()


def per(output: Tensor) -> Tensor:
    return output.flatten(1).tanh().square().sum(1)


def exact(model: nn.Module, x: Tensor = X, loss: Callable[[Tensor], Tensor] = per) -> None:
    model = model.double() if not any(p.is_complex() for p in model.parameters()) else model
    plain = torch.autograd.grad(loss(model(x)).mean(), trained(model))
    model.zero_grad()
    torch.manual_seed(3)
    with GradientVariance(model) as variance:
        loss(model(x)).mean().backward()
    for parameter, gradient in zip(trained(model), plain, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-11)
    norms = [
        sum(g.abs().square().sum() for g in torch.autograd.grad(loss(model(x[i : i + 1])).sum(), trained(model)))
        for i in range(len(x))
    ]
    torch.testing.assert_close(variance.squared_norms(), torch.stack(norms))
    mean = sum(g.abs().square().sum() for g in plain)
    torch.testing.assert_close(variance.mean_squared_norm, mean)


def complex_param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.complex128))


COMPLEX: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: Made(
        lambda s, x: torch.view_as_real(F.conv1d(x.to(torch.complex128) * (1 + 2j), s.w)), w=complex_param(3, 2, 3)),
        (5, 2, 6)),
    "linear": (lambda: Made(
        lambda s, x: torch.view_as_real(F.linear(x * (1 + 2j), s.w)), w=complex_param(3, 4)), (5, 7, 4)),
    "product": (lambda: Made(lambda s, x: torch.view_as_real(x * s.w), w=complex_param(4)), (5, 4)),
    "filter of frequencies": (lambda: Made(
        lambda s, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * s.w, n=6, dim=1), w=complex_param(4, 1)), (5, 6, 2)),
    "twice": (lambda: Made(lambda s, x: torch.view_as_real((x * s.w) @ s.w), w=complex_param(4)), (5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters(name: str) -> None:
    make, shape = COMPLEX[name]
    model, x = make(), torch.randn(shape).double()
    exact(model, x)
    assert GradientVariance(model).verify(lambda some: per(model(some)).mean(), x).exact


def even(s: Any) -> Tensor:
    return s.a @ s.a.mT + 3 * torch.eye(4).double()


EQUATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "examples in columns": lambda s, x: torch.linalg.solve(even(s), x.mT).mT,
    "in rows, from the left": lambda s, x: torch.linalg.solve(even(s), x, left=False),
    "vectors": lambda s, x: torch.linalg.solve(even(s).expand(len(x), 4, 4), x),
    "matrices of examples": lambda s, x: torch.linalg.solve(even(s) + x.unsqueeze(1) * x.unsqueeze(2), x),
    "by Cholesky": lambda s, x: torch.cholesky_solve(x.mT, torch.linalg.cholesky(even(s))).mT,
    "by LU": lambda s, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(even(s)), x.mT).mT,
    "triangular": lambda s, x: torch.linalg.solve_triangular(even(s).tril(), x.mT, upper=False).mT,
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_linear_equations(name: str) -> None:
    exact(Made(EQUATIONS[name], a=param(4, 4)))


def test_one_matrix_of_right_sides_for_as_many_matrices_as_it_has_rows() -> None:
    def solved(s: Any, x: Tensor) -> Tensor:
        equations = (3 * torch.eye(4).double() + x.unsqueeze(1) * x.unsqueeze(2)).tril()
        return torch.linalg.solve_triangular(equations, s.b, upper=False)

    exact(Made(solved, b=param(4, 4)), X[:4])


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_without_trained_scales_is_warned_about(frozen: bool) -> None:
    norm = nn.BatchNorm1d(3, affine=frozen)
    norm.requires_grad_(False)
    model = nn.Sequential(Linear(4, 3), norm, Linear(3, 2)).double()
    with GradientVariance(model), pytest.warns(UserWarning, match="BatchNorm in training mode"):
        model(X)


def shared_elsewhere(use: Callable[[nn.Module], Tensor]) -> None:
    model = Made(lambda s, x: s.l(x), l=Linear(4, 3)).double()
    with GradientVariance(model) as variance:
        (per(model(X)).mean() + use(model)).backward()
    with pytest.raises(RuntimeError, match="not known to be the examples"):
        variance.trace()


def test_a_weight_that_is_also_applied_to_something_unknown_is_refused() -> None:
    shared_elsewhere(lambda model: F.linear(torch.from_numpy(2 * X.numpy()), model.l.weight).square().mean())


@pytest.mark.parametrize("by", ["input", "parameters"])
def test_derivatives_for_looking_at_are_no_batch(by: str) -> None:
    model = nn.Sequential(Linear(4, 3), nn.Tanh(), Linear(3, 2)).double()
    x = X.clone().requires_grad_()
    with GradientVariance(model) as variance:
        wanted = [x] if by == "input" else trained(model)
        torch.autograd.grad(per(model(x)).mean(), wanted)
        per(model(X)).mean().backward()
    assert variance.examples == 5
    assert_equal(variance, reference(lambda i: per(model(X[i : i + 1])).sum(), [trained(model)], 5))


def test_a_forward_pass_in_vain_on_a_slice_is_refused() -> None:
    data, model = torch.randn(20, 4).double(), Linear(4, 3).double()
    with GradientVariance(model) as variance:
        model(data[:5])
        per(model(data[5:10])).mean().backward()
    with pytest.raises(RuntimeError, match="some of them only"):
        variance.trace()


def test_many_parts_of_one_tensor() -> None:
    model, x = Linear(4, 3).double(), torch.randn(9, 4).double()
    with GradientVariance(model) as variance:
        torch.cat([per(model(part)) for part in x.chunk(4)]).mean().backward()
    assert_equal(variance, reference(lambda i: per(model(x[i : i + 1])).sum(), [trained(model)], 9))


MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
MEETING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class weights": lambda o, k: F.cross_entropy(
        o[:, 0], torch.tensor([0, 1, 2, 1, 0]), torch.tensor([1.0, 2, 5]).double()),
    "mean of chosen": lambda o, k: o.square().mean(-1)[k].mean(),
    "mean of chosen, mse": lambda o, k: F.mse_loss(o[k], torch.zeros_like(o[k])),
    "over a count": lambda o, k: (o.square().mean(-1) * k).sum() / k.sum().clamp(min=1),
    "product of sums": lambda o, k: o.mean((0, 1)) @ o.mean((0, 1)),
    "one over a sum": lambda o, k: 2 / o.square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", MEETING)
def test_losses_in_which_examples_meet(name: str) -> None:
    model = Made(lambda s, x, k: s.l(x), l=Linear(4, 3)).double()
    with GradientVariance(model):
        loss = MEETING[name](model(torch.randn(5, 3, 4).double(), MASK), MASK)
        with pytest.warns(UserWarning, match="depends on others"):
            loss.backward()


def test_dropout_in_what_is_computed_again() -> None:
    model = Made(
        lambda s, x: F.scaled_dot_product_attention(s.q, s.l(x), x, dropout_p=0.5), l=Linear(4, 4), q=param(1, 3, 4)
    ).double()
    x = torch.randn(5, 3, 4).double()
    torch.manual_seed(7)
    output = model(x)
    norms = [
        sum(g.square().sum() for g in torch.autograd.grad(per(output)[i], trained(model), retain_graph=True))
        for i in range(5)
    ]
    after = torch.rand(2)
    torch.manual_seed(7)
    with GradientVariance(model) as variance:
        per(model(x)).mean().backward()
    torch.testing.assert_close(variance.squared_norms(), torch.stack(norms))
    torch.testing.assert_close(torch.rand(2), after, rtol=0, atol=0)


def test_renorm_along_features_mixes_examples() -> None:
    model = Made(lambda s, x: s.b(s.a(x).renorm(2, 1, 0.5)), a=Linear(4, 3), b=Linear(3, 2)).double()
    with GradientVariance(model), pytest.raises(RuntimeError, match="mixed"):
        per(model(X)).mean().backward()
    exact(Made(lambda s, x: s.b(s.a(x).renorm(2, 0, 0.5)), a=Linear(4, 3), b=Linear(3, 2)))


def test_a_norm_whose_scale_is_made_of_all_examples() -> None:
    model = Made(lambda s, x: s.k(F.layer_norm(s.l(x), (3,), weight=s.l(x).mean(0))), l=Linear(4, 3), k=Linear(3, 2))
    model = model.double()
    with GradientVariance(model), pytest.raises(RuntimeError, match=r"mixed|added up"):
        per(model(X)).mean().backward()


ARGUMENTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "alpha first": lambda s, x: torch.add(s.l(x), alpha=3, other=s.p),
    "the other way round": lambda s, x: torch.sub(other=s.p, input=s.l(x)) * s.p,
    "alpha": lambda s, x: torch.sub(s.l(x), s.p, alpha=2),
    "parameter first": lambda s, x: torch.sub(s.p, s.l(x), alpha=2),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_sums_with_arguments_by_name(name: str) -> None:
    exact(Made(ARGUMENTS[name], l=Linear(4, 3), p=param(3)))


def test_gradients_divided_by_frequency_are_warned_about() -> None:
    model = nn.Embedding(3, 4, scale_grad_by_freq=True).double()
    with GradientVariance(model), pytest.warns(UserWarning, match="scale_grad_by_freq"):
        model(torch.tensor([[0, 1], [1, 1]]))


def put_class_token(s: Any, x: Tensor) -> Tensor:
    y = s.l(x)
    y[:, 0] = s.t
    return y


def test_what_used_to_crash() -> None:
    x = torch.randn(5, 3, 4).double()
    exact(Made(put_class_token, l=Linear(4, 3), t=param(1, 1, 3)), x)
    exact(
        Made(lambda s, x: F.fold(s.l(x).mT, (2, 2), (1, 3), padding=(0, 1)), l=Linear(4, 3)),
        torch.randn(5, 4, 4).double(),
    )
    exact(
        Made(
            lambda s, x: torch.distributions.Normal(s.l(x), s.p.exp()).log_prob(x.new_ones(3)),
            l=Linear(4, 3),
            p=param(3),
        )
    )
