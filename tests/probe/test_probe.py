"""The probe as a user meets it: what it reports, what it leaves behind (nothing), and what it refuses."""

from __future__ import annotations

import json
import math
import random
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cabs
from cabs import CABS, AdaptiveLoader, probe
from cabs.probe import Report
from cabs.probe.task import Task
from cabs.probe.timing import Fits, largest, time_steps, timed_sizes
from cabs.scheduler.microbatch_size import Memory

QUICK: dict[str, Any] = {"seconds": 5, "examples": 128, "max_batch_size": 64}


class Stateful(nn.Module):
    """Keeps things of all kinds: parameters, buffers set and replaced, counters, lists, tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.register_buffer("average", torch.zeros(3))
        self.plain = torch.zeros(3)
        self.calls = 0
        self.history: list[float] = []
        self.seen: dict[str, Tensor] = {"last": torch.zeros(())}
        self.recent: deque[int] = deque(maxlen=3)
        self.random = random.Random(3)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)  # replaces the buffer
        self.plain.add_(1)
        self.calls += 1
        self.history.append(out.mean().item())
        self.seen["last"] += 1
        self.recent.append(self.random.randrange(9))
        torch.rand(2, generator=self.generator)
        self.new = "made in the forward pass"
        return out


def data(examples: int = 300) -> TensorDataset:
    x = torch.randn(examples, 6)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loss_of(model: nn.Module) -> Any:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that must be the same afterwards, in values and in identity."""
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "values": [tensor.detach().clone() for tensor in tensors],
        "tensors": [id(tensor) for tensor in tensors],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "attributes": {
            number: {
                name: (id(value), repr(value.getstate() if isinstance(value, random.Random) else value))
                for name, value in vars(module).items()
                if name not in ("_parameters", "_buffers", "_modules")
            }
            for number, module in enumerate(model.modules())
        },
        "state": [
            (id(p), {name: (id(v), v.clone() if isinstance(v, Tensor) else v) for name, v in state.items()})
            for p, state in optimizer.state.items()
        ],
        "groups": [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ],
        "generators": [
            value.get_state()
            for m in model.modules()
            for value in vars(m).values()
            if isinstance(value, torch.Generator)
        ],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "mode": torch.is_grad_enabled(),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert [name for name in left if not same(left[name], right[name])] == []


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:.*mix")
@pytest.mark.filterwarnings("ignore:.*BatchNorm")
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_everything_is_as_before(kind: str, stepped: bool) -> None:
    model = Stateful()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    if stepped:
        F.cross_entropy(model(torch.randn(9, 6)), torch.zeros(9, dtype=torch.long)).backward()
        optimizer.step()
        schedule.step()
    before, step = snapshot(model, optimizer), optimizer.step
    report = probe(model, data(), loss_of(model), optimizer, after=64, **QUICK)
    assert report.after == 64
    assert optimizer.step == step
    # ``torch.randn`` of the data came before the snapshot was compared
    after = snapshot(model, optimizer)
    assert_same({**before, "torch": None}, {**after, "torch": None})


def test_random_numbers_are_as_before() -> None:
    model, dataset = small(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    probe(model, dataset, loss_of(model), optimizer, **QUICK)
    assert_same(before, snapshot(model, optimizer))


def interrupting(model: nn.Module, calls: int, error: type[BaseException]) -> Any:
    """A loss that fails at its so-manieth call, in the middle of things."""
    made = 0

    def loss(batch: Any) -> Tensor:
        nonlocal made
        made += 1
        found = F.cross_entropy(model(batch[0]), batch[1])
        if made == calls:
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error("in the middle")
        return found

    return loss


@pytest.mark.filterwarnings("ignore:.*mix")
@pytest.mark.filterwarnings("ignore:.*BatchNorm")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("calls", [1, 5, 12, 20, 60, 75])
def test_after_an_error_or_an_interrupt_everything_is_as_before(calls: int, error: type[BaseException]) -> None:
    model, dataset = Stateful(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = snapshot(model, optimizer)
    with pytest.raises(error):
        probe(model, dataset, interrupting(model, calls, error), optimizer, after=64, **QUICK)
    assert_same(before, snapshot(model, optimizer))
    # and nothing is left in the model that would see or slow later passes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore:.*mix")
@pytest.mark.filterwarnings("ignore:.*BatchNorm")
def test_ctrl_c_at_any_moment(request: pytest.FixtureRequest) -> None:
    # Shells start what runs in the background without it.
    before_us = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before_us))
    model, dataset = Stateful(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = snapshot(model, optimizer)
    interrupted = 0
    for number in range(12):
        timer = threading.Timer(0.01 + 0.017 * number, signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            probe(model, dataset, loss_of(model), optimizer, **QUICK)
            timer.join()
            time.sleep(0.05)  # the signal is on its way
        except KeyboardInterrupt:
            interrupted += 1
        assert_same(before, snapshot(model, optimizer))
    assert interrupted > 2


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused_and_as_before() -> None:
    model, dataset = small(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    F.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1]).backward()
    optimizer.step()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="probe without what steps the optimizer there"):
        probe(model, dataset, loss_of(model), optimizer, **QUICK)
    assert_same(before, snapshot(model, optimizer))


