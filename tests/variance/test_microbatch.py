"""The estimator that compares whole passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cabs import CABS, AdaptiveLoader, GradientVariance
from cases import CASES, ConvNet, losses
from compare import by_loop, trained

NAMES = {str(case): case for case in CASES}


def gradient(model: nn.Module, inputs: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(losses(model(inputs)).mean(), trained(model))])


def accumulate(model: nn.Module, microbatches: list[Tensor], **options: object) -> GradientVariance:
    examples = sum(map(len, microbatches))
    model.zero_grad()
    with GradientVariance(model, "microbatch", **options) as variance:  # type: ignore[arg-type]
        for microbatch in microbatches:
            (losses(model(microbatch)).sum() / examples).backward()
    return variance


@pytest.mark.parametrize("name", ["mlp", "tied, by module", "lstm", "convolutional network"])
def test_equal_microbatches(name: str) -> None:
    """tr Σ = b · K/(K−1) · (mean‖g_k‖² − ‖g‖²), to the letter."""
    model, inputs = NAMES[name].make(12)
    microbatches = list(inputs.split(3))
    norms = torch.stack([gradient(model, microbatch).square().sum() for microbatch in microbatches])
    whole = gradient(model, inputs).square().sum()
    variance = accumulate(model, microbatches)
    torch.testing.assert_close(variance.mean_squared_norm, whole)
    torch.testing.assert_close(variance.trace(), 3 * 4 / 3 * (norms.mean() - whole))
    assert variance.examples == 12


def test_one_example_a_piece_is_the_unbiased_sample_variance() -> None:
    model, inputs = NAMES["mlp"].make(7)
    variance = accumulate(model, list(inputs.split(1)))
    torch.testing.assert_close(variance.trace(), by_loop(model, inputs).trace * 7 / 6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 5, 4), (1, 11), (2, 2, 7, 1)])
def test_unequal_microbatches_have_no_bias(sizes: tuple[int, ...]) -> None:
    model = nn.Linear(3, 1, bias=False).double()
    population = torch.randn(64, 3, dtype=torch.float64)
    truth = by_loop(model, population).trace
    found = []
    for _ in range(400):
        batch = population[torch.randint(0, 64, (12,))]
        found.append(accumulate(model, list(batch.split(sizes))).trace())
    spread = torch.stack(found).std() / len(found) ** 0.5
    assert abs(torch.stack(found).mean() - truth) < 4 * spread


def test_only_some_of_the_microbatches() -> None:
    model, inputs = NAMES["mlp"].make(12)
    microbatches = list(inputs.split(3))
    norms = torch.stack([gradient(model, microbatch).square().sum() for microbatch in microbatches[:2]])
    whole = gradient(model, inputs).square().sum()
    variance = accumulate(model, microbatches, max_examples=6)
    torch.testing.assert_close(variance.trace(), (norms.mean() - whole) / (1 / 3 - 1 / 12))


def test_a_penalty_cancels() -> None:
    model, inputs = NAMES["mlp"].make(8)
    plain = accumulate(model, list(inputs.split(2)))
    model.zero_grad()
    with GradientVariance(model, "microbatch") as variance:
        for microbatch in inputs.split(2):
            penalty = sum(p.square().sum() for p in model.parameters())
            ((losses(model(microbatch)).mean() + penalty) / 4).backward()
    torch.testing.assert_close(variance.trace(), plain.trace())


def test_groups_and_batch_norm() -> None:
    model = ConvNet(nn.BatchNorm2d).double()
    inputs = torch.randn(12, 2, 8, 8, dtype=torch.float64)
    parameters = trained(model)
    variance = accumulate(model, list(inputs.split(4)), groups=[parameters[:2], parameters[2:]])
    assert variance.traces().shape == (2,)
    torch.testing.assert_close(variance.traces().sum(), variance.trace())


def test_one_pass_is_refused() -> None:
    model, inputs = NAMES["mlp"].make(4)
    with pytest.raises(RuntimeError, match="at least two"):
        accumulate(model, [inputs]).trace()
    with pytest.raises(RuntimeError, match="single examples"):
        accumulate(model, [inputs]).squared_norms()


def test_drives_the_scheduler() -> None:
    x = torch.randn(256, 5)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    scheduler = CABS(model, optimizer, loader, estimator="microbatch", max_batch_size=128)
    for (inputs,) in loader:
        optimizer.zero_grad()
        microbatches = inputs.chunk(4)
        total = 0.0
        for microbatch in microbatches:
            loss = losses(model(microbatch)).sum() / len(inputs)
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step(total)
    assert scheduler.last is not None
    assert scheduler.last.variance > 0
