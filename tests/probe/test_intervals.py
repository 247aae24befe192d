"""Intervals hold the true value as often as they say, also where a gradient can hardly be told from noise."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from scipy.stats import t as student_t

from cabs.probe.intervals import Interval, inverse, jackknife, positive, student
from cabs.probe.noise import Gradients, conclude, mean_without


@pytest.mark.parametrize("freedom", [7, 15, 31, 200])
def test_the_quantile_is_students(freedom: int) -> None:
    assert student(freedom) == pytest.approx(student_t.ppf(0.975, freedom), rel=2e-3)


def test_of_a_mean_the_jackknife_is_the_usual_interval() -> None:
    numbers = torch.randn(20).add(3).tolist()
    found = jackknife(lambda k: mean_without(numbers, k), len(numbers))
    assert found.value == pytest.approx(fmean(numbers))
    assert found.high - found.value == pytest.approx(student(19) * stdev(numbers) / math.sqrt(20))


def test_what_cannot_be_negative_has_no_negative_interval() -> None:
    numbers = torch.rand(9).pow(8).tolist()
    assert positive(lambda k: mean_without(numbers, k), 9).low > 0
    assert positive(lambda k: 0.0, 9) == Interval(0.0, 0.0, 0.0)


def test_the_inverse_of_what_may_be_nothing_has_no_upper_end() -> None:
    assert inverse(Interval(0.5, 0.25, 1.0)) == Interval(2.0, 1.0, 4.0)
    assert inverse(Interval(0.5, -0.1, 1.0)) == Interval(2.0, 1.0, math.inf)
    assert inverse(Interval(-0.3, -0.8, 0.2)) == Interval(math.inf, 2.0, math.inf)
    assert inverse(Interval(-0.3, -0.5, -0.05)) == Interval(math.inf, 4.0, math.inf)


def simulated(gradient: torch.Tensor, deviations: torch.Tensor, batches: int, size: int, between: bool) -> Gradients:
    """What batches would show whose single gradients are normal."""
    examples = gradient + deviations * torch.randn(batches, size, len(gradient), dtype=torch.float64)
    means = examples.mean(1)
    mean = means.mean(0)
    within = [] if between else examples.var(1).sum(-1).tolist()
    squares, dots = means.square().sum(-1).tolist(), (means @ mean).tolist()
    return Gradients(size, within, squares, dots, float(mean @ mean))


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("scale", [1.0, 100.0, 3000.0])
def test_intervals_of_known_gradients_hold_them_95_times_in_100(scale: float, between: bool) -> None:
    """1,024 examples; noise scales far below that, below, and above."""
    trials, batches, size = 300, 32, 32
    deviations = torch.linspace(0.1, 2, 50, dtype=torch.float64)
    trace = float(deviations.square().sum())
    gradient = torch.randn(50, dtype=torch.float64)
    gradient *= math.sqrt(trace / scale) / gradient.norm()
    held = {"trace": 0, "noise scale": 0}
    for _ in range(trials):
        one = simulated(gradient, deviations, batches, size, between)
        found = conclude([one], [one], [1.0] * batches, [0.1])
        held["trace"] += found.trace.low <= trace <= found.trace.high
        held["noise scale"] += found.noise_scale.low <= scale <= found.noise_scale.high
    # 95% of 300 is 285; fewer than 272 or more than 296 would come about once in a thousand times.
    assert 272 <= held["trace"] <= 297
    assert held["noise scale"] >= 270
