"""The rules beside the paper's equations."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cabs.rules import CABS, Constant, Estimates, GainPerCost, NormTest, round_and_clip

positive = st.floats(1e-6, 1e6)


@st.composite
def estimates(draw: st.DrawFn) -> Estimates:
    groups = draw(st.integers(1, 3))
    some = st.tuples(*[positive] * groups)
    return Estimates(
        loss=draw(positive),
        learning_rates=draw(some),
        variances=draw(some),
        gradient_norms_squared=draw(some),
        true_gradient_norms_squared=draw(some),
    )


def one_group(alpha: float = 0.1, variance: float = 30.0, loss: float = 2.0, norm: float = 0.5) -> Estimates:
    return Estimates(
        loss=loss,
        learning_rates=(alpha,),
        variances=(variance,),
        gradient_norms_squared=(norm,),
        true_gradient_norms_squared=(norm,),
    )


def test_cabs_is_alpha_trace_over_loss() -> None:
    assert CABS()(one_group()) == pytest.approx(0.1 * 30 / 2)


def test_cabs_with_a_floor() -> None:
    assert CABS(loss_floor=1.5)(one_group()) == pytest.approx(0.1 * 30 / 0.5)
    assert CABS(loss_floor=-1.0)(one_group(loss=-0.5)) == pytest.approx(0.1 * 30 / 0.5)


def test_norm_test_does_not_know_the_learning_rate() -> None:
    assert NormTest(0.8)(one_group()) == pytest.approx(30 / (0.64 * 0.5))
    assert NormTest(0.8)(one_group(alpha=7)) == NormTest(0.8)(one_group())


def test_gain_per_cost() -> None:
    assert GainPerCost(4.0)(one_group()) == pytest.approx(2 * 4 * 0.1 / (2 - 4 * 0.1) * 30 / 0.5)


def test_gain_per_cost_is_the_best_batch_size() -> None:
    """No other m has a larger E[G]/m (eq:expected_gain, eq:cost_sensitive_gain_maximization)."""
    alpha, variance, norm, lipschitz = 0.1, 30.0, 0.5, 4.0

    def gain_per_cost(m: float) -> float:
        return ((alpha - lipschitz * alpha**2 / 2) * norm - lipschitz * alpha**2 / (2 * m) * variance) / m

    best = GainPerCost(lipschitz)(one_group(alpha, variance, norm=norm))
    assert all(gain_per_cost(best) > gain_per_cost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_gain_per_cost_refuses_rates_that_cannot_gain() -> None:
    with pytest.raises(ValueError, match=r"2/L"):
        GainPerCost(4.0)(one_group(alpha=0.5))


def test_no_signal_asks_for_everything_and_no_noise_for_nothing() -> None:
    assert NormTest()(one_group(norm=0.0)) == math.inf
    assert NormTest()(one_group(norm=0.0, variance=0.0)) == 0
    assert GainPerCost(1.0)(one_group(norm=-1.0)) == math.inf


def test_constant() -> None:
    assert Constant(48)(one_group()) == 48
    assert not Constant(48).measures


@given(estimates(), positive)
def test_cabs_is_blind_to_the_unit_of_the_loss(given: Estimates, unit: float) -> None:
    """F in another unit makes gradients u times, variances u² times as large, and wants α / u."""
    scaled = replace(
        given,
        loss=unit * given.loss,
        learning_rates=tuple(alpha / unit for alpha in given.learning_rates),
        variances=tuple(unit**2 * v for v in given.variances),
    )
    assert CABS()(scaled) == pytest.approx(CABS()(given), rel=1e-9)


@given(estimates(), st.floats(1, 1e3))
def test_cabs_grows_with_the_learning_rate(given: Estimates, factor: float) -> None:
    faster = replace(given, learning_rates=tuple(factor * alpha for alpha in given.learning_rates))
    assert CABS()(faster) == pytest.approx(factor * CABS()(given))


@given(estimates(), st.floats(1, 1e3))
def test_every_rule_grows_with_the_variance(given: Estimates, factor: float) -> None:
    noisier = replace(given, variances=tuple(factor * v for v in given.variances))
    lipschitz = 1 / max(given.learning_rates)
    for rule in (CABS(), NormTest(0.7), GainPerCost(lipschitz)):
        assert rule(noisier) == pytest.approx(factor * rule(given))


@given(estimates())
def test_groups_with_one_rate_are_one_group(given: Estimates) -> None:
    alpha = given.learning_rates[0]
    alike = replace(given, learning_rates=(alpha,) * len(given.variances))
    merged = Estimates(
        loss=given.loss,
        learning_rates=(alpha,),
        variances=(sum(given.variances),),
        gradient_norms_squared=(sum(given.gradient_norms_squared),),
        true_gradient_norms_squared=(sum(given.true_gradient_norms_squared),),
    )
    for rule in (CABS(), NormTest(0.7), GainPerCost(1 / alpha)):
        assert rule(alike) == pytest.approx(rule(merged), rel=1e-9)


@given(st.floats(0, 1e9) | st.just(math.inf), st.integers(2, 100), st.integers(0, 1000))
def test_sizes_stay_within_bounds(size: float, least: int, span: int) -> None:
    clipped = round_and_clip(size, least, least + span)
    assert least <= clipped <= least + span
    if least <= size <= least + span:
        assert abs(clipped - size) <= 0.5


def test_rounding() -> None:
    assert [round_and_clip(x, 2, 10) for x in (2.4, 2.5, 3.5, 9.99, 1.0, 99.0)] == [2, 3, 4, 10, 2, 10]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: NormTest(0.0), "theta"),
        (lambda: NormTest(-1.0), "theta"),
        (lambda: NormTest(math.nan), "theta"),
        (lambda: GainPerCost(0.0), "lipschitz"),
        (lambda: CABS(loss_floor=math.inf), "loss_floor"),
        (lambda: Constant(0), "batch_size"),
        (lambda: Constant(True), "batch_size"),
    ],
)
def test_bad_settings_are_refused(make: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()  # type: ignore[operator]
