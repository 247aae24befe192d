"""What would be wrong without a word: parameters on numbers that nobody marked, mixtures without a gradient, counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Linear
from torch.utils.data import TensorDataset

from cabs import AdaptiveLoader, BatchSizeScheduler, GradientVariance, rules
from cabs.variance.reference import reference
from compare import assert_equal, trained
from families import Made, param

Batch = tuple[Tensor, ...]
Loss = Callable[[Any, Batch], Tensor]

M, T = 5, 6


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


X, ROWS = numbers(M, 4), numbers(M, T, 4)
Y = torch.tensor([2, 0, 1, 1, 0])
TARGETS = torch.arange(M * T).view(M, T) % 3
VALUES = numbers(M, T, 3, seed=1)
MASK = torch.ones(M, T, dtype=torch.bool)
for example, tokens in enumerate((6, 1, 3, 6, 5)):  # 21 of 30
    MASK[example, tokens:] = False


def network() -> nn.Module:
    return Made(lambda s, x: s.o(s.a(x).tanh()), a=Linear(4, 5), o=Linear(5, 3)).double()


def measured(model: nn.Module, loss: Loss, batch: Batch, loader: bool) -> GradientVariance:
    with GradientVariance(model) as variance:
        if loader:
            variance.expect(batch, len(batch[0]), rows=True)
        loss(model, batch).backward()
    return variance


def one_by_one(model: nn.Module, loss: Loss, batch: Batch) -> Any:
    return reference(lambda i: loss(model, tuple(t[i : i + 1] for t in batch)), [trained(model)], len(batch[0]))


# -- parameters on numbers that nobody marked

TABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows by number": lambda w, y: w[y].square().sum(1),
    "index_select": lambda w, y: w.index_select(0, y).square().sum(1),
    "gather": lambda w, y: w.T[:, :3].gather(1, y.expand(4, -1) % 3).square().sum(0),
    "take_along_dim": lambda w, y: torch.take_along_dim(w, y.unsqueeze(1).expand(-1, 4), 0).square().sum(1),
    "embedding": lambda w, y: F.embedding(y, w).square().sum(1),
    "one-hot": lambda w, y: (F.one_hot(y, 3).to(w).unsqueeze(2) * w).sum(1).square().sum(1),
    "one-hot, einsum": lambda w, y: torch.einsum("mc,cd->md", F.one_hot(y, 3).to(w), w).square().sum(1),
    "where": lambda w, y: torch.where(F.one_hot(y, 3).bool().unsqueeze(2), w, 0.0).square().sum((1, 2)),
    "masked_fill": lambda w, y: w.expand(len(y), 3, 4).masked_fill(~F.one_hot(y, 3).bool().unsqueeze(2), 0).square()
    .sum((1, 2)),
    "difference": lambda w, y: (w.sum(1) - F.one_hot(y, 3)).square().sum(1),
    "cross-entropy": lambda w, y: F.cross_entropy(w.sum(1).expand(len(y), 3), y, reduction="none"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_a_parameter_on_targets_in_the_loss(name: str) -> None:
    """A loader's targets are known; without one they are numbers like others, and no penalty is made of them."""
    model = Made(lambda s, x: x @ s.w.T, w=param(3, 4)).double()

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + TABLE[name](model.w, batch[1]).mean()

    assert_equal(measured(model, loss, (X, Y), loader=True), one_by_one(model, loss, (X, Y)))
    without = measured(model, loss, (X, Y), loader=False)
    with pytest.raises(RuntimeError, match="inputs that are not known to be the examples'"):
        without.trace()


@pytest.mark.parametrize("loader", [False, True])
def test_a_parameter_in_a_mean_over_targets_is_refused(loader: bool) -> None:
    model = Made(lambda s, x: x @ s.w.T, w=param(3, 4)).double()

    def loss(model: Any, batch: Batch) -> Tensor:
        prior = F.cross_entropy(model.w.sum(1).expand(len(batch[1]), 3), batch[1])
        return F.cross_entropy(model(batch[0]), batch[1]) + prior

    with pytest.raises(RuntimeError, match=r"apply it to each example|not known to be the examples"):
        measured(model, loss, (X, Y), loader).trace()


