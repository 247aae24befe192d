"""What a step costs, told from times: with a clock that tests turn themselves."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader
from cabs.scheduler.costs import MEMORY, TRIALS, Sample, StepCosts, Stopwatch

C0, C1 = 0.02, 0.001


class Clock:
    """Stands still unless it is turned."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(steps: list[tuple[int, float, bool]]) -> StepCosts:
    costs = StepCosts()
    for examples, seconds, measured in steps:
        costs = costs.add([Sample(examples, seconds, measured)])
    return costs


def of_size(m: int, extra: float = 0.0) -> float:
    return C0 + C1 * m + extra


def test_a_line_is_found() -> None:
    costs = timed([(m, of_size(m), True) for m in (8, 16, 32) * 3])
    assert costs.line == pytest.approx((C0, C1))


def test_sizes_that_are_alike_tell_nothing() -> None:
    assert timed([(16, of_size(16), True)] * 50).line is None
    assert timed([(m, of_size(m), True) for m in (16, 17, 18, 19) * 20]).line is None


def test_times_that_do_not_grow_tell_nothing() -> None:
    assert timed([(m, 0.02, True) for m in (8, 16, 32) * 9]).line is None
    assert timed([(m, 1 / m, True) for m in (8, 16, 32) * 9]).line is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_is_out_of_order_tells_nothing(seconds: float) -> None:
    costs = timed([(m, seconds, True) for m in (8, 16, 32) * 9])
    assert costs.line is None
    assert costs.steps == 27
    good = [(m, of_size(m), True) for m in (8, 16, 32) * 3]
    assert timed([*good, (8, seconds, True)]).line == pytest.approx((C0, C1))


def test_pauses_do_not_count() -> None:
    """An hour at the debugger, or a tenth of all steps ten times as long."""
    steps = [(m, of_size(m), True) for m in (8, 16, 32, 64) * 8]
    steps[5] = (16, 3600.0, True)
    for at in range(0, len(steps), 10):
        steps[at] = (steps[at][0], 10 * steps[at][1], True)
    assert timed(steps).line == pytest.approx((C0, C1), rel=1e-6)


def test_noise_is_averaged() -> None:
    draw = random.Random(0)
    steps = [(m, of_size(m) * draw.uniform(0.9, 1.1), False) for _ in range(20) for m in (8, 16, 32, 64, 128)]
    line = timed(steps).line
    assert line == pytest.approx((C0, C1), rel=0.1)


def test_steps_that_measure_take_longer_and_bias_nothing() -> None:
    """Every fifth measures, and those happen to be the large ones: a line through all would be far too steep."""
    extra = 0.05
    steps = []
    for _ in range(40):
        steps += [(m, of_size(m), False) for m in (8, 16, 12, 20)]
        steps += [(64, of_size(64, extra), True)]
    line = timed(steps).line
    assert line is not None
    assert line[1] == pytest.approx(C1, rel=1e-6)
    assert line[0] == pytest.approx(C0 + extra / 5, rel=0.01)


