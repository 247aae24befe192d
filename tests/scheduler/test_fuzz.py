"""Random loops, with Ctrl-C at any moment: sizes are the reference's, or there is an error; never a silent one."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cabs.rules import round_and_clip
from loops import ALPHA, LEAST, MOST, MU, ByHand, Loop


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also in a process that was started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def interrupted_after(lines: int, function: str | None = None) -> Iterator[None]:
    """Sends Ctrl-C to this process after so many lines of Python: of whatever code, or of functions of that name."""
    left = lines

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "line" and function in (None, frame.f_code.co_name):
            left -= 1
            if left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Reference:
    """Algorithm 1 with held measurements, told what really went into each step."""

    def __init__(self) -> None:
        self.xi = self.loss = self.variance = 0.0
        self.total = 0

    def step(self, examples: int, loss: float, variance: float, measured: bool) -> int:
        self.variance = variance if measured else self.variance
        self.xi = MU * self.xi + (1 - MU) * self.variance
        self.loss = MU * self.loss + (1 - MU) * loss
        self.total += examples
        return round_and_clip(ALPHA * self.xi / self.loss, LEAST, MOST)


def variance_of(loop: Loop, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    assert loop.scheduler.variance is not None
    with loop.scheduler.variance.paused():
        gradients = torch.stack([loop.gradient(inputs[i : i + 1], targets[i : i + 1]) for i in range(len(inputs))])
    return float(gradients.square().sum(1).mean() - gradients.mean(0).square().sum())


def evaluate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.losses(torch.randn(6, 5).double(), torch.zeros(6).long())
    loop.model.train()


def extra(loop: Loop, batch: Any) -> None:
    loop.losses(*batch).backward()
    loop.optimizer.zero_grad(set_to_none=bool(torch.rand(()) < 0.5))


def logged(loop: Loop, batch: Any) -> None:
    torch.autograd.grad(loop.losses(*batch), list(loop.model.parameters()))


def other_data(loop: Loop, batch: Any) -> None:
    assert loop.scheduler.variance is not None
    with loop.scheduler.variance.paused():
        loop.losses(torch.randn(9, 5).double(), torch.zeros(9).long()).backward()
    loop.optimizer.zero_grad()


def forward_only(loop: Loop, batch: Any) -> None:
    loop.losses(*batch)


ASIDE: list[Callable[[Loop, Any], None]] = [extra, logged, other_data, forward_only, lambda loop, batch: evaluate(loop)]


def resumed(loop: Loop, options: dict[str, Any]) -> Loop:
    """Another process that goes on from the states."""
    again = Loop(**options)
    again.model.load_state_dict(loop.model.state_dict())
    again.optimizer.load_state_dict(loop.optimizer.state_dict())
    again.scheduler.load_state_dict(loop.scheduler.state_dict())
    again.loader.load_state_dict(loop.loader.state_dict())
    loop.scheduler.close()
    again.batches = iter(again.loader)
    return again


def training_step(loop: Loop, dice: random.Random, record: dict[str, Any]) -> None:
    """One turn of a loop as people write them; what is certain of the step is in the record as soon as it is."""
    batch = loop.next()
    for _ in range(dice.randrange(3)):
        dice.choice(ASIDE)(loop, batch)
    if dice.random() < 0.15:
        if dice.random() < 0.5:
            loop.losses(*batch).backward()
        return  # dropped; what it left in the gradients is cleared below, at the next turn
    loop.optimizer.zero_grad()
    loss = loop.losses(*batch)
    loss.backward()
    record["loss"], record["examples"] = loss.item(), len(batch[0])
    record["variance"] = variance_of(loop, *batch)
    loop.optimizer.step()
    if dice.random() < 0.3:
        evaluate(loop)
    loop.scheduler.step(loss)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where Python itself drops Ctrl-C
@pytest.mark.parametrize("seed", range(40))
def test_random_loops(seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    options = {"measure_every": dice.choice([1, 3]), "length": dice.choice([37, 200])}
    loop, reference = Loop(**options), Reference()
    made = interrupts = 0
    for _ in range(20):
        before, record = loop.scheduler.last, {}
        lines = dice.choice([0, 0, dice.randrange(1, 600), dice.randrange(1, 6000)])
        try:
            if lines:
                with interrupted_after(lines):
                    training_step(loop, dice, record)
            else:
                training_step(loop, dice, record)
        except KeyboardInterrupt:
            interrupts += 1
            torch.set_grad_enabled(True)  # torch.no_grad() is not undone if Ctrl-C comes while it begins
            if dice.random() < 0.3:
                loop.batches = iter(loop.loader)  # the cell is run again
        last = loop.scheduler.last
        if last is not before:
            assert last is not None
            made += 1
            size = reference.step(record["examples"], record["loss"], record["variance"], last.measured)
            assert last.examples == record["examples"]
            assert last.loss == pytest.approx(record["loss"], rel=1e-12)
            assert last.variance == pytest.approx(reference.variance, rel=1e-9)
            assert (last.batch_size, last.examples_total) == (size, reference.total)
        assert loop.loader.batch_size == loop.scheduler.last_batch_size
        if dice.random() < 0.1:
            loop = resumed(loop, options)
    assert made > 3
    assert interrupts or seed != 0


@contextmanager
def interrupted_in(seconds: float) -> Iterator[None]:
    """Sends Ctrl-C to this process after some time, unless the block has ended by then."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer for signals")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where Python itself drops Ctrl-C
def test_going_on_after_ctrl_c_in_forward_or_backward() -> None:
    """Ctrl-C at any moment of a forward and backward pass: the next step is that of Algorithm 1 by hand."""
    loop, hand, dice = Loop(), ByHand(), random.Random(0)

    def passes() -> float:
        begun = time.perf_counter()
        loop.losses(*loop.next()).backward()
        return time.perf_counter() - begun

    usual = min(passes() for _ in range(5))
    interrupts = 0
    for _ in range(60):
        try:
            with interrupted_in(dice.uniform(0.02, 1.0) * usual):
                passes()
        except KeyboardInterrupt:
            interrupts += 1
            torch.set_grad_enabled(True)  # torch.no_grad() is not undone if Ctrl-C comes while it begins
        loop.optimizer.zero_grad()
        inputs, targets = loop.next()
        loss = loop.losses(inputs, targets)
        loss.backward()
        size = loop.by_hand(hand, inputs, targets)
        loop.optimizer.step()
        assert loop.scheduler.step(loss) == size
    assert interrupts > 10


@pytest.mark.parametrize("line", range(1, 5))
def test_derivatives_that_are_looked_at_and_interrupted(line: int) -> None:
    loop = Loop()
    with pytest.raises(KeyboardInterrupt), interrupted_after(line, "looking"):
        logged(loop, loop.next())
    inputs, targets = loop.next()
    loop.optimizer.zero_grad()
    loss = loop.losses(inputs, targets)
    loss.backward()
    loop.optimizer.step()
    loop.scheduler.step(loss)
    assert loop.scheduler.last is not None
    assert loop.scheduler.last.measured
