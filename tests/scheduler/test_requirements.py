"""What people try at the doorstep: each gets a clear error that says what to do, before anything has changed."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, couplings, rules
from cabs.torch_internals import forward_hooks_of
from loops import Loop, data, network


def made(**options: Any) -> CABS:
    model = network()
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(data(), batch_size=8)
    return CABS(model, optimizer, loader, **{"min_batch_size": 4, "max_batch_size": 64, **options})


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"grad_scaler": 3}, TypeError, "grad_scaler is a int: it must be the torch.amp.GradScaler"),
        ({"monitor_only": "no"}, TypeError, "monitor_only is 'no'"),
        ({"assume_sgd": 1}, TypeError, "assume_sgd is 1"),
        ({"check_owners": None}, TypeError, "check_owners is None"),
        ({"min_batch_size": 4.0}, TypeError, "min_batch_size is 4.0"),
        ({"min_batch_size": 1}, ValueError, "one example has no variance"),
        ({"max_batch_size": True}, TypeError, "max_batch_size is True"),
        ({"smoothing": "much"}, ValueError, "smoothing is 'much'"),
        ({"smoothing": math.nan}, ValueError, "smoothing is nan"),
        ({"measure_every": 0}, ValueError, "measure_every is 0"),
        ({"measure_every": True}, ValueError, "measure_every is True"),
        ({"accumulation": 0}, ValueError, "accumulation is 0"),
        ({"accumulation": 100}, ValueError, "no multiple of 100"),
        ({"optimizer": torch.optim.Rprop}, ValueError, "Rprop is not known to make such: pass coupling="),
        ({"coupling": 3}, TypeError, "coupling is 3"),
        ({"coupling": couplings.Adam}, TypeError, r"make one, with \(\)"),
        ({"coupling": couplings.SGD(), "assume_sgd": True}, ValueError, "choose one of them"),
    ],
)
def test_arguments(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        made(**options)


def test_arguments_in_the_wrong_places() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(data(), batch_size=8)
    for wrong, words in (
        ((None, optimizer, loader), "model is None"),
        ((optimizer, model, loader), "model is a SGD"),
        ((loader, optimizer, model), "model is a AdaptiveLoader"),
        ((model, loader, optimizer), "optimizer is a AdaptiveLoader"),
        ((model, None, loader), "optimizer is None"),
        ((model, optimizer, model), "loader is a Sequential"),
    ):
        with pytest.raises(TypeError, match=words):
            CABS(*wrong)  # type: ignore[arg-type]
    assert not any(forward_hooks_of(module) for module in model.modules())
    assert loader.on_delivery is None


def test_integers_of_numpy() -> None:
    scheduler = made(min_batch_size=numpy.int64(4), max_batch_size=numpy.int32(32), multiple_of=numpy.uint8(2))
    assert (scheduler.min_batch_size, scheduler.max_batch_size) == (4, 32)
    assert type(scheduler.last_batch_size) is int


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.AdamW])
def test_only_looking_takes_any_optimizer(optimizer: type[torch.optim.Optimizer]) -> None:
    scheduler = made(optimizer=optimizer, monitor_only=True)
    assert scheduler.loader is not None
    assert scheduler.loader.batch_size == 8


def test_only_looking_at_a_step_that_nobody_knows_says_so() -> None:
    with pytest.warns(UserWarning, match="Rprop is not known.*what is shown is plain SGD's"):
        made(optimizer=torch.optim.Rprop, monitor_only=True)
    made(optimizer=torch.optim.Rprop, monitor_only=True, assume_sgd=True)


class Wrapped(torch.optim.Optimizer):
    """As accelerate's: an optimizer around another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_an_optimizer_in_a_wrapper() -> None:
    loop = Loop()
    wrapped = Wrapped(Wrapped(loop.optimizer))
    loop.scheduler.close()
    scheduler = CABS(loop.model, wrapped, loop.loader, min_batch_size=4, max_batch_size=64)
    loss = loop.losses(*loop.next())
    loss.backward()
    wrapped.step()
    scheduler.step(loss)
    assert scheduler.last is not None


@pytest.mark.parametrize("loss", ["1.0", [1.0], True, {"loss": 1.0}])
def test_what_is_no_loss(loss: Any) -> None:
    loop = Loop()
    loop.losses(*loop.next()).backward()
    with pytest.raises(TypeError, match="pass the mean loss of the batch"):
        loop.scheduler.step(loss)


