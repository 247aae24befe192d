"""Small data and gain per second: the formulas beside brute force and simulation."""

import math

import numpy as np
import pytest
from quadratic import problems

from cabs.rules import CABS, Estimates


def estimates(m_cabs: float, **more: object) -> Estimates:
    """An α, a tr Σ and an F whose α tr Σ / F is ``m_cabs``."""
    return Estimates(loss=2.0, learning_rates=(0.1,), variances=(20 * m_cabs,), **more)  # type: ignore[arg-type]


def best(m_cabs: float, c0: float = 0.0, c1: float = 1.0, size: float = math.inf) -> float:
    """The m with the greatest E[G] / (c0 + c1 m), E[G] = 1 − m_cabs/2m · (1 − m/M), by trying."""
    m = np.geomspace(0.5, 1e5, 400_001)
    m = m[m <= size]
    return float(m[np.argmax((1 - m_cabs / (2 * m) * (1 - m / size)) / (c0 + c1 * m))])


@pytest.mark.parametrize("m_cabs", [3.0, 40.0, 1000.0])
@pytest.mark.parametrize("c0", [0.0, 5.0, 300.0])
@pytest.mark.parametrize("size", [math.inf, 200.0, 5000.0])
def test_options_compose_to_the_best_gain_per_cost(m_cabs: float, c0: float, size: float) -> None:
    known = None if math.isinf(size) else int(size)
    rule = CABS(cost=(c0, 1.0), small_data=True)
    assert rule(estimates(m_cabs, dataset_size=known)) == pytest.approx(best(m_cabs, c0, 1.0, size), rel=1e-3)


def test_small_data_by_hand() -> None:
    rule = CABS(small_data=True)
    sizes = [rule(estimates(m, dataset_size=100)) for m in (50, 100, 200, 400, math.inf)]
    assert sizes == pytest.approx([40, 200 / 3, 100, 100, 100])
    assert rule(estimates(50)) == CABS()(estimates(50, dataset_size=100)) == 50


def test_batches_without_replacement_vary_less() -> None:
    """The variance that the correction rests on, Σ/m · (M − m)/(M − 1), by drawing."""
    generator = np.random.default_rng(0)
    gradients = generator.normal(size=(60, 5)) * np.arange(1, 6)
    trace = float(gradients.var(axis=0).sum())
    for m in (6, 30, 54):
        means = np.array([gradients[generator.permutation(60)[:m]].mean(axis=0) for _ in range(4000)])
        assert means.var(axis=0).sum() == pytest.approx(trace / m * (60 - m) / 59, rel=0.1)


def test_gain_per_second_by_hand() -> None:
    rule = CABS(cost=(96.0, 1.0))
    assert rule(estimates(8)) == pytest.approx(4 * (1 + 5))
    assert CABS(cost=(0.0, 3.0))(estimates(8)) == pytest.approx(8)
    assert CABS(cost=(1.0, 0.0))(estimates(8)) == math.inf
    assert CABS(cost=(1.0, 0.0), small_data=True)(estimates(8, dataset_size=70)) == 70
    assert rule(estimates(0)) == 0


def test_measured_cost_counts_examples_until_it_is_known() -> None:
    rule = CABS(cost="measured")
    assert rule.times_steps
    assert not CABS().times_steps
    assert not CABS(cost=(1.0, 1.0)).times_steps
    assert rule(estimates(8)) == 4  # a share of one half
    assert CABS(cost="measured", noise_share=0.25)(estimates(8)) == 8
    assert rule(estimates(64, step_cost=(0.96, 0.01))) == nearest_of_eight(16 * (1 + math.sqrt(1 + 6)))


def nearest_of_eight(m: float) -> float:
    """Of the sizes that recur, eight an octave."""
    return min((2 ** (k / 8) for k in range(100)), key=lambda size: abs(math.log(size / m)))


def test_a_measured_cost_takes_examples_that_cost_next_to_nothing() -> None:
    rule, told = CABS(cost="measured"), CABS(cost=(0.96, 0.01), noise_share=0.5)
    assert told(estimates(1)) == pytest.approx(0.25 * (1 + math.sqrt(1 + 4 * 96)))
    assert rule(estimates(1, step_cost=(0.96, 0.01))) == nearest_of_eight(24)
    assert rule(estimates(0, step_cost=(0.96, 0.01))) == nearest_of_eight(24)
    assert rule(estimates(40, step_cost=(0.96, 0.01))) == nearest_of_eight(told(estimates(40))) > 24
    assert rule(estimates(6, step_cost=(0.0, 0.01))) == nearest_of_eight(3)


def test_sizes_by_a_measured_cost_recur() -> None:
    """Eight an octave, none further from what was asked for than a sixteenth of an octave."""
    rule = CABS(cost="measured")
    sizes = {rule(estimates(m, step_cost=(0.0, 1.0))) for m in np.linspace(40, 79.9, 400)}
    assert len(sizes) == 9
    assert all(abs(math.log2(rule(estimates(m, step_cost=(0.0, 1.0))) / (m / 2))) <= 1 / 16 for m in (5, 17.3, 400))
    assert rule(estimates(math.inf, step_cost=(0.0, 1.0))) == math.inf


def test_trials_of_the_cost_are_no_smaller_than_the_papers_least_size() -> None:
    rule = CABS(cost="measured", noise_share=0.25)
    assert [rule(estimates(8, trial_factor=factor)) for factor in (1.0, 2.0, 4.0)] == [16, 32, 64]
    assert rule(estimates(40, trial_factor=2.0)) == 80
    assert rule(estimates(8, trial_factor=2.0, bounds=(2, 12))) == 6
    assert CABS()(estimates(8, trial_factor=2.0)) == 8


@pytest.mark.parametrize(("share", "mean", "worst"), [(0.25, 1.05, 1.3), (0.5, 1.02, 1.2)])
def test_gain_per_second_replaces_the_minimum_set_by_hand(share: float, mean: float, worst: float) -> None:
    """A step costs as much as 1000 examples: nearly as good as CABS with the least size that was best, afterwards."""
    ratios = []
    for problem in problems((10_000,)):
        by_hand = min(problem.run(CABS(), least=least, c0=1000)[0] for least in (2, 64, 128, 256, 512))
        ratios.append(problem.run(CABS(cost=(1000.0, 1.0), noise_share=share), least=2, c0=1000)[0] / by_hand)
    assert np.exp(np.mean(np.log(ratios))) < mean
    assert max(ratios) < worst


@pytest.mark.parametrize(
    "cost", ["seconds", (1.0,), (-1.0, 1.0), (0.0, 0.0), (math.nan, 1.0), (1.0, math.inf), None, [1.0, 2.0]]
)
def test_nonsense_costs_are_refused(cost: object) -> None:
    with pytest.raises(ValueError, match="cost is"):
        CABS(cost=cost)  # type: ignore[arg-type]
