"""The scheduler: what it sets, what it reports, and what it refuses without harm."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, rules
from cabs.torch_internals import forward_hooks_of

pytestmark = pytest.mark.filterwarnings("ignore:scheduler.step.. was called")  # what most tests are not about


class Setup:
    """A small problem, trained a few steps at a time."""

    def __init__(self, lr: float = 0.5, examples: int = 600, optimizer: type = torch.optim.SGD, **options: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(examples, 10, generator=generator)
        y = (x @ torch.randn(10, 4, generator=generator)).argmax(1)
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))
        self.optimizer = optimizer(self.model.parameters(), lr=lr, **options)
        self.loader = AdaptiveLoader(TensorDataset(x, y), batch_size=8, shuffle=True, stream=True, seed=1)

    def cabs(self, **options: Any) -> CABS:
        return CABS(self.model, self.optimizer, self.loader, **{"min_batch_size": 8, "max_batch_size": 500, **options})

    def backward(self, batch: Any = None) -> torch.Tensor:
        inputs, targets = next(iter(self.loader)) if batch is None else batch
        loss = F.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def train(self, scheduler: BatchSizeScheduler, steps: int) -> list[int]:
        sizes = []
        for batch, _ in zip(self.loader, range(steps), strict=False):
            loss = self.backward(batch)
            self.optimizer.step()
            scheduler.step(loss)
            sizes.append(scheduler.last_batch_size)
        return sizes


def test_the_loader_follows() -> None:
    setup = Setup()
    scheduler = setup.cabs()
    for batch, _ in zip(setup.loader, range(60), strict=False):
        assert len(batch[0]) == scheduler.last_batch_size == setup.loader.batch_size
        loss = setup.backward(batch)
        setup.optimizer.step()
        assert scheduler.step(loss) == scheduler.last_batch_size
    assert len(set(setup.train(scheduler, 60))) > 3


def test_reports_what_it_saw() -> None:
    setup = Setup()
    scheduler = setup.cabs(smoothing=0.0)
    loss = setup.backward()
    scheduler.step(loss)
    last = scheduler.last
    assert last is not None
    assert last.examples == 8
    assert last.loss == last.loss_average == pytest.approx(loss.item())
    gradient = torch.cat([p.grad.flatten() for p in setup.model.parameters() if p.grad is not None])
    assert last.gradient_norm_squared == pytest.approx(float(gradient.square().sum()), rel=1e-5)
    assert last.raw_batch_size == pytest.approx(0.5 * last.variance / last.loss)
    assert last.batch_size == rules.round_and_clip(last.raw_batch_size, 8, 500)


def test_says_which_bound_clipped() -> None:
    for lr, clipped in ((1e-6, "min"), (1e6, "max")):
        setup = Setup(lr=lr)
        scheduler = setup.cabs()
        scheduler.step(setup.backward())
        assert scheduler.last is not None
        assert scheduler.last.clipped == clipped
        assert scheduler.last_batch_size == {"min": 8, "max": 500}[clipped]


def test_the_learning_rate_is_read_at_every_step() -> None:
    setup = Setup(lr=1e-6)
    scheduler = setup.cabs(smoothing=0.0)
    assert scheduler.step(setup.backward()) == 8
    setup.optimizer.param_groups[0]["lr"] = torch.tensor(1e6)
    assert scheduler.step(setup.backward()) == 500


def test_a_learning_rate_schedule_moves_the_size() -> None:
    setup = Setup(lr=2.0)
    scheduler = setup.cabs(smoothing=0.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    batch = next(iter(setup.loader))
    raw = []
    for _ in range(4):
        scheduler.step(setup.backward(batch))
        setup.optimizer.param_groups[0]["params"] = []  # the same gradients every time
        setup.optimizer.step()
        decay.step()
        assert scheduler.last is not None
        raw.append(scheduler.last.raw_batch_size)
    assert raw == pytest.approx([raw[0] / 2**k for k in range(4)], rel=1e-4)


def test_groups_weigh_their_variance_by_their_rate() -> None:
    setup = Setup()
    first, last = setup.model[0], setup.model[2]
    setup.optimizer = torch.optim.SGD(
        [{"params": first.parameters(), "lr": 0.3}, {"params": last.parameters(), "lr": 0.02}], lr=1.0
    )
    scheduler = setup.cabs(smoothing=0.0)
    loss = setup.backward()
    assert scheduler.variance is not None
    traces = scheduler.variance.traces().tolist()
    scheduler.step(loss)
    assert scheduler.last is not None
    assert scheduler.last.raw_batch_size == pytest.approx((0.3 * traces[0] + 0.02 * traces[1]) / loss.item(), rel=1e-5)


def test_losses_of_single_examples() -> None:
    one, other = Setup(), Setup()
    a, b = one.cabs(), other.cabs()
    inputs, targets = next(iter(one.loader))
    a.step(one.backward((inputs, targets)))
    losses = F.cross_entropy(other.model(inputs), targets, reduction="none")
    losses.mean().backward()
    b.step(losses)
    assert a.last is not None
    assert b.last is not None
    assert a.last.loss == pytest.approx(b.last.loss)
    assert a.last.variance == pytest.approx(b.last.variance)


def test_a_weight_decay_changes_neither_loss_nor_variance() -> None:
    plain, decayed = Setup(), Setup(weight_decay=0.1)
    a, b = plain.cabs(), decayed.cabs()
    batch = next(iter(plain.loader))
    a.step(plain.backward(batch))
    b.step(decayed.backward(batch))
    assert a.last == b.last


def test_loss_floor() -> None:
    one, other = Setup(), Setup()
    low, high = one.cabs(smoothing=0.0), other.cabs(smoothing=0.0, loss_floor=0.5)
    batch = next(iter(one.loader))
    loss = one.backward(batch)
    low.step(loss)
    high.step(other.backward(batch))
    assert low.last is not None
    assert high.last is not None
    ratio = loss.item() / (loss.item() - 0.5)
    assert high.last.raw_batch_size == pytest.approx(low.last.raw_batch_size * ratio, rel=1e-5)


def test_the_floor_is_subtracted_from_the_average_it_belongs_to() -> None:
    """The averages start at 0: subtracting F_* from a half-grown one would even turn its sign."""
    setup = Setup()
    scheduler = setup.cabs(loss_floor=1.0)
    loss = setup.backward()
    scheduler.step(loss)
    assert scheduler.last is not None
    expected = 0.5 * scheduler.last.variance / (loss.item() - 1.0)
    assert scheduler.last.raw_batch_size == pytest.approx(expected, rel=1e-5)


def test_monitor_only_leaves_the_loader_alone() -> None:
    setup = Setup(lr=1e6)
    scheduler = setup.cabs(monitor_only=True)
    loss = setup.backward()
    assert scheduler.step(loss) == 500
    assert setup.loader.batch_size == 8


def test_monitoring_needs_no_loader() -> None:
    setup = Setup()
    watcher = CABS(setup.model, setup.optimizer, None, monitor_only=True)
    watcher.step(setup.backward())
    assert watcher.last is not None


def test_a_constant_size_measures_nothing() -> None:
    setup = Setup()
    scheduler = BatchSizeScheduler(setup.model, setup.optimizer, setup.loader, rules.Constant(48))
    assert setup.loader.batch_size == 48
    assert not any(forward_hooks_of(module) for module in setup.model.modules())
    assert setup.train(scheduler, 3) == [48, 48, 48]
    assert scheduler.last is not None
    assert math.isfinite(scheduler.last.loss)


@pytest.mark.parametrize(
    "rule",
    [
        rules.CABS(),
        rules.CABS(noise_share=0.1, small_data=True),
        rules.CABS(budget=3000),
        rules.CABS(cost=(50.0, 1.0)),
        rules.NormTest(0.8),
        rules.GainPerCost(0.5),
        rules.NoiseScale(),
        rules.InnerProductTest(0.5, 1.0),
        rules.Constant(32),
        rules.Steps("0:8 300:20 500:64"),
        rules.Ramp(8, 100, 800),
        rules.Geometric(8, 2, 200),
        rules.OnPlateau(8, 2, 100),
        rules.DecayToBatch(lambda examples: 0.5 ** (examples // 150), 8),
        rules.Sequential([rules.Constant(9), rules.Repeat(rules.Ramp(8, 40, 100), 100)], [200]),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_resumes_where_it_stopped(rule: rules.Rule, tmp_path: Any) -> None:
    def make() -> tuple[Setup, BatchSizeScheduler]:
        setup = Setup()
        return setup, BatchSizeScheduler(
            setup.model, setup.optimizer, setup.loader, rule, min_batch_size=8, max_batch_size=500
        )

    setup, scheduler = make()
    setup.train(scheduler, 25)
    torch.save(
        {"model": setup.model.state_dict(), "scheduler": scheduler.state_dict(), "loader": setup.loader.state_dict()},
        tmp_path / "state.pt",
    )
    expected = setup.train(scheduler, 25)

    again, resumed = make()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.model.load_state_dict(state["model"])
    resumed.load_state_dict(state["scheduler"])
    again.loader.load_state_dict(state["loader"])
    assert again.train(resumed, 25) == expected


SCHEDULES = [
    rules.Constant(48),
    rules.Steps("0:8 100:20"),
    rules.Ramp(8, 100, 800),
    rules.Geometric(8, 2, 200),
    rules.OnPlateau(8),
    rules.DecayToBatch(lambda examples: 1 / (1 + examples), 8),
]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("rule", SCHEDULES, ids=lambda rule: type(rule).__name__)
def test_a_schedule_puts_no_hook_into_the_model(rule: rules.Rule, optimizer: type) -> None:
    """Nothing is measured, whatever the optimizer, and no call of torch is looked at."""

    def hooks(model: nn.Module) -> list[Any]:
        names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        of_modules = [getattr(module, name) for module in model.modules() for name in names]
        return [*of_modules, *(p._backward_hooks or {} for p in model.parameters())]

    setup = Setup(optimizer=optimizer, lr=0.01)
    looking = torch.overrides._get_current_function_mode_stack()  # of other tests
    scheduler = BatchSizeScheduler(setup.model, setup.optimizer, setup.loader, rule, min_batch_size=8)
    assert scheduler.variance is None
    batch = next(iter(setup.loader))
    loss = F.cross_entropy(setup.model(batch[0]), batch[1])
    assert not any(hooks(setup.model))
    assert type(loss) is torch.Tensor
    assert torch.overrides._get_current_function_mode_stack() == looking
    assert all(p._post_accumulate_grad_hooks is None for p in setup.model.parameters())
    loss.backward()
    setup.optimizer.step()
    scheduler.step(loss)
    assert not any(hooks(setup.model))
    assert math.isnan(scheduler.last.noise_share)  # type: ignore[union-attr]


def test_refuses_foreign_states_unchanged() -> None:
    setup = Setup()
    scheduler = setup.cabs()
    setup.train(scheduler, 5)
    before = scheduler.state_dict()
    for change, word in (
        ({"version": 99}, "version"),
        ({"averages": [1.0, 2.0]}, "groups"),
        ({"last_batch_size": 100_000}, "bounds"),
    ):
        with pytest.raises(ValueError, match=word):
            scheduler.load_state_dict({**before, **change})
        assert scheduler.state_dict() == before
    with pytest.raises(ValueError, match="it has no"):
        scheduler.load_state_dict({"last_epoch": 3})


BAD_LOSSES = {
    "nan": (math.nan, {}, "nan"),
    "infinite": (math.inf, {}, "inf"),
    "negative": (-1.0, {}, "loss_floor"),
    "zero": (0.0, {}, "loss_floor"),
    "below its floor": (0.4, {"loss_floor": 0.5}, "0.5"),
    "a matrix": (torch.ones(4, 2), {}, r"\(4, 2\)"),
    "too few losses": (torch.ones(3), {}, "3 entries"),
}


@pytest.mark.parametrize("kind", BAD_LOSSES)
def test_bad_losses_change_nothing(kind: str) -> None:
    loss, options, word = BAD_LOSSES[kind]
    setup = Setup()
    scheduler = setup.cabs(**options)
    setup.train(scheduler, 5)
    before, size = scheduler.state_dict(), setup.loader.batch_size
    weights = copy.deepcopy(setup.model.state_dict())
    setup.backward()
    with pytest.raises(ValueError, match=word):
        scheduler.step(loss)
    assert scheduler.state_dict() == before
    assert setup.loader.batch_size == size
    assert all(torch.equal(weights[name], value) for name, value in setup.model.state_dict().items())
    setup.train(scheduler, 2)  # and training goes on


def test_gradients_that_are_not_finite() -> None:
    setup = Setup()
    scheduler = setup.cabs()
    setup.train(scheduler, 5)
    before = scheduler.state_dict()
    inputs, targets = next(iter(setup.loader))
    loss = setup.backward((inputs * math.inf, targets))
    with pytest.raises(ValueError, match="not finite"):
        scheduler.step(1.0)
    assert not math.isfinite(loss.item())
    assert scheduler.state_dict() == before


def test_step_without_backward() -> None:
    with pytest.raises(RuntimeError, match=r"after loss\.backward"):
        Setup().cabs().step(1.0)


def test_a_lone_last_example_teaches_nothing() -> None:
    setup = Setup()
    scheduler = setup.cabs()
    setup.train(scheduler, 5)
    before = scheduler.state_dict()
    setup.loader.batch_size = 1
    scheduler.step(setup.backward(next(iter(setup.loader))))
    assert scheduler.state_dict() == {**before, "examples_total": before["examples_total"] + 1}


def unchanged(setup: Setup) -> bool:
    return setup.loader.batch_size == 8 and not any(forward_hooks_of(m) for m in setup.model.modules())


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"min_batch_size": 1}, ValueError, "at least 2"),
        ({"min_batch_size": 64, "max_batch_size": 32}, ValueError, "above max_batch_size"),
        ({"min_batch_size": 16.0}, TypeError, "integer"),
        ({"max_batch_size": True}, TypeError, "integer"),
        ({"min_batch_size": 601, "max_batch_size": 900}, ValueError, "600 examples"),
        ({"smoothing": 1.0}, ValueError, "smoothing"),
        ({"estimator": "nonsense"}, ValueError, "nonsense"),
        ({"max_examples": 1}, ValueError, "max_examples"),
        ({"measure_every": 0}, ValueError, "measure_every"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], error: type[Exception], word: str) -> None:
    setup = Setup()
    with pytest.raises(error, match=word):
        setup.cabs(**options)
    assert unchanged(setup)


@pytest.mark.parametrize("rule", ["cabs", None, rules.CABS, 0.5])
def test_unknown_rules_are_refused(rule: Any) -> None:
    setup = Setup()
    with pytest.raises(TypeError, match="unknown rule"):
        BatchSizeScheduler(setup.model, setup.optimizer, setup.loader, rule)
    assert unchanged(setup)


def test_a_constant_out_of_bounds_is_refused() -> None:
    setup = Setup()
    with pytest.raises(ValueError, match="outside"):
        BatchSizeScheduler(setup.model, setup.optimizer, setup.loader, rules.Constant(4096))
    assert unchanged(setup)


def test_loaders_that_cannot_move_are_refused() -> None:
    setup = Setup()
    for loader, word in (
        (DataLoader(setup.loader.dataset, 8), "AdaptiveLoader"),
        (object(), "batch_size"),
        (None, "monitor_only"),
    ):
        with pytest.raises(TypeError, match=word):
            CABS(setup.model, setup.optimizer, loader)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "options", "word"),
    [
        (torch.optim.Rprop, {}, "Rprop"),
        (torch.optim.Adadelta, {}, "Adadelta"),
        (torch.optim.ASGD, {}, "ASGD"),
    ],
)
def test_other_optimizers_need_a_word(optimizer: type, options: dict[str, Any], word: str) -> None:
    setup = Setup(optimizer=optimizer, lr=0.01, **options)
    with pytest.raises(ValueError, match=f"{word}.*coupling=.*register_coupling.*assume_sgd"):
        setup.cabs()
    assert unchanged(setup)
    setup.train(setup.cabs(assume_sgd=True), 3)


def test_parameters_outside_of_the_model_are_not_missed() -> None:
    setup = Setup()
    setup.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="1 parameters that are not in the model"):
        setup.cabs()


def test_groups_added_later_are_not_missed() -> None:
    setup = Setup()
    setup.optimizer = torch.optim.SGD(setup.model[0].parameters(), lr=0.1)
    scheduler = setup.cabs()
    setup.train(scheduler, 2)
    setup.optimizer.add_param_group({"params": list(setup.model[2].parameters())})
    with pytest.raises(RuntimeError, match="groups have changed"):
        setup.train(scheduler, 1)


class Pictures(Setup):
    """A problem with a layer that costs something to measure."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Unflatten(1, (1, 10)), nn.Conv1d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)