def test_the_report() -> None:
    model, dataset = small(), data()
    report = probe(model, dataset, loss_of(model), torch.optim.SGD(model.parameters(), lr=0.5), **QUICK)
    assert isinstance(report, Report)
    assert report.largest_batch_size == 64
    assert report.fits.bound == "max_batch_size"
    assert [m for m, _ in report.times.measured] == [2, 4, 8, 16, 32, 64]
    assert report.cabs_batch_size is not None
    assert report.noise_share is not None
    assert report.noise_share.value == pytest.approx(report.cabs_batch_size.value / 4 / 32)
    assert report.trace.low < report.trace.value < report.trace.high
    assert report.recommendation.size is not None
    assert 16 <= report.recommendation.size <= 64
    text = str(report)
    for word in ("tr Σ", "noise scale", "CABS", "noise share at m = 32", "Recommended: m =", "SGD, lr 0.5"):
        assert word in text
    numbers = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert numbers["recommendation"]["size"] == report.recommendation.size
    assert "Recommended" in repr(report)


def test_a_loss_that_takes_its_batch_apart() -> None:
    """As loops do; examples of a dict dataset have names."""
    model, tensors = small(), data().tensors
    dataset = [{"x": x, "labels": y} for x, y in zip(*tensors, strict=True)]

    def loss(batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(model(batch["x"].mul_(2)), labels)

    report = probe(model, dataset, loss, torch.optim.SGD(model.parameters(), lr=0.1), **QUICK)
    assert report.trace.value > 0
    assert torch.equal(dataset[0]["x"], tensors[0][0])


def test_the_same_seed_gives_the_same_numbers() -> None:
    model, dataset = small(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first, second = (probe(model, dataset, loss_of(model), optimizer, **QUICK) for _ in range(2))
    other = probe(model, dataset, loss_of(model), optimizer, seed=1, **QUICK)
    assert first.noise == second.noise
    assert first.noise != other.noise


def test_after_some_training_the_loss_is_lower() -> None:
    model, dataset = small(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start, later = (probe(model, dataset, loss_of(model), optimizer, after=n, **QUICK) for n in (0, 3000))
    assert later.noise.loss.high < start.noise.loss.low
    assert later.after == 3008  # whole steps
    assert "after 3,008 examples" in later.title


def test_an_optimizer_with_a_state_has_its_own_p() -> None:
    model, dataset = small(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1]).backward()
        optimizer.step()
    assert probe(model, dataset, loss_of(model), optimizer, **QUICK).filled == 0


def test_losses_of_single_examples_are_as_good_as_their_mean() -> None:
    model, dataset = small(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = probe(model, dataset, loss_of(model), optimizer, **QUICK)
    single = probe(model, dataset, lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), optimizer, **QUICK)
    assert single.trace.value == pytest.approx(mean.trace.value, rel=1e-4)


def test_examples_are_collated_as_in_a_loader() -> None:
    model = small()
    dataset = [{"x": torch.randn(6), "y": number % 3} for number in range(50)]

    def collate(examples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        return torch.stack([one["x"] for one in examples]), torch.tensor([one["y"] for one in examples])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = probe(model, dataset, loss_of(model), optimizer, collate_fn=collate, **QUICK)
    assert report.fits == Fits(50, "dataset")


class Limited(Memory):
    """A machine on which so many examples fit: what a pass takes is counted, the limit is declared."""

    def __init__(self, examples: int) -> None:
        self.most, self.tried = examples, 0

    def limit(self) -> float:
        return self.most / 0.85

    def peak(self, work: Any) -> float:
        work()
        return float(self.tried)


def test_only_sizes_that_were_tried_are_reported() -> None:
    model, dataset, memory = small(), data(), Limited(100)
    tried = []

    def loss(batch: Any) -> Tensor:
        memory.tried = len(batch[0])
        tried.append(memory.tried)
        return F.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fits = largest(Task(model, dataset, loss), optimizer, most=4096, seconds=10, memory=memory)
    assert fits == Fits(64, "memory")
    assert max(tried) <= 100


def test_sizes_that_take_long_are_not_tried() -> None:
    model, dataset = small(), data(100_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fits = largest(Task(model, dataset, loss_of(model)), optimizer, most=90_000, seconds=0.001)
    assert fits.bound == "seconds"
    assert 32 <= fits.size < 90_000


def test_the_line_is_that_of_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take 5 ms and 0.1 ms an example by the clock, now and then ten times as long, the first ones too."""
    now, steps = 0.0, 0
    model, dataset = small(), data()

    def loss(batch: Any) -> Tensor:
        nonlocal now, steps
        steps += 1
        now += (0.005 + 0.0001 * len(batch[0])) * (10 if steps % 10 == 0 or steps < 7 else 1)
        return F.cross_entropy(model(batch[0]), batch[1])

    monkeypatch.setattr("time.perf_counter", lambda: now)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times = time_steps(Task(model, dataset, loss), optimizer, timed_sizes(24, 256), seconds=100.0)
    assert times.line == pytest.approx((0.005, 0.0001), rel=1e-6)
    assert times.saturation == pytest.approx(450)
    assert times.misfit == pytest.approx(0, abs=1e-6)


def test_what_is_timed() -> None:
    assert timed_sizes(32, 128) == [2, 4, 8, 16, 32, 64, 128]
    assert timed_sizes(48, 100) == [2, 4, 8, 16, 32, 48, 64, 100]
    assert timed_sizes(512, 3) == [2, 3]


class Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return delta * w, (delta * x).sum(0)


class Hidden(nn.Module):
    """Its gradients come by a way that cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Refused.apply(x, self.w))


def test_a_model_that_refuses_measurement_says_so_and_can_be_probed_by_microbatches() -> None:
    model, dataset = Hidden(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="estimator='microbatch'"):
        probe(model, dataset, loss_of(model), optimizer, **QUICK)
    assert probe(model, dataset, loss_of(model), optimizer, estimator="microbatch", **QUICK).trace.value > 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def with_model(**change: Any) -> dict[str, Any]:
    model = small()
    parts = {
        "model": model,
        "dataset": data(),
        "loss": loss_of(model),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        **QUICK,
    }
    return {**parts, **{name: make(model) if callable(make) else make for name, make in change.items()}}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no model": ({"model": 3}, TypeError, "model is a int"),
    "a loader": ({"dataset": lambda _: DataLoader(data())}, TypeError, "pass its dataset"),
    "a loader of ours": ({"dataset": lambda _: AdaptiveLoader(data())}, TypeError, "pass its dataset"),
    "a stream": ({"dataset": lambda _: Stream()}, TypeError, "must have __getitem__ and __len__"),
    "a tensor": ({"dataset": lambda _: torch.randn(9, 6)}, TypeError, "one example for each index"),
    "tensors": ({"dataset": lambda _: data().tensors}, TypeError, "make tensors a TensorDataset"),
    "nothing": ({"dataset": lambda _: []}, ValueError, "is empty"),
    "one example": ({"dataset": lambda _: data(1)}, ValueError, "one example has no variance"),
    "no loss": ({"loss": 3}, TypeError, "must be a function of a batch"),
    "a criterion": ({"loss": lambda _: nn.CrossEntropyLoss()}, TypeError, "compares outputs with targets"),
    "a function of two": ({"loss": lambda _: F.cross_entropy}, TypeError, "needs 2 arguments"),
    "a number": ({"loss": lambda _: lambda batch: 1.0}, TypeError, "loss returned float"),
    "a matrix": ({"loss": lambda model: lambda batch: model(batch[0])}, ValueError, r"shape \(\d+, 3\)"),
    "too few": ({"loss": lambda model: lambda batch: model(batch[0]).mean(1)[:5]}, ValueError, "5 numbers for"),
    "not finite": ({"loss": lambda model: lambda b: model(b[0]).mean() * math.nan}, ValueError, "is nan"),
    "no graph": ({"loss": lambda model: lambda b: model(b[0]).mean().detach()}, ValueError, "has no graph"),
    "a sum": (
        {"loss": lambda model: lambda b: F.cross_entropy(model(b[0]), b[1], reduction="sum")},
        ValueError,
        "return the mean over the examples",
    ),
    "another model": (
        {"loss": lambda _: (lambda other: lambda b: F.cross_entropy(other(b[0]), b[1]))(small())},
        ValueError,
        "no gradient reached",
    ),
    "no optimizer": ({"optimizer": None}, TypeError, "optimizer is None"),
    "no learning rate": (
        {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.0)},
        ValueError,
        "the learning rate is 0",
    ),
    "no coupling": (
        {"optimizer": lambda model: torch.optim.Rprop(model.parameters())},
        ValueError,
        "Rprop is not known.*assume_sgd=True",
    ),
    "foreign parameters": (
        {"optimizer": lambda _: torch.optim.SGD(small().parameters(), lr=0.1)},
        ValueError,
        "not in the model",
    ),
    "frozen": (
        {"optimizer": lambda model: torch.optim.SGD(model.requires_grad_(False).parameters(), lr=0.1)},
        ValueError,
        "no parameter that is trained",
    ),
    "too large": ({"batch_size": 500}, ValueError, "the dataset has 300 examples"),
    "no size": ({"batch_size": 0}, ValueError, "batch_size is 0"),
    "bounds": ({"min_batch_size": 128}, ValueError, "is above max_batch_size"),
    "estimator": ({"estimator": "paper"}, ValueError, "choose one of exact, microbatch"),
    "seconds": ({"seconds": 0}, ValueError, "positive number"),
    "floor": ({"loss_floor": math.nan}, ValueError, "finite number"),
    "after": ({"after": -1}, ValueError, "after is -1"),
    "examples": ({"examples": 3}, ValueError, "examples is 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    change, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        probe(**with_model(**change))


def test_an_optimizer_without_coupling_can_be_taken_for_sgd() -> None:
    made = with_model(optimizer=lambda model: torch.optim.Rprop(model.parameters(), lr=0.1))
    assert probe(**made, assume_sgd=True).cabs_batch_size is not None


def test_a_model_that_a_scheduler_measures_is_left_alone() -> None:
    made = with_model()
    scheduler = CABS(made["model"], made["optimizer"], AdaptiveLoader(made["dataset"], batch_size=16))
    with pytest.raises(RuntimeError, match="probe before it is made"):
        probe(**made)
    scheduler.close()
    assert probe(**made).trace.value > 0


def test_two_examples_are_enough() -> None:
    report = probe(**with_model(dataset=lambda _: data(2)))
    assert report.fits == Fits(2, "dataset")
    assert report.batch_size == 2
    assert report.cost is None
    assert report.recommendation.size == 2
    assert "could not be told" in str(report)


def test_a_loss_below_its_floor_has_no_size_and_says_why() -> None:
    report = probe(**with_model(loss_floor=5.0))
    assert report.cabs_batch_size is None
    assert report.noise_share is None
    assert report.recommendation.size is None
    assert "pass a lower bound of your loss" in str(report)
    assert report.trace.value > 0


def test_evaluation_mode_is_noted() -> None:
    made = with_model()
    made["model"].eval()
    assert "evaluation mode" in str(probe(**made))
    assert not made["model"].training


def test_it_is_a_function_of_the_package() -> None:
    assert callable(cabs.probe)
    from cabs.probe.report import Report as there

    assert there is Report
    assert callable(cabs.probe)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"loss_floor": 5.0}, {"dataset": lambda _: data(2)}])
@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_a_picture_is_drawn(change: dict[str, Any], ending: str, tmp_path: Path) -> None:
    probe(**with_model(**change)).picture(tmp_path / f"probe.{ending}")
    start = (tmp_path / f"probe.{ending}").read_bytes()[:4]
    assert start == (b"\x89PNG" if ending == "png" else b"%PDF")
