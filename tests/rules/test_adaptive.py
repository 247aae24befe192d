"""The rules beside the paper's equations."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cabs.rules import (
    CABS,
    Constant,
    Estimates,
    GainPerCost,
    Horizon,
    InnerProductTest,
    NoiseScale,
    NormTest,
    noise_share,
    round_and_clip,
)

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


def test_noise_scale_is_trace_over_the_true_gradient() -> None:
    """Both averaged first, all groups together: (30 + 10) / (0.5 + 0.3)."""
    two = Estimates(loss=1.0, learning_rates=(0.1, 7.0), variances=(30.0, 10.0), true_gradient_norms_squared=(0.5, 0.3))
    assert NoiseScale()(two) == pytest.approx(50)
    assert NoiseScale()(replace(two, true_gradient_norms_squared=(0.5, -0.6))) == math.inf


def test_inner_product_test_beside_single_gradients() -> None:
    """From g_i themselves: along g the variance of ⟨g_i, g⟩, across it what the projection leaves."""
    gradients = [(3.0, 1.0), (1.0, -2.0), (2.0, 4.0), (2.0, 1.0)]
    g = (2.0, 1.0)
    norm = 5.0
    dots = [x * g[0] + y * g[1] for x, y in gradients]
    assert dots == [7, 0, 8, 5]
    along = sum((d - norm) ** 2 for d in dots) / 4
    rest = [(x - d / norm * g[0], y - d / norm * g[1]) for (x, y), d in zip(gradients, dots, strict=True)]
    across = sum(x**2 + y**2 for x, y in rest) / 4
    trace = sum((x - g[0]) ** 2 + (y - g[1]) ** 2 for x, y in gradients) / 4
    seen = replace(one_group(variance=trace, norm=norm), dot_variance=along)
    assert InnerProductTest(0.9, None)(seen) == pytest.approx(along / (0.81 * 25))
    assert InnerProductTest(0.9, 0.1)(seen) == pytest.approx(across / (0.01 * 5))
    assert InnerProductTest()(seen) == pytest.approx(max(along / (0.81 * 25), across / (5.84**2 * 5)))
    assert InnerProductTest(0.9, None)(seen) <= NormTest(0.9)(seen)
    with pytest.raises(ValueError, match="not measured here"):
        InnerProductTest()(one_group())


def test_another_noise_share() -> None:
    assert CABS(noise_share=0.25)(one_group()) == CABS()(one_group())
    assert CABS(noise_share=1.0)(one_group()) == pytest.approx(0.1 * 30 / 2 / 4)


@given(estimates(), st.floats(0.01, 1))
def test_the_size_asked_for_has_the_share_asked_for(given: Estimates, share: float) -> None:
    size = CABS(noise_share=share)(given)
    unit = 10**6 / size  # sizes are integers: scale tr Σ so that rounding is nothing
    scaled = replace(given, variances=tuple(unit * v for v in given.variances), batch_size=10**6)
    assert noise_share(scaled) == pytest.approx(share)


def test_noise_share_by_hand() -> None:
    assert noise_share(replace(one_group(), batch_size=5)) == pytest.approx(0.1 * 30 / (4 * 5 * 2))
    assert noise_share(replace(one_group(), batch_size=5), loss_floor=1.5) == pytest.approx(0.1 * 30 / (4 * 5 * 0.5))
    assert noise_share(replace(one_group(loss=0.0), batch_size=5)) == math.inf
    with pytest.raises(ValueError, match="batch_size is 0"):
        noise_share(one_group())


def test_horizon_by_hand() -> None:
    """α tr Σ / F = 15 and αh = α‖∇F‖²/2F = 0.1: noise / signal is ∛(αh · steps left · part left)."""
    rule = CABS(budget=1000, horizon="measured")
    given = replace(one_group(loss=0.2, norm=0.4), batch_size=10)
    # After 200 of 1000 there are 80 steps of 10; after 990 one; past the end each is the last.
    odds = {200: (0.1 * 80 * 0.8) ** (1 / 3), 990: (0.1 * 1 * 0.01) ** (1 / 3), 5000: (0.1 * 1 * 0.01) ** (1 / 3)}
    shares = {seen: odd / (1 + odd) * 0.95 for seen, odd in odds.items()}
    assert [round(share, 4) for share in shares.values()] == [0.6174, 0.0864, 0.0864]
    for seen, share in shares.items():
        assert rule.share(replace(given, examples_total=seen)) == pytest.approx(share)
    # 15 / (4 · 0.6174) = 6.07, of which 131 are in the 800 that are left.
    assert rule(replace(given, examples_total=200)) == pytest.approx(800 / 131)
    assert rule(replace(given, examples_total=5000)) == pytest.approx(15 / (4 * shares[5000]))


def test_the_smaller_share_of_the_two_by_hand() -> None:
    """α tr Σ / F = 15 and αh = 0.1, as above: 0.6 by examples at first, and the last steps go by what is measured."""
    rule, given = CABS(budget=1000), replace(one_group(loss=0.2, norm=0.4), batch_size=10)
    by_examples, measured = CABS(budget=1000, horizon=Horizon()), CABS(budget=1000, horizon="measured")
    shares = {200: 0.6, 700: 0.6 * (0.125 / 0.6) ** 0.25, 990: 0.0864, 5000: 0.0864}
    for seen, share in shares.items():
        now = replace(given, examples_total=seen)
        assert rule.share(now) == pytest.approx(share, abs=1e-4)
        assert rule.share(now) == min(by_examples.share(now), measured.share(now))
    assert rule(replace(given, examples_total=200)) == pytest.approx(800 / 128)  # 15 / (4 · 0.6) = 6.25
    # Long steps, αh = 0.9, are at rest at ρ = 0.55: 0.6 would not converge.
    long = replace(one_group(loss=0.2, norm=3.6), batch_size=10)
    assert rule.share(long) == measured.share(long) < 0.55 < by_examples.share(long)


def test_what_a_step_forgets_is_averaged_over_a_fifth_of_the_budget() -> None:
    rule = CABS(0.1, budget=1000, horizon="measured")
    given = replace(one_group(loss=0.3, norm=0.4), batch_size=100)
    kept = math.exp(-1 / 2)
    first = rule.remember(None, given)
    assert first == pytest.approx({"decrease": (1 - kept) * 0.04, "loss": (1 - kept) * 0.2})
    second = rule.remember(first, replace(given, true_gradient_norms_squared=(-4.0,)))
    assert second == pytest.approx({"decrease": (1 - kept) * (kept * 0.04 - 0.4), "loss": (1 - kept**2) * 0.2})
    assert rule.share(replace(given, memory=first)) == rule.share(given)  # both begin at 0, which cancels
    assert CABS(0.1, budget=1000).remember(None, given) == first
    assert CABS().remember(None, given) is None
    assert CABS(budget=1000, horizon=Horizon()).remember(None, given) is None
    for unknown in (rule, CABS(budget=1000)):
        with pytest.raises(ValueError, match="give a Horizon"):
            unknown.share(replace(given, true_gradient_norms_squared=()))


@given(positive, st.floats(-1e6, 1e6), st.integers(1, 10**6), st.integers(0, 10**7), st.integers(1, 10**6))
def test_the_share_stays_between_nothing_and_all(loss: float, norm: float, m: int, seen: int, budget: int) -> None:
    """Whatever is measured, ρ is below 1 − αh/2, where batches would not grow, and not 0 either."""
    estimates = replace(one_group(loss=loss, norm=norm), batch_size=m, examples_total=seen)
    rate = min(max(0.1 * norm / (2 * loss), m / budget), 1.0)
    measured = CABS(budget=budget, horizon="measured").share(estimates)
    assert 0 < measured < 1 - rate / 2
    assert 0 < CABS(budget=budget).share(estimates) <= min(measured, 0.6)


def test_a_horizon_of_ones_own_by_hand() -> None:
    """α tr Σ / F = 15: ρ is 0.6 until 600 of 1000, 0.6·(1/8 / 0.6)^¼ at 700, the root of 0.6/8 at 800, 1/8 at 1000."""
    rule = CABS(budget=1000, horizon=Horizon(0.6, 0.6, 1 / 8))
    raw = [15 / (4 * rho) for rho in (0.6, 0.6, 0.6, 0.6 * (0.125 / 0.6) ** 0.25, math.sqrt(0.6 * 0.125), 0.125)]
    assert [round(m, 2) for m in raw] == [6.25, 6.25, 6.25, 9.25, 13.69, 30.0]
    # What is left, 1000, 500, 400, 300, 200 and nothing, is divided by 160, 80, 64, 32 and 14 steps.
    given = [replace(one_group(loss=0.2), examples_total=n) for n in (0, 500, 600, 700, 800, 1000)]
    sizes = [rule(estimates) for estimates in given]
    assert [rule.share(estimates) for estimates in given] == pytest.approx([15 / (4 * m) for m in raw])
    assert sizes == pytest.approx([1000 / 160, 500 / 80, 400 / 64, 300 / 32, 200 / 14, 30])
    assert [round_and_clip(size, 2, 64) for size in sizes] == [6, 6, 6, 9, 14, 30]
    past = replace(one_group(), examples_total=5000)
    assert rule(past) == CABS(noise_share=0.125)(past)


def test_a_budget_can_be_extended() -> None:
    rule = CABS(0.5, budget=1000, horizon=Horizon(0.5, 0.5, 0.1), small_data=True)
    longer = rule.extended(4000)
    assert longer == CABS(0.5, budget=4000, horizon=Horizon(0.5, 0.5, 0.1), small_data=True)
    at_the_end = replace(one_group(), batch_size=10, examples_total=1000)
    assert (rule.share(at_the_end), longer.share(at_the_end)) == (0.1, 0.5)
    measured = CABS(budget=1000)
    assert measured.extended(4000).share(at_the_end) > 4 * measured.share(at_the_end)  # noise may come back


def test_which_rules_want_the_coupling() -> None:
    assert all(rule.coupled for rule in (CABS(), GainPerCost(1.0)))
    assert not any(rule.coupled for rule in (NormTest(), NoiseScale(), InnerProductTest()))


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
        (lambda: CABS(noise_share=0.0), "noise_share"),
        (lambda: CABS(noise_share=-0.25), "noise_share"),
        (lambda: CABS(noise_share=math.nan), "noise_share"),
        (lambda: CABS(budget=0), "budget"),
        (lambda: CABS(budget=-5), "budget"),
        (lambda: CABS(budget=1e6), "budget"),
        (lambda: CABS(budget=100, noise_share=0.5), "give noise_share or budget"),
        (lambda: CABS(budget=100, horizon="fixed"), "horizon is 'fixed'"),  # type: ignore[arg-type]
        (lambda: CABS(budget=100, horizon=0.6), "horizon is 0.6"),  # type: ignore[arg-type]
        (lambda: CABS(horizon=Horizon()), "a horizon needs a budget"),
        (lambda: CABS(horizon="measured"), "a horizon needs a budget"),
        (lambda: Horizon(1.5), "shares are in"),
        (lambda: Horizon(0.1, 0.5, 0.2), "fall"),
        (lambda: Horizon(until=1.0), "until"),
        (lambda: InnerProductTest(0.0), "theta"),
        (lambda: InnerProductTest(0.9, -1.0), "nu"),
        (lambda: Constant(0), "batch_size"),
        (lambda: Constant(True), "batch_size"),
    ],
)
def test_bad_settings_are_refused(make: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()  # type: ignore[operator]
