"""Algorithm 1 worked by hand on least squares, with nothing of the library in the hand's work."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, rules

ALPHA, MU, LEAST, MOST = 0.06, 0.95, 3, 60


def data(examples: int = 400) -> tuple[list[tuple[float, float]], list[float]]:
    draw = random.Random(1)
    tails = [draw.expovariate(1) for _ in range(examples)]
    points = [(tail * draw.gauss(0, 1), tail * draw.gauss(0, 1.5)) for tail in tails]
    return points, [1.5 * a - 0.5 * b + draw.gauss(0, 0.7) for a, b in points]


def algorithm_1(steps: int, rule: str = "cabs") -> tuple[list[int], list[float]]:
    """Line by line: w, m, F_avg, ξ and for the competitor the average of ‖g‖²; plain Python floats."""
    points, targets = data()
    w, m, f_avg, xi, g_avg = [0.0, 0.0], LEAST, 0.0, 0.0, 0.0
    sizes, position = [m], 0
    for _ in range(steps):
        batch = [(position + i) % len(points) for i in range(m)]
        position += m
        residuals = [w[0] * points[i][0] + w[1] * points[i][1] - targets[i] for i in batch]
        gradients = [(2 * r * points[i][0], 2 * r * points[i][1]) for r, i in zip(residuals, batch, strict=True)]
        f = sum(r * r for r in residuals) / m
        g = [sum(pair[k] for pair in gradients) / m for k in (0, 1)]
        s = [sum(pair[k] ** 2 for pair in gradients) / m - g[k] ** 2 for k in (0, 1)]
        w = [w[k] - ALPHA * g[k] for k in (0, 1)]
        xi = MU * xi + (1 - MU) * (s[0] + s[1])
        f_avg = MU * f_avg + (1 - MU) * f
        g_avg = MU * g_avg + (1 - MU) * (g[0] ** 2 + g[1] ** 2)
        size = ALPHA * xi / f_avg if rule == "cabs" else xi / (0.7**2 * g_avg)
        m = max(LEAST, min(MOST, int(size + 0.5)))
        sizes.append(m)
    return sizes, w


def by_library(steps: int, rule: rules.Rule) -> tuple[list[int], list[float]]:
    points, targets = data()
    dataset = TensorDataset(torch.tensor(points, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64))
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=ALPHA)
    loader = AdaptiveLoader(dataset, batch_size=LEAST, stream=True)
    options = {"min_batch_size": LEAST, "max_batch_size": MOST, "smoothing": MU}
    if isinstance(rule, rules.CABS):
        scheduler: BatchSizeScheduler = CABS(model, optimizer, loader, **options)  # type: ignore[arg-type]
    else:
        scheduler = BatchSizeScheduler(model, optimizer, loader, rule, **options)  # type: ignore[arg-type]
    sizes = [loader.batch_size]
    for (inputs, labels), _ in zip(loader, range(steps), strict=False):
        loss = (model(inputs).squeeze(1) - labels).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        assert len(inputs) == sizes[-1]
        sizes.append(loader.batch_size)
    return sizes, model.weight.flatten().tolist()


@pytest.mark.parametrize(("name", "rule"), [("cabs", rules.CABS()), ("competitor", rules.NormTest(0.7))])
def test_the_same_sizes_to_the_integer(name: str, rule: rules.Rule) -> None:
    expected, weights = algorithm_1(120, name)
    sizes, ours = by_library(120, rule)
    assert sizes == expected
    assert ours == pytest.approx(weights, rel=1e-9)
    assert len(set(sizes)) > 5, "a trace that never moves shows nothing"
