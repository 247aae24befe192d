"""Losses that give examples unequal shares, and gradients that are changed between passes: said, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader, GradientVariance

M, T = 6, 5
X = torch.randn(M, T, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randint(0, 3, (M, T), generator=torch.Generator().manual_seed(1))
COUNTED = torch.ones(M, T).bool()
COUNTED[0, 2:] = COUNTED[3, 1:] = False  # 23 of 30
IGNORED = torch.where(COUNTED, Y, -100)
COUNT = int(COUNTED.sum())


def tokens(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), Y, reduction="none")


def examples(outputs: Tensor) -> Tensor:
    return tokens(outputs).mean(1)


def above_the_middle(losses: Tensor) -> Tensor:
    return losses > losses.detach().median()


UNEQUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "hard examples": lambda o: examples(o)[above_the_middle(examples(o))].mean(),
    "hard examples, by a count": lambda o: (k := examples(o) > 1.2, examples(o)[k].sum() / int(k.sum()))[1],
    "hard examples, two means": lambda o: examples(o)[:2].mean() + examples(o)[3:5].mean(),
    "some rows": lambda o: F.mse_loss(o[[0, 2, 5]], torch.zeros(3, T, 3).double()),
    "some rows of classes": lambda o: F.cross_entropy(o[:4].flatten(0, 1), Y[:4].flatten()),
    "masked, over a number": lambda o: (tokens(o) * COUNTED).sum() / COUNTED.sum().item(),
    "masked, over a tensor": lambda o: (tokens(o) * COUNTED).sum() / COUNTED.sum(),
    "masked, negated": lambda o: -((-tokens(o) * COUNTED).sum()) / COUNT,
    "ignored": lambda o: F.cross_entropy(o.flatten(0, 1), IGNORED.flatten(), reduction="sum") / COUNT,
    "ignored, images": lambda o: F.cross_entropy(o.transpose(1, 2), IGNORED, reduction="sum") / COUNT,
    "ignored, each": lambda o: F.cross_entropy(o.transpose(1, 2), IGNORED, reduction="none").sum() / COUNT,
    "picked": lambda o: tokens(o)[COUNTED].sum() / COUNT,
    "in chunks": lambda o: (
        sum(F.cross_entropy(a, b, reduction="sum") for a, b in zip(
            o.flatten(0, 1).split(6), IGNORED.flatten().split(6), strict=True)) / COUNT),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_loss_of_unequal_shares_is_said(name: str) -> None:
    """Its contributions are measured: m G_i."""
    model = nn.Linear(4, 3).double()
    with pytest.warns(UserWarning, match="contribution to the batch gradient"), GradientVariance(model) as variance:
        UNEQUAL[name](model(X)).backward()
    norms = []
    for i in range(M):
        alone = model(X).detach()
        alone[i] = model(X)[i]
        gradients = torch.autograd.grad(UNEQUAL[name](alone), list(model.parameters()))
        norms.append(torch.stack([(M * g).square().sum() for g in gradients]).sum())
    torch.testing.assert_close(variance.squared_norms(), torch.stack(norms))


EQUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda o: examples(o).mean(),
    "sum over m": lambda o: examples(o).sum() / M,
    "masked sum over m": lambda o: (tokens(o) * COUNTED).sum() / M,
    "masked sum over m, halved": lambda o: (tokens(o) * COUNTED).sum() / M / 2,
    "masked sum over all places": lambda o: (tokens(o) * COUNTED).sum() / (M * T),
    "masked mean": lambda o: (tokens(o) * COUNTED).mean(),
    "means of masked": lambda o: ((tokens(o) * COUNTED).sum(1) / COUNTED.sum(1)).mean(),
    "ignored, over m": lambda o: F.cross_entropy(o.flatten(0, 1), IGNORED.flatten(), reduction="sum") / M,
    "chosen, over m": lambda o: examples(o)[above_the_middle(examples(o))].sum() / M,
    "halves": lambda o: (examples(o)[:3].mean() + examples(o)[3:].mean()) / 2,
    "stacked": lambda o: torch.stack([examples(o)[i : i + 2].mean() for i in range(0, M, 2)]).mean(),
    "all places": lambda o: tokens(o).sum() / (M * T),
}


@pytest.mark.parametrize("name", EQUAL)
def test_ordinary_losses_are_not(name: str) -> None:
    model = nn.Linear(4, 3).double()
    with warnings.catch_warnings(), GradientVariance(model) as variance:
        warnings.simplefilter("error")
        EQUAL[name](model(X)).backward()
        assert variance.trace() > 0


# -- gradients that are changed between passes


def scaled(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def set_to_zero_in_part(model: nn.Module) -> None:
    first = next(model.parameters())
    assert first.grad is not None
    first.grad.zero_()


def set_to_none_in_part(model: nn.Module) -> None:
    next(model.parameters()).grad = None


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clipped by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "scaled": scaled,
    "replaced": replaced,
    "zero in part": set_to_zero_in_part,
    "none in part": set_to_none_in_part,
}


def accumulated(model: nn.Module, estimator: str, between: Callable[[nn.Module], object]) -> GradientVariance:
    with GradientVariance(model, estimator) as variance:
        for part in range(3):
            (examples_of(model, part) / 3).backward()
            if part < 2:
                between(model)
    return variance


def examples_of(model: nn.Module, part: int) -> Tensor:
    return model(X[2 * part : 2 * part + 2].clone()).square().sum((1, 2)).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("estimator", ["exact", "microbatch"])
def test_gradients_that_are_changed_between_passes_are_refused(name: str, estimator: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    variance = accumulated(model, estimator, CHANGES[name])
    for read in (variance.trace, lambda: variance.mean_squared_norm):
        with pytest.raises(RuntimeError, match="changed between backward passes"):
            read()
    variance.reset()
    model.zero_grad()
    with variance:
        examples_of(model, 0).backward()
        examples_of(model, 1).backward()
    assert variance.trace() > 0  # the next step is another one


@pytest.mark.parametrize("estimator", ["exact", "microbatch"])
def test_gradients_that_are_looked_at_or_changed_at_the_end_are_not(estimator: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    plain = accumulated(model, estimator, lambda model: None).trace()
    model.zero_grad()
    seen = accumulated(
        model, estimator, lambda model: [p.grad.norm() for p in model.parameters() if p.grad is not None]
    )
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(seen.trace(), plain)


def test_a_loop_that_clips_each_microbatch() -> None:
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loader = AdaptiveLoader(data, batch_size=16, max_microbatch_size=4)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = CABS(model, optimizer, loader, min_batch_size=16, max_batch_size=16)
    for x, y in next(iter(loader)):
        scheduler.backward(F.mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed between backward passes"):
        scheduler.step()
    scheduler.close()


# -- experts that drop what comes last


class Experts(nn.Module):
    """Each takes so many rows of a batch, those that come first."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.gate, self.head, self.capacity = nn.Linear(4, 2), nn.Linear(4, 1), capacity
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        choice = self.gate(rows).argmax(-1)
        one_hot = F.one_hot(choice, 2)
        kept = (one_hot.cumsum(0) * one_hot).sum(-1) <= self.capacity
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (choice == number) & kept
            out[mine] = expert(rows[mine])
        return self.head(out.view_as(x).sum(1))  # type: ignore[no-any-return]