def test_before_the_model_is_called_too() -> None:
    model = Made(lambda s, x: x @ s.w.T, w=param(3, 4)).double()
    prior = model.w[Y].square().sum(1).mean()
    variance = measured(model, lambda m, b: prior + F.cross_entropy(m(b[0]), b[1]), (X, Y), loader=False)
    with pytest.raises(RuntimeError, match="not known to be the examples'"):
        variance.trace()


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda w: w.square().sum(),
    "near to a start": lambda w: (w - numbers(3, 4, seed=2)).square().sum(),
    "weighed (EWC)": lambda w: (numbers(3, 4, seed=2).abs() * (w - 1.0).square()).sum(),
    "mse_loss": lambda w: F.mse_loss(w, numbers(3, 4, seed=2)),
    "l1_loss": lambda w: F.l1_loss(w, torch.zeros(3, 4).double()),
    "masked": lambda w: (w * (numbers(3, 4, seed=2) > 0)).abs().sum(),
    "some elements": lambda w: w[numbers(3, 4, seed=2) > 0].square().sum(),
    "weighed rows": lambda w: (w * numbers(3, 1, seed=2)).square().sum(),
    "orthogonal rows": lambda w: (w @ w.T - torch.eye(3)).square().sum(),
    "a scale": lambda w: torch.tensor(0.3) * w.norm(),
    "a logarithm": lambda w: torch.logdet(w @ w.T + torch.eye(3)),
}


@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_with_constants_are_penalties(name: str, loader: bool) -> None:
    model = Made(lambda s, x: x @ s.w.T, w=param(3, 4)).double()

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    variance = measured(model, lambda m, b: loss(m, b) + PENALTIES[name](m.w), (X, Y), loader)
    assert_equal(variance, one_by_one(model, loss, (X, Y)))


def test_with_a_loader_whatever_it_did_not_hand_out_is_a_constant() -> None:
    model = Made(lambda s, x: x @ s.w.T, w=param(3, 4)).double()

    def apart(w: Tensor) -> Tensor:
        return F.nll_loss((w @ w.T).log_softmax(1), torch.arange(3)) + w[torch.tensor([0, 2])].square().sum()

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    variance = measured(model, lambda m, b: loss(m, b) + apart(m.w), (X, Y), loader=True)
    assert_equal(variance, one_by_one(model, loss, (X, Y)))


def test_numbers_that_python_took_from_examples() -> None:
    """By way of numpy they are tensors that nobody marked; Python's own numbers cannot be followed, which is said."""
    model = Made(lambda s, x: x @ s.w.T, w=param(3, 4)).double()

    def by_numpy(model: Any, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y) + model.w[torch.from_numpy(y.numpy())].square().sum(1).mean()

    with pytest.raises(RuntimeError, match="inputs that are not known to be the examples'"):
        measured(model, by_numpy, (X, Y), loader=True).trace()

    def by_list(model: Any, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y) + sum(model.w[k].square().sum() for k in y.tolist()) / len(y)

    with pytest.warns(UserWarning, match="numbers of single examples were given to Python"):
        measured(model, by_list, (X, Y), loader=True)

    def to_log(model: Any, batch: Batch) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        loss.item(), loss.detach().numpy()
        return loss + model.w.square().sum()

    measured(model, to_log, (X, Y), loader=True).trace()


