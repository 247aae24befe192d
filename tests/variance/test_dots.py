"""Var_i⟨g_i, g⟩ against the loop over single examples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cabs import AdaptiveLoader, BatchSizeScheduler, GradientVariance, rules
from cases import CASES, Case, losses
from compare import trained


def by_loop(model: nn.Module, inputs: Tensor, dim: int) -> Tensor:
    rows = []
    for example in range(inputs.shape[dim]):
        loss = losses(model(inputs.narrow(dim, example, 1)), dim).sum()
        gradients = torch.autograd.grad(loss, trained(model), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([gradient.to_dense().flatten() for gradient in gradients]))
    gradients = torch.stack(rows)
    return (gradients @ gradients.mean(0)).var(correction=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_against_the_loop(case: Case) -> None:
    torch.manual_seed(1)
    model, inputs = case.make(5)
    expected = by_loop(model, inputs, case.dim)
    variance = GradientVariance(model, batch_dim=case.dim)
    variance.measures_dots = True
    model.zero_grad()
    with variance:
        losses(model(inputs), case.dim).mean().backward()
    torch.testing.assert_close(variance.dot_variance(), expected, rtol=1e-8, atol=1e-10)


def linear() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(), torch.randn(7, 4, dtype=torch.float64)


def test_sums_scales_and_some_of_the_examples() -> None:
    model, inputs = linear()
    expected = by_loop(model, inputs, 0)
    summed = GradientVariance(model, reduction="sum")
    summed.measures_dots = True
    with summed:
        losses(model(inputs)).sum().backward()
    torch.testing.assert_close(summed.dot_variance(), expected)
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled = GradientVariance(model, grad_scaler=scaler)
    scaled.measures_dots = True
    with scaled:
        scaler.scale(losses(model(inputs)).mean()).backward()
    torch.testing.assert_close(scaled.dot_variance(), expected)
    model.zero_grad()
    some = GradientVariance(model, max_examples=3)
    some.measures_dots = True
    with some:
        losses(model(inputs)).mean().backward()
    assert 0 < some.dot_variance() < 100 * expected


def test_what_cannot_be_is_refused() -> None:
    model, inputs = linear()
    variance = GradientVariance(model)
    with variance:
        losses(model(inputs)).mean().backward()
    with pytest.raises(RuntimeError, match="measures_dots"):
        variance.dot_variance()


def test_several_passes() -> None:
    """Of different numbers of examples; clipped afterwards."""
    model, inputs = linear()
    expected = by_loop(model, inputs, 0)
    variance = GradientVariance(model)
    variance.measures_dots = True
    model.zero_grad()
    with variance:
        for part in (inputs[:2], inputs[2:3], inputs[3:]):
            (losses(model(part)).sum() / len(inputs)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(variance.dot_variance(), expected)


def test_single_precision() -> None:
    model, inputs = linear()
    expected = by_loop(model, inputs, 0)
    model.float()
    variance = GradientVariance(model)
    variance.measures_dots = True
    model.zero_grad()
    with variance:
        losses(model(inputs.float())).mean().backward()
    torch.testing.assert_close(variance.dot_variance(), expected, rtol=1e-4, atol=0)


def test_the_scheduler_averages_it_and_asks_the_rule() -> None:
    """With no smoothing the size is that of the single gradients of the batch."""
    model, _ = linear()
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(200, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 2, (200,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(TensorDataset(x, y), batch_size=16, shuffle=True, seed=0, stream=True)
    rule = rules.InnerProductTest(0.9, 1.0)
    scheduler = BatchSizeScheduler(model, optimizer, loader, rule, min_batch_size=2, smoothing=0.0, measure_every=1)
    for (inputs, targets), _ in zip(loader, range(5), strict=False):
        rows = []
        for one, target in zip(inputs, targets, strict=True):
            gradients = torch.autograd.grad(F.cross_entropy(model(one[None]), target[None]), list(model.parameters()))
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
        single = torch.stack(rows)
        g = single.mean(0)
        norm, along = g @ g, (single @ g).var(correction=0)
        trace = single.var(0, correction=0).sum()
        expected = max(along / (0.81 * norm**2), (trace - along / norm) / norm)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        assert scheduler.last is not None
        assert scheduler.last.raw_batch_size == pytest.approx(float(expected))
    state = scheduler.state_dict()
    scheduler.load_state_dict(state)
    assert scheduler.state_dict() == state
    scheduler.close()
    other = BatchSizeScheduler(model, optimizer, loader, rules.NormTest(), min_batch_size=2)
    with pytest.raises(ValueError, match="another kind of rule"):
        other.load_state_dict(state)


def test_the_scheduler_refuses_what_it_is_not_measured_with() -> None:
    model, _ = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(50, 4, dtype=torch.float64), torch.zeros(50, dtype=torch.long))
    with pytest.raises(NotImplementedError, match="not with estimator='paper'"):
        BatchSizeScheduler(model, optimizer, AdaptiveLoader(data, 16), rules.InnerProductTest(), estimator="paper")