def test_experts_that_drop_what_comes_last_are_refused() -> None:
    torch.manual_seed(0)
    for capacity, refused in ((100, False), (6, True)):
        model = Experts(capacity).double()
        with GradientVariance(model, check_owners=True):
            if refused:
                with pytest.raises(RuntimeError, match="depend on one another"):
                    model(X)
            else:
                model(X).mean().backward()


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), 3), x.new_zeros(len(x), 3))
        for t in range(T):
            state = self.cell(x[:, t], state)
        return self.head(state[0] + state[1])  # type: ignore[no-any-return]


def test_the_cell_of_an_lstm() -> None:
    """It has two outputs."""
    model = Unrolled().double()
    with GradientVariance(model) as variance:
        model(X).square().mean().backward()
    torch.testing.assert_close(variance.squared_norms(), norms_of(lambda x: model(x).square().mean(), model, X))


def norms_of(loss: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    each = [torch.autograd.grad(loss(x[i : i + 1]), list(model.parameters())) for i in range(len(x))]
    return torch.stack([torch.stack([g.square().sum() for g in gradients]).sum() for gradients in each])


def test_a_transform_leaves_nothing_behind() -> None:
    """What runs inside of torch.func is not seen: it is missed, and what follows is measured."""
    model = nn.Linear(4, 1).double()
    x = X[:, 0]
    with GradientVariance(model) as variance:
        torch.func.grad(lambda z: model(z).square().sum())(x).square().sum().backward()
        with pytest.raises(RuntimeError, match="a way that cannot be seen"):
            variance.trace()
    model.zero_grad()
    with GradientVariance(model) as variance:
        torch.func.vmap(torch.func.grad(lambda z: model(z).sum()))(x)
        model(x).square().mean().backward()
    torch.testing.assert_close(variance.squared_norms(), norms_of(lambda x: model(x).square().mean(), model, x))


def test_rows_that_were_flattened_are_said() -> None:
    """Nobody has said which rows are one example's."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    with pytest.warns(UserWarning, match="each row is taken for an example"), GradientVariance(model) as variance:
        tokens(model[1:](model[0](X.flatten(0, 1))).view(M, T, 3)).mean().backward()
    assert variance.examples == M * T
    whose = torch.arange(M).repeat_interleave(T)
    with GradientVariance(model, owners=lambda rows: whose) as variance:
        tokens(model[1:](model[0](X.flatten(0, 1))).view(M, T, 3)).mean().backward()
    assert variance.examples == M


@pytest.mark.parametrize("rows", [X[:, 0], X[:4], X[1], X.clone().flatten(0, 1).clone(), X.flatten(1)[:, :4]])
def test_other_views_are_not(rows: Tensor) -> None:
    model = nn.Linear(4, 3).double()
    with GradientVariance(model) as variance:
        model(rows).square().mean().backward()
    assert variance.examples == len(rows)
