"""tr Σ, the noise scale and α tr(PΣ) of a probe beside their definitions, on a problem that is known."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cabs import probe
from cabs.couplings import Coupled, coupling_of
from cabs.probe.noise import Noise, measure
from cabs.probe.task import Task


class Location(nn.Module):
    """½‖w − x‖² of each example: its gradient is w − x, so that Σ is the covariance of the data."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((features,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x - self.w).square().sum(1)


def located(examples: int = 500, features: int = 6) -> tuple[Location, TensorDataset, float, float, float]:
    """A model and its data, with tr Σ, the noise scale and F of them."""
    x = torch.randn(examples, features) * torch.linspace(0.5, 2, features)
    model = Location(features)
    trace = x.var(0, unbiased=False).sum().item()
    signal = (model.w.detach() - x.mean(0)).square().sum().item()
    return model, TensorDataset(x), trace, trace / signal, model(x).mean().item()


def measured(model: nn.Module, dataset: TensorDataset, optimizer: Any, estimator: str, **options: Any) -> Noise:
    task = Task(model, dataset, lambda batch: model(batch[0]).mean())
    groups = [list(group["params"]) for group in optimizer.param_groups]
    given = {"examples": 256, "size": 16, "loss_floor": 0.0, "weighed": True, **options}
    return measure(task, Coupled(optimizer, coupling_of(optimizer)), groups, estimator=estimator, **given)


@pytest.mark.parametrize("estimator", ["exact", "microbatch"])
def test_intervals_hold_the_known_values(estimator: str) -> None:
    model, dataset, trace, scale, loss = located()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trials, held = 60, [0, 0, 0, 0]
    for seed in range(trials):
        torch.manual_seed(seed)
        found = measured(model, dataset, optimizer, estimator)
        truths = (trace, scale, loss, 0.1 * trace / loss)
        intervals = (found.trace, found.noise_scale, found.loss, found.size)
        for number, (truth, one) in enumerate(zip(truths, intervals, strict=True)):
            assert one is not None
            held[number] += one.low <= truth <= one.high
    # 57 expected; 51 or fewer of 60 come about once in a hundred times.
    assert min(held) >= 51, held


@pytest.mark.parametrize("estimator", ["exact", "microbatch"])
def test_many_examples_come_close(estimator: str) -> None:
    model, dataset, trace, scale, loss = located()
    found = measured(model, dataset, torch.optim.SGD(model.parameters(), lr=0.1), estimator, examples=16_000, size=50)
    assert found.trace.value == pytest.approx(trace, rel=0.05)
    assert found.noise_scale.value == pytest.approx(scale, rel=0.12)
    assert found.loss.value == pytest.approx(loss, rel=0.05)
    assert found.examples == 16_000


@pytest.mark.parametrize("estimator", ["exact", "microbatch"])
def test_p_weighs(estimator: str) -> None:
    model, dataset, _, _, loss = located()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    p = torch.linspace(0.2, 3, 6)
    # P = 1/(√v̂ + ε): a state whose P is known
    optimizer.state[model.w] = {
        "step": torch.tensor(10_000_000.0),
        "exp_avg": torch.zeros(6),
        "exp_avg_sq": (1 / p - 1e-8).square(),
    }
    found = measured(model, dataset, optimizer, estimator, examples=16_000, size=50)
    weighted = (p * dataset.tensors[0].var(0, unbiased=False)).sum().item()
    assert found.coupled is not None
    assert found.coupled.value == pytest.approx(0.02 * weighted, rel=0.05)
    assert found.size is not None
    assert found.size.value == pytest.approx(0.02 * weighted / loss, rel=0.06)


def test_groups_have_their_own_learning_rates() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    dataset = TensorDataset(torch.randn(200, 5), torch.randint(0, 3, (200,)))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups)
    rows = []
    for x, y in zip(*dataset.tensors, strict=True):
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()
        rows.append([torch.cat([p.grad.flatten() for p in layer.parameters()]) for layer in (model[0], model[2])])
    first, second = (torch.stack(part).var(0, unbiased=False).sum().item() for part in zip(*rows, strict=True))
    task = Task(model, dataset, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    found = measure(
        task,
        Coupled(optimizer, coupling_of(optimizer)),
        [list(group["params"]) for group in optimizer.param_groups],
        examples=8000,
        size=40,
        estimator="exact",
        loss_floor=0.0,
        weighed=True,
    )
    assert found.trace.value == pytest.approx(first + second, rel=0.05)
    assert found.coupled is not None
    assert found.coupled.value == pytest.approx(0.5 * first + 0.01 * second, rel=0.05)


def test_without_noise_there_is_none() -> None:
    model = Location(3)
    found = measured(model, TensorDataset(torch.ones(10, 3)), torch.optim.SGD(model.parameters(), lr=0.1), "exact")
    assert found.trace.value == pytest.approx(0, abs=1e-9)
    assert found.size is not None
    assert found.size.value == pytest.approx(0, abs=1e-9)


def test_adam_before_its_first_step_has_the_p_of_gradients_at_these_weights() -> None:
    """P = 1/√E g² of batches of the present size, which is known here: (∇F² + σ²/m)^-1/2."""
    model, dataset, _, _, loss = located()
    x, w = dataset.tensors[0], model.w.detach()
    sizes = []
    for present in (16, 64):
        second_moment = (w - x.mean(0)).square() + x.var(0, unbiased=False) / present
        expected = 0.01 * (x.var(0, unbiased=False) / second_moment.sqrt()).sum().item() / loss
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        report = probe(
            model, dataset, lambda b: model(b[0]).mean(), optimizer, batch_size=present, seconds=0.1, max_batch_size=64
        )
        assert report.filled == 32
        assert report.cabs_batch_size is not None
        assert report.cabs_batch_size.value == pytest.approx(expected, rel=0.15)
        sizes.append(report.cabs_batch_size.value)
    assert all(small < large for small, large in pairwise(sizes))