@pytest.mark.parametrize(
    ("kind", "bounds", "every"),
    [(Setup, (2, 40), 1), (Pictures, (2, 31), 10), (Pictures, (32, 64), 8), (Pictures, (65, 80), 5)],
)
def test_measures_every_step_where_that_is_free_and_seldom_where_not(
    kind: type[Setup], bounds: tuple[int, int], every: int
) -> None:
    setup = kind()
    setup.loader.batch_size = bounds[0]
    scheduler = setup.cabs(min_batch_size=bounds[0], max_batch_size=bounds[1])
    expected = [(step + 1) % every != 0 for step in range(2 * every)]
    held = []
    for _ in expected:
        setup.train(scheduler, 1)
        held.append(scheduler.state_dict()["unmeasured"] > 0)
    assert held == expected


def test_a_held_variance_is_averaged_like_a_measured_one() -> None:
    setup, other = Pictures(), Pictures()
    often, seldom = setup.cabs(measure_every=1, max_examples=None), other.cabs(measure_every=3, max_examples=None)
    other.model.load_state_dict(setup.model.state_dict())
    batches = [batch for batch, _ in zip(setup.loader, range(7), strict=False)]
    seen = []
    for batch in batches:
        for which, scheduler in ((setup, often), (other, seldom)):
            scheduler.step(which.backward(batch))
        assert often.last is not None
        assert seldom.last is not None
        seen.append((often.last.variance, seldom.last.variance, often.last.loss, seldom.last.loss))
    variances = [v for v, _, _, _ in seen]
    held = [variances[0]] * 3 + [variances[3]] * 3 + [variances[6]]
    assert [v for _, v, _, _ in seen] == pytest.approx(held)
    assert [a for *_, a, _ in seen] == pytest.approx([b for *_, b in seen])
    average = 0.0
    for v in held:
        average = 0.95 * average + 0.05 * v
    assert seldom.last is not None
    assert seldom.last.variance_average == pytest.approx(average / (1 - 0.95**7))


def test_resumes_between_measurements() -> None:
    setup, other = Pictures(), Pictures()
    scheduler = setup.cabs(measure_every=4)
    setup.train(scheduler, 6)
    other.model.load_state_dict(setup.model.state_dict())
    resumed = other.cabs(measure_every=4)
    resumed.load_state_dict(scheduler.state_dict())
    other.loader.load_state_dict(setup.loader.state_dict())
    assert other.train(resumed, 9) == setup.train(scheduler, 9)
    assert resumed.state_dict() == scheduler.state_dict()


def test_close_takes_the_hooks_out() -> None:
    setup = Setup()
    scheduler = setup.cabs()
    assert any(forward_hooks_of(module) for module in setup.model.modules())
    scheduler.close()
    assert not any(forward_hooks_of(module) for module in setup.model.modules())