def test_a_loss_without_a_graph_in_backward() -> None:
    loop = Loop()
    loop.next()
    with pytest.raises(TypeError, match="takes a tensor"):
        loop.scheduler.backward(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [math.nan, None, "16", True])
def test_what_a_rule_may_not_return(answer: Any) -> None:
    class Wrong(rules.Rule):
        def __call__(self, estimates: rules.Estimates) -> float:
            return answer

    loop = Loop()
    loop.scheduler.close()
    scheduler = BatchSizeScheduler(
        loop.model, loop.optimizer, loop.loader, Wrong(), min_batch_size=4, max_batch_size=64
    )
    before = scheduler.state_dict()
    loss = loop.losses(*loop.next())
    loss.backward()
    loop.optimizer.step()
    with pytest.raises(ValueError, match="must return the batch size"):
        scheduler.step(loss)
    assert scheduler.state_dict() == before


@pytest.mark.parametrize("rate", [math.nan, -0.1, math.inf])
def test_learning_rates_that_make_no_sense(rate: float) -> None:
    loop = Loop()
    loss = loop.losses(*loop.next())
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ValueError, match="the learning rate is"):
        loop.scheduler.step(loss)


def test_states_that_are_damaged() -> None:
    loop = Loop()
    for _ in range(3):
        loss = loop.losses(*loop.next())
        loss.backward()
        loop.optimizer.step()
        loop.scheduler.step(loss)
        loop.optimizer.zero_grad()
    state = loop.scheduler.state_dict()
    damaged = [
        {**state, "averages": [math.nan] * len(state["averages"])},
        {**state, "weight": "much"},
        {**state, "examples_total": None},
        {**state, "held": {**state["held"], "variances": [math.inf]}},
    ]
    for one in damaged:
        with pytest.raises(ValueError, match="not made of finite numbers"):
            loop.scheduler.load_state_dict(one)
        assert loop.scheduler.state_dict() == state
    with pytest.raises(TypeError, match="a scheduler's state is a dict"):
        loop.scheduler.load_state_dict([1, 2])  # type: ignore[arg-type]


def test_after_closing() -> None:
    loop = Loop()
    loop.scheduler.close()
    with pytest.raises(RuntimeError, match="the scheduler is closed"):
        loop.scheduler.step(1.0)
    with pytest.raises(RuntimeError, match="the scheduler is closed"):
        loop.scheduler.backward(torch.ones((), requires_grad=True))
    assert "closed" in repr(loop.scheduler)
    assert not any(p._backward_hooks for p in loop.model.parameters())


def test_it_says_what_it_is() -> None:
    loop = Loop()
    text = repr(loop.scheduler)
    assert text.startswith("<CABS: CABS(loss_floor=0.0")
    assert text.endswith("sizes 4 to 64, next 8, after 0 examples>")


def test_a_model_without_parameters_that_are_trained() -> None:
    model = nn.Linear(5, 3)
    other = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="steps 2 parameters that are not in the model"):
        CABS(model, optimizer, AdaptiveLoader(data(), batch_size=16))


@pytest.mark.parametrize("size", [3, 65, math.inf])
def test_a_first_size_out_of_bounds(size: float) -> None:
    """A size that somebody wrote down is never another one without a word."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bounds: dict[str, Any] = {"min_batch_size": 4, "max_batch_size": 64}
    made_of = [rules.Function(lambda n: size)]
    if size < math.inf:
        made_of += [rules.Constant(int(size)), rules.Steps({0: int(size), 100: 8}), rules.Ramp(size, 8, 100)]
    for rule in [*made_of, *map(rules.BySteps, made_of)]:
        with pytest.raises(ValueError, match=rf"begins with {size:g}, outside of the bounds 4 to 64: widen them"):
            BatchSizeScheduler(model, optimizer, AdaptiveLoader(data(), batch_size=8), rule, **bounds)


def test_one_example_at_a_time_where_nothing_is_measured() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(data(), batch_size=8)
    assert BatchSizeScheduler(model, optimizer, loader, rules.Constant(1), min_batch_size=1).last_batch_size == 1
    with pytest.raises(ValueError, match="one example has no variance"):
        BatchSizeScheduler(model, optimizer, loader, rules.NormTest(), min_batch_size=1)
    with pytest.raises(ValueError, match="at least 1"):
        BatchSizeScheduler(model, optimizer, loader, rules.Constant(1), min_batch_size=0)
