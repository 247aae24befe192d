"""Schedules beside sequences computed by hand, to the integer."""

import itertools
import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, ReduceLROnPlateau

from cabs.rules import (
    BySteps,
    Constant,
    DecayToBatch,
    Estimates,
    Function,
    Geometric,
    OnPlateau,
    Ramp,
    Repeat,
    Rule,
    Schedule,
    Sequential,
    Steps,
    examples_of,
    round_and_clip,
)

NOTHING = Estimates(loss=1.0, learning_rates=(), variances=())


def sizes(schedule: Schedule, *examples: int) -> list[int]:
    return [round_and_clip(schedule(replace(NOTHING, examples_total=n)), 1, 9999) for n in examples]


def driven(rule: Rule, losses: list[float], every: int = 100) -> list[int]:
    """The sizes after steps of ``every`` examples with these losses; memory is held as the scheduler holds it."""
    memory, result = None, []
    for step, loss in enumerate(losses, 1):
        estimates = Estimates(loss=loss, learning_rates=(), variances=(), examples_total=step * every)
        memory = rule.remember(memory, estimates)
        result.append(round_and_clip(rule(replace(estimates, memory=memory)), 1, 9999))
    return result


@pytest.mark.parametrize(
    ("schedule", "examples", "expected"),
    [
        (Constant(48), (0, 10**6), [48, 48]),
        (Steps("0:32 100k:64 1M:256"), (0, 99_999, 100_000, 999_999, 10**6, 10**9), [32, 32, 64, 64, 256, 256]),
        (Steps({0: 32, "1.5k": 8}), (0, 1499, 1500), [32, 32, 8]),
        (Steps("0:32, 10:64"), (9, 10), [32, 64]),
        (Ramp(10, 110, 1000), (0, 250, 500, 1000, 5000), [10, 35, 60, 110, 110]),
        (Ramp(110, 10, "1k"), (0, 250, 1000), [110, 85, 10]),
        (Ramp(10, 110, 1000, power=2), (0, 500, 1000), [10, 35, 110]),
        (Ramp(10, 110, 1200, "cosine"), (0, 400, 600, 800, 1200, 1300), [10, 35, 60, 85, 110, 110]),
        (Ramp(10, 1000, 1000, "geometric"), (0, 500, 1000), [10, 100, 1000]),
        (Geometric(8, 2, 1000), (0, 500, 1000, 3000), [8, 11, 16, 64]),
        (Geometric(8, 2, 1000, stairs=True), (0, 999, 1000, 3500), [8, 8, 16, 64]),
        (Function(lambda n: 1 + n / 10), (0, 90, 990), [1, 10, 100]),
        (Sequential([Ramp(10, 20, 100), Constant(50)], [100]), (0, 50, 100, 199), [10, 15, 50, 50]),
        (Sequential([Constant(50), Constant(9), Geometric(4, 2, 10)], [10, 20]), (9, 10, 20, 30), [50, 9, 4, 8]),
        (Repeat(Ramp(10, 20, 100), 100), (0, 50, 99, 100, 150, 10_050), [10, 15, 20, 10, 15, 15]),
        (Repeat(Ramp(10, 20, 100), 100, stretch=2), (50, 100, 200, 300, 500), [15, 10, 15, 10, 15]),
        (DecayToBatch(lambda n: 0.3 * 0.5 ** (n // 100), 32), (0, 99, 100, 250), [32, 32, 64, 128]),
        (
            DecayToBatch(partial(MultiStepLR, milestones=[3, 5]), 16, every=10),
            (0, 29, 30, 49, 50),
            [16, 16, 160, 160, 1600],
        ),
        (DecayToBatch(partial(CosineAnnealingLR, T_max=6), 16, every=100), (0, 300, 400, 600), [16, 32, 64, 9999]),
    ],
)
def test_sequences(schedule: Schedule, examples: tuple[int, ...], expected: list[int]) -> None:
    assert sizes(schedule, *examples) == expected
    assert sizes(schedule, *reversed(examples)) == expected[::-1]  # nothing is kept
    assert schedule.first_batch_size() == schedule.at(0)
    assert not schedule.measures


def test_a_factor_at_every_step_is_a_line_by_examples() -> None:
    """Friedlander & Schmidt's m ← 1.1 m, driven step by step."""
    line = Ramp(100, 100 + 0.1 * 10**6, 10**6)
    m, n = 100.0, 0.0
    for _ in range(60):
        assert line.at(n) == pytest.approx(m)  # type: ignore[arg-type]
        m, n = 1.1 * m, n + m


def test_adam_takes_the_root_of_the_decay() -> None:
    rule = DecayToBatch(lambda n: 0.25 if n >= 100 else 1.0, 32, optimizer="adam")
    assert sizes(rule, 99, 100) == [32, 128]
    assert [rule.learning_rate_factor(n) for n in (99, 100)] == [1.0, 0.5]
    sgd = replace(rule, optimizer="sgd")
    assert [sgd.learning_rate_factor(n) for n in (99, 100)] == [1.0, 1.0]


def test_plateau() -> None:
    losses = [5, 4, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    assert driven(OnPlateau(16, 2, 300), losses) == [16] * 5 + [32] * 4 + [64] * 3
    assert driven(OnPlateau(16, 2, 300, cooldown=200), losses) == [16] * 5 + [32] * 5 + [64] * 2
    assert driven(OnPlateau(16, 2, 200, threshold=0.5), [4, 3, 2.5, 1.9, 1.8, 1.0]) == [16, 16, 32, 32, 32, 64]
    assert driven(OnPlateau(16, 2, 200, threshold=1, threshold_mode="abs"), [4, 3.5, 3.2, 2.9, 2]) == [
        16,
        16,
        32,
        32,
        32,
    ]
    rising = OnPlateau(16, 4, 200, mode="max", metric=lambda estimates: -estimates.loss)
    assert driven(rising, losses) == driven(OnPlateau(16, 4, 200), losses)
    assert OnPlateau(16).first_batch_size() == 16


@pytest.mark.parametrize("unknown", [math.inf, math.nan])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_patience_begins_when_the_metric_is_there(mode: str, sign: int, threshold_mode: str, unknown: float) -> None:
    values = iter([sign * value for value in (unknown, unknown, unknown, 5, 5, 4, 4, 4)])
    rule = OnPlateau(16, 2, 200, mode=mode, threshold_mode=threshold_mode, metric=lambda _: next(values))  # type: ignore[arg-type]
    assert driven(rule, [1.0] * 8) == [16, 16, 16, 16, 16, 16, 16, 32]


def test_plateau_survives_a_resume() -> None:
    """Its memory is plain numbers that the scheduler saves."""
    rule = OnPlateau(16, 2, 300)
    estimates = Estimates(loss=1.0, learning_rates=(), variances=(), examples_total=100)
    memory = rule.remember(None, estimates)
    assert memory == {"best": 1.0, "since": 100.0, "size": 16}
    later = replace(estimates, examples_total=400)
    assert OnPlateau(16, 2, 300).remember(dict(memory), later) == {"best": 1.0, "since": 400.0, "size": 32}


@pytest.mark.parametrize(
    ("amount", "examples"),
    [
        ("32", 32),
        ("100k", 100_000),
        ("1.5M", 1_500_000),
        ("1_000", 1000),
        (7.0, 7),
        ("2B", 2 * 10**9),
        ("1.5T", 1500 * 10**9),
    ],
)
def test_amounts(amount: str | float, examples: int) -> None:
    assert examples_of(amount) == examples


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Steps(""), "begin with 0:size"),
        (lambda: Steps("10:32"), "begin with 0:size"),
        (lambda: Steps("0:32 100k"), "'100k' in .* no examples:size"),
        (lambda: Steps("0:32 100q:64"), "start of '100q:64'"),
        (lambda: Steps("0:32 100k:big"), "size of '100k:big'"),
        (lambda: Steps("0:32 100k:0"), "size of '100k:0'"),
        (lambda: Steps("0:32 -5:64"), "start of '-5:64'"),
        (lambda: Steps("0:32 2k:64 1k:128"), "not in order"),
        (lambda: Steps("0:32 0.5:64"), "whole number"),
        (lambda: Ramp(0, 10, 100), "start"),
        (lambda: Ramp(1, math.inf, 100), "end"),
        (lambda: Ramp(1, 10, 0), "at least one"),
        (lambda: Ramp(1, 10, 100, "round"), "shape"),  # type: ignore[arg-type]
        (lambda: Ramp(1, 10, 100, "cosine", power=2), "power"),
        (lambda: Geometric(8, -2, 100), "factor"),
        (lambda: Geometric(8, 2, 0), "every"),
        (lambda: Sequential([Constant(2)], [100]), "0 milestones"),
        (lambda: Sequential([Constant(2)] * 3, [100, 100]), "must grow"),
        (lambda: Repeat(Constant(2), 100, stretch=0.5), "stretch"),
        (lambda: Function(lambda n: -1.0).at(0), "positive"),
        (lambda: OnPlateau(16, 1.0), "never move"),
        (lambda: OnPlateau(16, threshold=-1.0), "threshold"),
        (lambda: OnPlateau(16, mode="up"), "mode"),  # type: ignore[arg-type]
        (lambda: DecayToBatch(lambda n: 0.0, 16), "at 0 examples"),
        (lambda: DecayToBatch(lambda n: 1.0 - n, 16).at(2), "not negative"),
        (lambda: DecayToBatch(lambda n: 1.0, 16, optimizer="lion"), "optimizer"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused_where_it_is_made(make: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()  # type: ignore[operator]


def test_what_is_no_schedule_is_refused() -> None:
    plateau = OnPlateau(16)
    for make in (
        lambda: Sequential([Constant(2), plateau], [100]),  # type: ignore[list-item]
        lambda: Repeat(plateau, 100),  # type: ignore[arg-type]
        lambda: BySteps(plateau),  # type: ignore[arg-type]
        lambda: Function(32),  # type: ignore[arg-type]
        lambda: Steps(32),  # type: ignore[arg-type]
        lambda: DecayToBatch(0.5, 16),  # type: ignore[arg-type]
        lambda: DecayToBatch(ReduceLROnPlateau, 16, every=100),
    ):
        with pytest.raises(TypeError):
            make()


def test_rules_can_be_sent_to_other_processes() -> None:
    decay = DecayToBatch(partial(MultiStepLR, milestones=[3, 5]), 16, every=10)
    assert decay.at(30) == pytest.approx(160)
    for rule in (
        decay,
        Steps("0:32 1k:64"),
        Sequential([Constant(2), Ramp(1, 2, 3)], [5]),
        OnPlateau(16),
        BySteps(Ramp(1, 2, 3)),
    ):
        again = pickle.loads(pickle.dumps(rule))
        assert again.first_batch_size() == rule.first_batch_size()
    assert pickle.loads(pickle.dumps(decay)).at(30) == decay.at(30)


def test_rules_are_values() -> None:
    """Equal where they say the same, and fit for a set."""
    made = [
        lambda: Steps({0: 32, "1k": 64}),
        lambda: Ramp(1, 2, "1k"),
        lambda: Geometric(8, 2, 10),
        lambda: OnPlateau(16),
    ]
    assert Steps("0:32 1000:64") == Steps({0: 32, "1k": 64})
    assert all(make() == make() and hash(make()) == hash(make()) for make in made)
    assert all(one() != other() for one, other in itertools.permutations(made, 2))