def test_a_machine_that_changes_is_measured_anew() -> None:
    """Twice as slow from some step on: sizes that still come are right soon, those that do not are forgotten."""
    before = [(m, of_size(m), True) for m in (8, 16, 32) * 10]
    after = [(m, 2 * of_size(m), True) for m in (16, 32) * (MEMORY // 2 + 1)]
    assert timed(before + after).line == pytest.approx((2 * C0, 2 * C1))


def test_nothing_is_remembered_for_ever() -> None:
    costs = timed([(m, of_size(m), True) for m in (8, 16, 32) * 3] + [(16, of_size(16), True)] * (MEMORY + 1))
    assert costs.line is None
    assert len(costs.bins) == 1


def test_other_sizes_are_tried_until_the_cost_is_known_and_not_for_ever() -> None:
    costs, factors = StepCosts(), []
    for _ in range(MEMORY + 2):
        factors.append(costs.trial_factor())
        costs = costs.add([Sample(16, 1.0, True)])  # a loader that does not follow
    assert factors[:7] == [1, 2, 4, 1, 2, 4, 1]
    assert max(factor for factor in factors if factor is not None) <= 16
    assert set(factors[TRIALS:MEMORY]) == {None}
    assert factors[MEMORY : MEMORY + 2] == [1, 2]
    known = timed([(m, of_size(m), True) for m in (8, 16, 32) * 3])
    assert known.trial_factor() is None


def test_costs_survive_a_resume() -> None:
    costs = timed([(m, of_size(m), bool(m % 3)) for m in (8, 16, 32, 33) * 5])
    again = StepCosts.of_state(costs.state_dict())
    assert again == costs
    assert again.line == costs.line


@pytest.mark.parametrize(
    "damage",
    [
        {"bins": [[0, 16, 5, [16.0], [-1.0]]]},
        {"bins": [[0, 16, 5, [16.0], []]]},
        {"bins": [[0, 16, 5, [16.0], [math.nan]]]},
        {"bins": [[0, 16]]},
        {"bins": None},
        {"counts": [1.0]},
        {"counts": [math.inf, 0.0]},
        {"line": [0.1, 0.0]},
        {"line": [0.1]},
        {"line": [math.nan, 1.0]},
    ],
)
def test_damaged_states_are_refused(damage: dict[str, Any]) -> None:
    state = {**timed([(8, 1.0, True)] * 4).state_dict(), **damage}
    with pytest.raises(ValueError, match="the state's costs"):
        StepCosts.of_state(state)


def test_the_watch_leaves_out_what_is_between_steps() -> None:
    clock = Clock()
    watch = Stopwatch(None, clock)
    watch.on = True
    for step in range(8):
        clock.now += 50  # evaluation
        watch.asked()
        clock.now += 1  # loading
        watch.begin()
        clock.now += 2
        if step == 6:  # a batch that is dropped
            watch.give_up()
            watch.asked()
            watch.begin()
            clock.now += 4
        watch.end(16, True)
    assert [sample.seconds for sample in watch._taken()] == [3, 4, 3]  # the first five warm up


def test_a_loader_that_does_not_tell_is_timed_from_step_to_step() -> None:
    clock = Clock()
    watch = Stopwatch(None, clock)
    watch.on = True
    for _ in range(8):
        clock.now += 3
        watch.end(16, True)
    assert [sample.seconds for sample in watch._taken()] == [3, 3, 3]


# -- in the scheduler


class Run:
    """A small problem whose steps take as long as a function of their size says."""

    def __init__(self, seconds: Callable[[int], float], **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(500, 6, generator=generator)
        y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        self.loader = AdaptiveLoader(TensorDataset(x, y), batch_size=4, shuffle=True, seed=0, stream=True)
        defaults: dict[str, Any] = {"min_batch_size": 2, "max_batch_size": 256, "cost": "measured"}
        self.scheduler = CABS(self.model, self.optimizer, self.loader, **{**defaults, **options})
        self.clock, self.seconds = Clock(), seconds
        watch = Stopwatch(None, self.clock)
        watch.on = self.scheduler._observer.stopwatch.on
        self.scheduler._observer.stopwatch = watch

    def train(self, steps: int) -> list[int]:
        sizes = []
        for (inputs, targets), _ in zip(self.loader, range(steps), strict=False):
            sizes.append(len(targets))
            loss = F.cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.clock.now += self.seconds(len(targets))
            self.scheduler.step(loss)
            self.clock.now += 1000  # evaluation
        return sizes


def test_the_scheduler_measures_and_uses_the_cost() -> None:
    run = Run(of_size)
    run.train(60)
    last = run.scheduler.last
    assert last is not None
    assert last.step_cost == pytest.approx((C0, C1), rel=1e-6)
    m = last.variance_average * 0.3 / last.loss_average / 2  # a noise share of one half
    by_formula = max(m / 2 * (1 + math.sqrt(1 + 2 * C0 / C1 / m)), C0 / C1 / 4)
    assert last.raw_batch_size == pytest.approx(2 ** (round(8 * math.log2(by_formula)) / 8), rel=1e-6)
    assert last.raw_batch_size > 2 * m


def test_sizes_stuck_at_the_bound_do_not_hide_the_cost() -> None:
    """With nearly no noise CABS asks for less than the least size; seconds ask for more."""
    run = Run(lambda m: 0.5 + 0.001 * m, min_batch_size=2)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.05
    sizes = run.train(60)
    assert run.scheduler.last is not None
    assert run.scheduler.last.step_cost is not None
    assert sizes[-1] > 2


@pytest.mark.parametrize("seconds", [lambda m: 0.0, lambda m: -1.0, lambda m: 5.0, lambda m: 1 / m])
def test_a_cost_that_cannot_be_measured_counts_examples(seconds: Callable[[int], float]) -> None:
    """After the sizes that were tried in vain, sizes are those of cost="examples"."""
    run = Run(seconds)
    run.train(TRIALS + 40)
    last = run.scheduler.last
    assert last is not None
    assert last.step_cost is None
    assert last.raw_batch_size == pytest.approx(last.variance_average * 0.3 / last.loss_average / 2)


def test_resumes_with_what_it_had_measured() -> None:
    run, other = Run(of_size), Run(of_size)
    run.train(60)
    other.model.load_state_dict(run.model.state_dict())
    state = copy.deepcopy(run.scheduler.state_dict())
    other.scheduler.load_state_dict(state)
    other.loader.load_state_dict(run.loader.state_dict())
    assert other.train(20) == run.train(20)
    assert other.scheduler.last is not None
    assert other.scheduler.last.step_cost == pytest.approx((C0, C1), rel=1e-6)


def test_looking_only_tries_nothing() -> None:
    run = Run(of_size, monitor_only=True)
    assert set(run.train(30)) == {4}


def test_nothing_is_timed_where_nobody_asks() -> None:
    run = Run(of_size, cost="examples")
    run.train(10)
    assert run.scheduler.state_dict()["costs"] == StepCosts().state_dict()
    assert run.scheduler.last is not None
    assert run.scheduler.last.step_cost is None


@pytest.mark.parametrize(("cost", "factor"), [("examples", 1.0), ((5.0, 1.0), 1.0), ("measured", 2.0)])
def test_a_measured_cost_takes_the_bias_out_of_small_batches(cost: Any, factor: float) -> None:
    """Of two examples the paper's tr Σ = (‖g₁‖² + ‖g₂‖²)/2 − ‖(g₁ + g₂)/2‖² is half of what it should be."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # (w x − y)²/2 at w = 0 has the gradient −x y: −1 and −3, with mean −2 and, by the paper, a variance of 5 − 4 = 1.
    data = TensorDataset(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1))
    loader = AdaptiveLoader(data, batch_size=2, stream=True)
    scheduler = CABS(model, optimizer, loader, min_batch_size=2, cost=cost, measure_every=1)
    inputs, targets = next(iter(loader))
    loss = (model(inputs) - targets).square().mean() / 2
    loss.backward()
    optimizer.step()
    scheduler.step(loss)
    last = scheduler.last
    assert last is not None
    assert last.variance == pytest.approx(1)
    assert last.variance_average == pytest.approx(factor)
    assert last.noise_share == pytest.approx(0.1 * factor / 0.5 / 4 / 2)


def test_the_line_is_not_fitted_at_every_step() -> None:
    """At first with each, later after a tenth of the steps, at the latest after twenty."""
    costs, fitted = StepCosts(), []
    for step in range(300):
        costs = costs.add([Sample((8, 16, 32)[step % 3], of_size((8, 16, 32)[step % 3]), True)])
        if costs.fitted == costs.steps:
            fitted.append(costs.steps)
    assert fitted[:19] == list(range(1, 20))
    assert fitted[-3:] == [fitted[-1] - 40, fitted[-1] - 20, fitted[-1]]
    assert len(fitted) < 60


def test_states_from_before_the_line_was_kept_are_taken() -> None:
    costs = timed([(m, of_size(m), True) for m in (8, 16, 32) * 3])
    state = {key: value for key, value in costs.state_dict().items() if key not in ("line", "fitted")}
    assert StepCosts.of_state(state).line == pytest.approx((C0, C1))


def test_a_line_that_was_told_is_kept_when_times_become_uncertain() -> None:
    """Times that vary by four fifths tell no line to begin with; they do not take away the one there is."""
    draw = random.Random(1)
    vague = [(m, of_size(m) * draw.uniform(0.2, 1.8), True) for _ in range(20) for m in (8, 12, 16)]
    assert timed(vague).line is None
    known = timed([(m, of_size(m), True) for m in (8, 12, 16) * 3] + vague).line
    assert known is not None
    assert known[1] > 0
