"""Budgets and half-lives in the scheduler: where a budget ends, what is refused, what a resume does."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, rules
from cabs.rules.horizon import fit


class Run:
    def __init__(self, optimizer: Any = torch.optim.SGD, stream: bool = True, **settings: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(500, 6, generator=generator)
        y = torch.randint(0, 3, (500,), generator=generator)
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.3, **settings})
        self.loader = AdaptiveLoader(TensorDataset(x, y), batch_size=4, shuffle=True, seed=0, stream=stream)

    def cabs(self, **options: Any) -> CABS:
        defaults = {"min_batch_size": 8, "max_batch_size": 64}
        return CABS(self.model, self.optimizer, self.loader, **{**defaults, **options})

    def train(self, scheduler: BatchSizeScheduler, budget: int) -> list[int]:
        sizes: list[int] = []
        while True:
            for inputs, targets in self.loader:
                sizes.append(len(targets))
                loss = F.cross_entropy(self.model(inputs), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                scheduler.step(loss)
                assert scheduler.last is not None
                if scheduler.last.examples_total >= budget:
                    return sizes


@pytest.mark.parametrize("budget", [8, 9, 15, 17, 100, 1001, 3003])
@pytest.mark.parametrize(("least", "most"), [(8, 64), (8, 11), (2, 2048)])
@pytest.mark.parametrize("lr", [0.01, 0.3, 1.0])
def test_a_budget_ends_just_where_it_says(budget: int, least: int, most: int, lr: float) -> None:
    """Whatever the bounds make of the sizes, there is no crumb at the end and no example too many."""
    run = Run(lr=lr)
    run.loader.batch_size = least
    scheduler = run.cabs(budget=budget, min_batch_size=least, max_batch_size=most)
    sizes = run.train(scheduler, budget)
    assert min(sizes) >= least
    assert max(sizes) <= most
    if any(k * least <= budget <= k * most for k in range(1, budget + 1)):
        assert sum(sizes) == budget
    else:
        assert budget < sum(sizes) < budget + least


def test_fit_minds_bounds() -> None:
    assert fit(3000, 2100, 16, 2048) == 1050  # not 2048 and a crumb of 52
    assert fit(5, 26, 16) == 26  # not 16 and a crumb of 10
    assert fit(5, 40, 16) == 20
    assert fit(7, 100) == pytest.approx(100 / 14)
    assert fit(1000, 100) == 100
    assert fit(20, 10, 16) == 10  # which the least size overrules
    assert fit(20, 0, 16) == 20


def test_epochs_that_end_do_not_spoil_the_end() -> None:
    run = Run(stream=False)
    scheduler = run.cabs(budget=1234)
    assert sum(run.train(scheduler, 1234)) == 1234


def test_multiples_end_there_too() -> None:
    run = Run()
    scheduler = run.cabs(budget=1200, multiple_of=8)
    sizes = run.train(scheduler, 1200)
    assert sum(sizes[1:]) == 1200 - sizes[0]
    assert all(size % 8 == 0 for size in sizes)


def test_budget_and_small_data_share_what_is_left_evenly() -> None:
    rule = rules.CABS(budget=1500, small_data=True)
    seen = rules.Estimates(
        loss=1.0,
        learning_rates=(1.0,),
        variances=(1e6,),
        true_gradient_norms_squared=(1.0,),
        examples_total=0,
        dataset_size=1000,
    )
    assert rule(seen) == 750


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_share": -0.1}, "noise_share is -0.1"),
        ({"noise_share": 0}, "noise_share is 0"),
        ({"noise_share": math.nan}, "noise_share is nan"),
        ({"budget": math.inf}, "budget is inf.*None for no end"),
        ({"budget": -5}, "budget is -5"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": 7}, "smaller than min_batch_size = 8"),
        ({"budget": 1001, "multiple_of": 4}, "no multiple of 4"),
        ({"budget": 1001, "accumulation": 2}, "no multiple of 2"),
        ({"budget": 1000, "noise_share": 0.5}, "give noise_share or budget"),
        ({"cost": "seconds"}, "cost is 'seconds'"),
        ({"cost": (-1.0, 1.0)}, "neither negative"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Run().cabs(**options)


def test_a_budget_smaller_than_what_was_seen() -> None:
    run = Run()
    scheduler = run.cabs(budget=2000)
    run.train(scheduler, 1000)
    state = scheduler.state_dict()
    scheduler.close()
    smaller = run.cabs(budget=500)
    with pytest.raises(ValueError, match="budget is 500 examples, and the state has seen 1,"):
        smaller.load_state_dict(state)
    assert smaller.state_dict()["examples_total"] == 0
    smaller.close()
    larger = run.cabs(budget=5000)
    larger.load_state_dict(state)
    assert sum(run.train(larger, 5000)) + state["examples_total"] == 5000


def test_past_its_budget_a_run_may_go_on() -> None:
    """Every step is taken for the last one; resuming a run at its very end is fine."""
    run = Run()
    scheduler = run.cabs(budget=1000, min_batch_size=2)
    run.train(scheduler, 1000)
    scheduler.load_state_dict(scheduler.state_dict())
    run.train(scheduler, 1500)
    last = scheduler.last
    assert last is not None
    share = 0.3 * last.variance_average / (4 * last.raw_batch_size * last.loss_average)
    assert 0.02 < share < 0.25


def test_editors_show_the_options() -> None:
    shown = inspect.signature(CABS).parameters
    assert {"noise_share", "budget", "cost", "small_data", "keep_half_lives"} <= set(shown)
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())
    options = set(inspect.signature(BatchSizeScheduler).parameters) - {"rule"}
    rule = set(inspect.signature(rules.CABS).parameters) - {"_", "horizon"}
    assert set(shown) == options | rule


# -- half-lives


def betas(run: Run, name: str) -> Any:
    return run.optimizer.param_groups[0][name]


@pytest.mark.parametrize(
    ("optimizer", "settings", "name"),
    [(torch.optim.SGD, {"momentum": 0.9}, "momentum"), (torch.optim.AdamW, {"betas": (0.9, 0.99)}, "betas")],
)
def test_half_lives_are_kept_step_by_step(optimizer: Any, settings: dict[str, Any], name: str) -> None:
    """Before each step β is that of the very batch, the last of an epoch included; product over steps: by examples."""
    run = Run(optimizer, stream=False, **settings)
    scheduler = BatchSizeScheduler(
        run.model, run.optimizer, run.loader, rules.Ramp(8, 64, 1000), min_batch_size=8, keep_half_lives=32
    )
    used: list[Any] = []
    run.optimizer.register_step_pre_hook(lambda *_: used.append(betas(run, name)))
    sizes = run.train(scheduler, 1200)
    assert len(set(sizes)) > 5
    first = settings[name]
    if isinstance(first, tuple):
        assert used == [tuple(pytest.approx(beta ** (m / 32)) for beta in first) for m in sizes]
        assert math.prod(b for b, _ in used) == pytest.approx(0.9 ** (sum(sizes) / 32))
    else:
        assert used == pytest.approx([first ** (m / 32) for m in sizes])
        assert math.prod(used) == pytest.approx(first ** (sum(sizes) / 32))
    scheduler.close()
    assert betas(run, name) == pytest.approx(first)
    run.optimizer.step()
    assert betas(run, name) == pytest.approx(first)


def test_half_lives_survive_a_resume() -> None:
    def make() -> tuple[Run, BatchSizeScheduler]:
        run = Run(torch.optim.Adam, betas=(0.9, 0.99))
        rule = rules.Geometric(8, 2, 500)
        return run, BatchSizeScheduler(run.model, run.optimizer, run.loader, rule, min_batch_size=8, keep_half_lives=16)

    run, scheduler = make()
    run.train(scheduler, 700)
    other, resumed = make()
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    resumed.load_state_dict(scheduler.state_dict())
    other.loader.load_state_dict(run.loader.state_dict())
    assert other.train(resumed, 1500) == run.train(scheduler, 1500)
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_half_lives_are_off_by_default_and_refused_where_there_are_none() -> None:
    run = Run(torch.optim.Adam, betas=(0.9, 0.99))
    scheduler = BatchSizeScheduler(run.model, run.optimizer, run.loader, rules.Ramp(8, 64, 1000), min_batch_size=8)
    run.train(scheduler, 500)
    assert betas(run, "betas") == (0.9, 0.99)
    with pytest.raises(ValueError, match="SGD keeps no averages"):
        Run().cabs(keep_half_lives=32)
    for nonsense in (0, -3):
        with pytest.raises(ValueError, match="must be positive"):
            Run(torch.optim.Adam).cabs(keep_half_lives=nonsense, assume_sgd=True)