@pytest.mark.parametrize("m", [3, 4, 5])
def test_batches_as_wide_as_long(m: int) -> None:
    """With the default collate function all tensors have a row for each example, those that look like a mask too."""
    model = Made(
        lambda s, x, z: (s.b(torch.cat([x * s.w, z], 1)), (x * s.w).square().sum(1)), w=param(4), b=Linear(11, 3)
    ).double()

    def loss(model: Any, batch: Batch) -> Tensor:
        outputs, more = model(batch[0], batch[1])
        return F.cross_entropy(outputs, batch[2]) + more.mean()

    batch = numbers(m, 4), numbers(m, 7, seed=1), torch.arange(m) % 3
    loader = AdaptiveLoader(TensorDataset(*batch), batch_size=m, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    options: dict[str, Any] = {"min_batch_size": 2, "max_examples": None, "measure_every": 1}
    scheduler = BatchSizeScheduler(model, optimizer, loader, rule=rules.CABS(), **options)
    found = next(iter(loader))
    total = loss(model, tuple(found))
    total.backward()
    optimizer.step()
    scheduler.step(total)
    assert scheduler.last is not None
    expected = one_by_one(model, loss, batch)
    assert scheduler.last.variance == pytest.approx(float(expected.traces.sum()), rel=1e-6)


# -- mixtures that have no gradient, until they meet one


def losses(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def sinkhorn(model: Any, batch: Batch) -> Tensor:
    scores = model(batch[0])
    with torch.no_grad():
        q = scores.exp().T
        for _ in range(3):
            q = q / q.sum(1, keepdim=True)
            q = q / q.sum(0, keepdim=True)
    return -(q.T * scores.log_softmax(1)).sum(1).mean()


def centred(model: Any, batch: Batch) -> Tensor:
    scores = model(batch[0])
    teacher = (scores.detach() - scores.detach().mean(0)).softmax(-1)
    return -(teacher * scores.log_softmax(-1)).sum(1).mean()


def weighed_by_the_other(model: Any, batch: Batch) -> Tensor:
    one, other = losses(model, batch).mean(), model(batch[0]).square().mean()
    return one + other * (one / other).detach()


MIXED: dict[str, Loss] = {
    "weights by their mean": lambda m, b: (losses(m, b) * (b[0][:, 0] / b[0][:, 0].abs().mean())).mean(),
    "standardised advantages": lambda m, b: (losses(m, b) * (b[0][:, 0] - b[0][:, 0].mean()) / b[0][:, 0].std()).mean(),
    "targets less their mean": lambda m, b: F.mse_loss(m(b[0]), b[0][:, :3] - b[0][:, :3].mean(0)),
    "positives weighed by the batch": lambda m, b: F.binary_cross_entropy_with_logits(
        m(b[0])[:, 0], (b[1] > 0).double(), pos_weight=(b[1] <= 0).sum() / (b[1] > 0).sum()),
    "the ratio of two losses": weighed_by_the_other,
    "sinkhorn": sinkhorn,
    "a centred teacher": centred,
    "how often each class is there": lambda m, b: (losses(m, b) / torch.bincount(b[1], minlength=3)[b[1]]).mean(),
    "the mean of those above the mean": lambda m, b: (
        lambda own, k: (own * k).sum() / k.sum())(losses(m, b), losses(m, b) >= losses(m, b).mean()),
    "fourier transform over the batch": lambda m, b: torch.fft.fft(m(b[0]), dim=0).abs().sum(),
    "complex numbers": lambda m, b: (lambda z: (z - z.mean(0)).abs().sum())(torch.complex(m(b[0]), m(b[0]))),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_mixtures_are_warned_about_where_they_meet_a_gradient(name: str) -> None:
    with pytest.warns(UserWarning, match="one example depends on others"):
        measured(network(), MIXED[name], (X, Y), loader=True)


# -- sums divided by a count


def token_losses(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")


def squares(model: Any, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[2]).square()


def picked(batch: Batch) -> Tensor:
    return torch.where(batch[3], batch[1], -100)


COUNTED: dict[str, Loss] = {
    "tokens": lambda m, b: (token_losses(m, b) * b[3]).sum() / int(b[3].sum()),
    "tokens, by the inverse": lambda m, b: (token_losses(m, b) * b[3]).sum() * (1 / int(b[3].sum())),
    "tokens, at least one": lambda m, b: (token_losses(m, b) * b[3]).sum() / max(1, b[3].sum().item()),
    "tokens of several entries": lambda m, b: (squares(m, b) * b[3][..., None]).sum() / int(b[3].sum()),
    "boxes": lambda m, b: F.l1_loss(m(b[0])[b[3]], b[2][b[3]], reduction="none").sum() / int(b[3].sum()),
    "summed up before": lambda m, b: (squares(m, b) * b[3][..., None]).sum((1, 2)).sum() / int(b[3].sum()),
    "a loss that sums": lambda m, b: F.mse_loss(m(b[0])[b[3]], b[2][b[3]], reduction="sum") / len(b[2][b[3]]),
    "a mean over a batch of rows": lambda m, b: F.kl_div(
        m(b[0]).log_softmax(-1)[b[3]], b[2].softmax(-1)[b[3]], reduction="batchmean"),
    "positives, of all": lambda m, b: token_losses(m, b).square().sum() / max(1, int((b[3] & (b[1] > 0)).sum())),
    "smoothed labels": lambda m, b: F.cross_entropy(
        m(b[0]).transpose(1, 2), picked(b), label_smoothing=0.1, reduction="sum") / int(b[3].sum()),
    "not quite": lambda m, b: (token_losses(m, b) * b[3]).sum() / (MASK.sum() + 1e-8),
}  # fmt: skip


NOT_READ = {"summed up before", "a loss that sums", "a mean over a batch of rows", "positives, of all", "not quite"}
"""Counts that Python code was not given, or of something else than the entries: only some numbers give them away."""


@pytest.mark.parametrize("name", COUNTED)
def test_sums_divided_by_a_count_of_the_batch_are_warned_about(name: str) -> None:
    with pytest.warns(UserWarning, match="one example depends on others"):
        measured(network(), COUNTED[name], (ROWS, TARGETS, VALUES, MASK), loader=True)


@pytest.mark.parametrize("name", sorted(COUNTED.keys() - NOT_READ))
def test_also_where_the_count_happens_to_be_a_multiple_of_m(name: str) -> None:
    mask = MASK.clone()
    mask[2, 2] = False
    assert int(mask.sum()) == 20
    with pytest.warns(UserWarning, match="one example depends on others"):
        measured(network(), COUNTED[name], (ROWS, TARGETS, VALUES, mask), loader=True)


def per_example(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(1) / mask.sum(1)


APART: dict[str, Loss] = {
    "a number of slots": lambda m, b: (token_losses(m, b) * b[3]).sum() / (len(b[0]) * T),
    "a number of examples": lambda m, b: (token_losses(m, b) * b[3]).sum() / len(b[0]),
    "each example's own count": lambda m, b: per_example(token_losses(m, b), b[3]).mean(),
    "each example's own weights": lambda m, b: (
        token_losses(m, b) * (b[2][..., 0].abs() / b[2][..., 0].abs().sum(1, keepdim=True))).sum(1).mean(),
    "a detached teacher": lambda m, b: (m(b[0]).log_softmax(-1) * m(2 * b[0]).detach().softmax(-1)).sum((1, 2)).mean(),
    "a count that is only looked at": lambda m, b: per_example(
        token_losses(m, b), b[3]).mean() + 0.0 * float(int(b[3].sum()) > 7),
    "a hinge": lambda m, b: squares(m, b).sub(0.5).relu().sum() / len(b[0]),
    "cut at the longest": lambda m, b: per_example(
        token_losses(m, b)[:, : int(b[3].sum(1).max())], b[3][:, : int(b[3].sum(1).max())]).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_nothing_is_said_where_examples_keep_to_themselves(name: str) -> None:
    model, batch = network(), (ROWS, TARGETS, VALUES, MASK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variance = measured(model, APART[name], batch, loader=True)
    assert_equal(variance, one_by_one(model, APART[name], batch))
