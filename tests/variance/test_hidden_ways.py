"""Gradients that are changed on their way, come as a part of a larger one, or take a way that is not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Linear
from torch.utils.checkpoint import checkpoint

from cabs import GradientVariance
from cabs.variance.reference import reference
from compare import assert_equal, trained
from families import Made, param

X = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).double()


def per(output: Tensor) -> Tensor:
    return output.flatten(1).tanh().square().sum(1)


def exact(model: nn.Module, x: Tensor = X, **options: Any) -> None:
    model = model.double()
    weights = {p: torch.rand_like(p) for p in trained(model)} if options.pop("weighted", False) else None
    with GradientVariance(model, weights=weights, **options) as variance:
        per(model(x)).mean().backward()
    assert_equal(
        variance, reference(lambda i: per(model(x[i : i + 1])).sum(), [trained(model)], len(x), weights=weights)
    )


def hooked(make: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = make(self, x)
        h.register_hook(lambda gradient: -3 * gradient)
        return h.tanh()

    return forward


HOOKED: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Callable[[], Any]]]] = {
    "linear": (lambda s, x: s.l(x), {"l": lambda: Linear(4, 3)}),
    "linear on vectors": (lambda s, x: s.l(x[:, 0]), {"l": lambda: Linear(4, 3)}),
    "product": (lambda s, x: x * s.p, {"p": lambda: param(4)}),
    "sum": (lambda s, x: x + s.p, {"p": lambda: param(4)}),
    "norm": (lambda s, x: s.n(x), {"n": lambda: nn.LayerNorm(4)}),
    "convolution": (lambda s, x: s.c(x), {"c": lambda: nn.Conv1d(3, 2, 2)}),
    "embedding": (lambda s, x: s.e((x[..., 0] > 0).long()), {"e": lambda: nn.Embedding(2, 4)}),
    "replayed": (lambda s, x: F.scaled_dot_product_attention(s.q, x, x), {"q": lambda: param(2, 4)}),
    "written into": (lambda s, x: (x * s.p).mul_(2), {"p": lambda: param(4)}),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_on_an_activation_comes_before_the_measurement(name: str, weighted: bool) -> None:
    make, parts = HOOKED[name]
    exact(Made(hooked(make), **{part: create() for part, create in parts.items()}), weighted=weighted)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "unbatched convolution": lambda: Made(lambda s, x: torch.stack([s.c(y) for y in x]), c=nn.Conv1d(3, 2, 2)),
    "cat": lambda: Made(
        lambda s, x: torch.cat([s.l(x), s.l(x.sin())]).view(2, -1, 9).tanh().prod(0), l=Linear(4, 3)),
    "stack": lambda: Made(
        lambda s, x: torch.stack([s.l(x), s.k(x)]).tanh().prod(0), l=Linear(4, 3), k=Linear(4, 3)),
    "stack of products": lambda: Made(
        lambda s, x: torch.stack([x @ s.w, (x.mT @ s.v).mT]).tanh().prod(0), w=param(4, 4), v=param(3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_gradients_that_are_a_part_of_a_larger_one(name: str) -> None:
    exact(PARTS[name]())
    exact(PARTS[name](), weighted=True)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ w.T.contiguous()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        return None, delta.flatten(0, -2).T @ ctx.saved_tensors[0].flatten(0, -2)


class ByNumpy(ByHand):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.numpy() @ w.detach().numpy().T)


HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function": lambda x, w: ByHand.apply(x, w),
    "a function of numpy's": lambda x, w: ByNumpy.apply(x, w),
    "vmap": lambda x, w: torch.vmap(lambda y: F.linear(y, w))(x),
    "vmap, elementwise": lambda x, w: torch.vmap(lambda y: y * w[0])(x),
    "sparse": lambda x, w: torch.sparse.mm(x.flatten(0, 1).to_sparse(), w.T).view(*x.shape[:2], -1),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_hidden_use_is_no_penalty(name: str, weighted: bool) -> None:
    """The weight has a use that is seen too, so that something of its gradient is accounted for."""
    model = Made(lambda s, x: (F.linear(x, s.w), HIDDEN[name](x, s.w)), w=param(3, 4)).double()
    weights = {model.w: torch.rand_like(model.w)} if weighted else None

    def measure() -> None:
        with GradientVariance(model, weights=weights) as variance:
            seen, hidden = model(X)
            (per(seen).mean() + per(hidden).mean()).backward()
        variance.trace()

    with pytest.raises(RuntimeError, match=r"by a way that cannot be seen|not known to keep them apart"):
        measure()


def test_a_hidden_use_in_an_earlier_pass_is_found() -> None:
    model = Made(lambda s, x: F.linear(x, s.w), w=param(3, 4)).double()
    with GradientVariance(model) as variance:
        (per(model(X[:2])).sum() / 5 + per(ByHand.apply(X[:2], model.w)).sum() / 5).backward()
        (per(model(X[2:])).sum() / 5).backward()
    with pytest.raises(RuntimeError, match="by a way that cannot be seen"):
        variance.trace()


@pytest.mark.parametrize("roots", [False, True])
def test_a_penalty_still_is_one(roots: bool) -> None:
    model = nn.Sequential(Linear(4, 3), nn.Tanh(), Linear(3, 2)).double()
    with GradientVariance(model) as variance:
        loss, penalty = per(model(X)).mean(), sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        torch.autograd.backward([loss, penalty] if roots else loss + penalty)
    assert_equal(variance, reference(lambda i: per(model(X[i : i + 1])).sum(), [trained(model)], 5))


def test_derivatives_in_the_loss_are_refused() -> None:
    model = nn.Sequential(Linear(4, 3), nn.Tanh(), Linear(3, 1)).double()
    x = X.clone().requires_grad_()
    with GradientVariance(model):
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss, penalty = per(output).mean(), gradient.square().mean()
        with pytest.raises(RuntimeError, match="create_graph"):
            loss + penalty


@pytest.mark.parametrize("bags", [False, True])
def test_tables_that_are_shortened_when_looked_up(bags: bool) -> None:
    table = nn.EmbeddingBag(7, 4, max_norm=0.5, mode="max") if bags else nn.Embedding(7, 4, max_norm=0.5)
    indices = torch.randint(7, (5, 3))
    model = nn.Sequential(table, Linear(4, 2)).double()
    model(indices)  # which shortens them, so that they stay as they are
    exact(model, indices)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_weight_that_is_used_twice_in_what_is_computed_again(reentrant: bool) -> None:
    layer = Linear(4, 4)
    plain = Made(lambda s, x: s.l(s.l(s.k(x)).tanh()), l=layer, k=Linear(4, 4)).double()
    model = Made(
        lambda s, x: checkpoint(lambda h: s.l(s.l(h).tanh()), s.k(x), use_reentrant=reentrant), l=layer, k=plain.k
    )
    with GradientVariance(model) as variance:
        per(model(X)).mean().backward()
    assert_equal(variance, reference(lambda i: per(plain(X[i : i + 1])).sum(), [trained(model)], 5))


def test_a_weight_that_is_used_in_two_reentrant_checkpoints_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.k(x)
        for _ in range(2):
            h = checkpoint(lambda h: self.l(h).tanh(), h, use_reentrant=True)
        return h

    model = Made(forward, l=Linear(4, 4), k=Linear(4, 4)).double()
    with GradientVariance(model) as variance:
        per(model(X)).mean().backward()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        variance.trace()


MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.filterwarnings("error")
def test_means_over_rows_of_which_some_examples_have_more(equal: bool) -> None:
    model = Made(lambda s, x: s.l(x), l=Linear(4, 3)).double()
    mask = MASK[:1].expand(5, 3) if equal else MASK
    with GradientVariance(model):
        loss = model(X)[mask].square().mean(0).sum()
        if equal:
            loss.backward()
        else:
            with pytest.warns(UserWarning, match="depends on others"):
                loss.backward()


ODD: dict[str, Callable[[], nn.Module]] = {
    "examples for a weight": lambda: Made(
        lambda s, x: F.linear(torch.ones(3, 4, dtype=x.dtype), x[:, 0], s.b.expand(len(x))).T, b=param(1)),
    "examples for a kernel": lambda: Made(
        lambda s, x: F.conv1d(torch.ones(1, 3, 6, dtype=x.dtype), x, s.b.expand(len(x))).transpose(0, 1), b=param(1)),
    "compared with a parameter": lambda: Made(
        lambda s, x: torch.where(x > s.t, s.l(x), x), t=param(4), l=Linear(4, 4)),
    "distances": lambda: Made(lambda s, x: torch.cdist(x[:, 0], s.w), w=param(6, 4)),
    "distances, swapped": lambda: Made(lambda s, x: torch.cdist(s.w, x[:, 0]).T, w=param(6, 4)),
    "triangular systems": lambda: Made(
        lambda s, x: torch.linalg.solve_triangular(s.w.tril() + 3 * torch.eye(4), x[:, 0].T, upper=False).T,
        w=param(4, 4)),
    "triangular systems from the right": lambda: Made(
        lambda s, x: torch.linalg.solve_triangular(s.w.triu() + 3 * torch.eye(4), x, upper=True, left=False),
        w=param(4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_places_for_examples(name: str) -> None:
    exact(ODD[name]())
    exact(ODD[name](), weighted=True)


@pytest.mark.parametrize("some", [False, True])
def test_backward_for_some_parameters_only(some: bool) -> None:
    model = nn.Sequential(Linear(4, 3), nn.Tanh(), Linear(3, 2)).double()
    with GradientVariance(model) as variance:
        per(model(X)).mean().backward(inputs=list(model[0].parameters() if some else model.parameters()))
    if some:
        with pytest.raises(RuntimeError, match=r"2\.bias, 2\.weight were measured and did not reach them"):
            variance.trace()
    else:
        assert_equal(variance, reference(lambda i: per(model(X[i : i + 1])).sum(), [trained(model)], 5))


def shifted(self: Any, tokens: Tensor) -> Tensor:
    """As decoders do that are trained with labels: a start token before all tokens but the last."""
    before = tokens.new_zeros(tokens.shape)
    before[..., 1:] = tokens[..., :-1].clone()
    before[..., 0] = 3
    before.masked_fill_(before == 5, 2)
    h = self.e(before)
    return F.scaled_dot_product_attention(h, self.k(h), self.v(h), is_causal=True)


def test_start_tokens() -> None:
    model = Made(shifted, e=nn.Embedding(7, 4), k=Linear(4, 4), v=Linear(4, 4))
    exact(model, torch.randint(7, (5, 4)))
    exact(model, torch.randint(7, (4, 4)), weighted=True)
