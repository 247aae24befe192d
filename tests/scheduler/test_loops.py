"""Loops as people write them: sizes are Algorithm 1's for the examples that went into a step, or there is an error."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, rules
from loops import ALPHA, ByHand, Loop, data, network


def finish(loop: Loop, loss: Any) -> None:
    loop.optimizer.step()
    loop.scheduler.step(loss)
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation(parts: int) -> None:
    """The batch of the step has the size the rule asks for, in as many parts as the loop accumulates."""
    loop, hand = Loop(accumulation=parts), ByHand()
    for _ in range(20):
        taken, total = [], torch.zeros(())
        for _ in range(parts):
            taken.append(loop.next())
            loss = loop.losses(*taken[-1]) / parts
            loss.backward()
            total = total + loss.detach()
        inputs, targets = (torch.cat(column) for column in zip(*taken, strict=True))
        assert len(inputs) == loop.scheduler.last_batch_size
        expected = loop.by_hand(hand, inputs, targets, parts)
        finish(loop, total)
        assert loop.scheduler.last_batch_size == expected
        assert loop.loader.batch_size * parts == expected
        assert loop.scheduler.last is not None
        assert loop.scheduler.last.examples == len(inputs)
        assert loop.scheduler.last.examples_total == hand.examples_total
    assert len(inputs) > 8, "sizes move"


def test_accumulation_to_the_end_of_an_epoch() -> None:
    """The last part of an epoch is smaller, and a step may reach into the next: weights are 1/(K b) for each part."""
    loop = Loop(length=50, loader={"stream": False}, accumulation=3, smoothing=0.0)
    taken: list[Any] = []
    total, uneven = torch.zeros(()), 0
    for _ in range(6):
        for batch in loop.loader:
            taken.append(batch)
            loss = loop.losses(*batch) / 3
            loss.backward()
            total = total + loss.detach()
            if len(taken) < 3:
                continue
            assert loop.scheduler.variance is not None
            with loop.scheduler.variance.paused():
                gradients = torch.stack(
                    [loop.gradient(x[i : i + 1], y[i : i + 1]) for x, y in taken for i in range(len(x))]
                )
            weights = torch.cat([torch.full((len(x),), 1 / (3 * len(x)), dtype=torch.float64) for x, _ in taken])
            mean = (weights.unsqueeze(1) * gradients).sum(0)
            expected = float((weights * gradients.square().sum(1)).sum() - mean.square().sum())
            uneven += len({len(x) for x, _ in taken}) > 1
            finish(loop, total)
            assert loop.scheduler.last is not None
            assert loop.scheduler.last.variance == pytest.approx(expected, rel=1e-9)
            taken, total = [], torch.zeros(())
    assert uneven > 2


def test_the_loss_of_one_part_is_not_that_of_the_step() -> None:
    loop = Loop(accumulation=2)
    for _ in range(2):
        loss = loop.losses(*loop.next()) / 2
        loss.backward()
    loop.optimizer.step()
    with pytest.raises(ValueError, match="add the losses up"):
        loop.scheduler.step(loss)


def test_accumulation_that_nobody_told_of() -> None:
    loop = Loop()
    for _ in range(3):
        loss = loop.losses(*loop.next()) / 3
        loss.backward()
    loop.optimizer.step()
    with pytest.raises(RuntimeError, match=r"2 more backward passes.*8 examples.*accumulation=3"):
        loop.scheduler.step(loss)


def test_a_batch_that_goes_through_backward_twice() -> None:
    loop = Loop()
    batch = loop.next()
    for _ in range(2):
        loss = loop.losses(*batch)
        loss.backward()
    loop.optimizer.step()
    with pytest.raises(RuntimeError, match=r"handed out 8 examples.*gradients of 16.*paused"):
        loop.scheduler.step(loss)


def sam(loop: Loop, batch: Any) -> torch.Tensor:
    """Sharpness-aware minimisation: a first pass to climb, a second from there."""
    loop.losses(*batch).backward()
    gradients = [p.grad.clone() for p in loop.model.parameters()]
    with torch.no_grad():
        for p, g in zip(loop.model.parameters(), gradients, strict=True):
            p += 0.01 * g
    loop.optimizer.zero_grad()
    loss = loop.losses(*batch)
    loss.backward()
    return loss


def fgsm(loop: Loop, batch: Any) -> torch.Tensor:
    """An adversarial input, found by a backward pass whose gradients are cleared."""
    inputs = batch[0].clone().requires_grad_()
    loop.losses(inputs, batch[1]).backward()
    loop.optimizer.zero_grad(set_to_none=False)
    loss = loop.losses(batch[0] + 0.01 * inputs.grad.sign(), batch[1])
    loss.backward()
    return loss


def logged(loop: Loop, batch: Any) -> torch.Tensor:
    """The gradient's norm for the log, before and after."""
    loss = loop.losses(*batch)
    torch.autograd.grad(loss, list(loop.model.parameters()), retain_graph=True)
    loss.backward()
    other = loop.losses(*batch)
    torch.autograd.grad(other, list(loop.model.parameters()))
    return loss


def aside(loop: Loop, batch: Any) -> torch.Tensor:
    """Other data, said to be no part of the step."""
    assert loop.scheduler.variance is not None
    with loop.scheduler.variance.paused():
        loop.losses(torch.randn(3, 5).double(), torch.zeros(3).long()).backward()
    loop.optimizer.zero_grad()
    loss = loop.losses(*batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("measure_every", [1, 3])
@pytest.mark.parametrize("way", [sam, fgsm, logged, aside])
def test_extra_passes(way: Any, measure_every: int) -> None:
    loop, hand = Loop(measure_every=measure_every), ByHand()
    for number in range(12):
        batch = loop.next()
        weights = [p.detach().clone() for p in loop.model.parameters()]
        loss = way(loop, batch)
        inputs, targets = batch
        if way is fgsm:
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(loop.losses(x, targets), x)
            inputs = batch[0] + 0.01 * slope.sign()
        expected = loop.by_hand(hand, inputs, targets)
        if way is sam:
            with torch.no_grad():
                for p, w in zip(loop.model.parameters(), weights, strict=True):
                    p.copy_(w)
        finish(loop, loss)
        assert loop.scheduler.last is not None
        assert loop.scheduler.last.examples == len(inputs)
        assert loop.scheduler.last.measured == (number % measure_every == 0)
        if measure_every == 1:
            assert loop.scheduler.last_batch_size == expected


@pytest.mark.parametrize("way", ["after backward", "before backward", "not a number"])
def test_a_batch_that_is_dropped(way: str) -> None:
    loop, hand = Loop(), ByHand()
    for number in range(12):
        batch = loop.next()
        if number % 3 == 1:
            inputs = batch[0] * math.nan if way == "not a number" else batch[0]
            loss = loop.losses(inputs, batch[1])
            if way != "before backward":
                loss.backward()
            loop.optimizer.zero_grad()
            continue
        loss = loop.losses(*batch)
        loss.backward()
        expected = loop.by_hand(hand, *batch)
        finish(loop, loss)
        assert loop.scheduler.last_batch_size == expected


def test_a_dropped_batch_whose_gradients_stay() -> None:
    loop = Loop()
    loop.losses(*loop.next()).backward()
    loss = loop.losses(*loop.next())
    loss.backward()
    loop.optimizer.step()
    with pytest.raises(RuntimeError, match=r"dropped, clear its gradients with optimizer\.zero_grad"):
        loop.scheduler.step(loss)


def test_a_first_argument_that_holds_no_examples() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, settings: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * settings.sum())

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=ALPHA)
    loader = AdaptiveLoader(data(), batch_size=16)
    scheduler = CABS(model, optimizer, loader, min_batch_size=4, max_batch_size=64)
    inputs, targets = next(iter(loader))
    loss = F.cross_entropy(model(torch.ones(4).double() / 4, inputs), targets)
    loss.backward()
    optimizer.step()
    scheduler.step(loss)
    assert scheduler.last is not None
    assert scheduler.last.examples == 16


def test_a_part_of_the_batch() -> None:
    loop = Loop()
    inputs, targets = loop.next()
    loss = loop.losses(inputs[:5], targets[:5])
    loss.backward()
    loop.optimizer.step()
    with pytest.raises(RuntimeError, match="handed out 8 examples and the model was called with 5"):
        loop.scheduler.step(loss)


# -- the record


def test_every_step_has_its_own_record() -> None:
    loop = Loop(measure_every=4)
    total, measured = 0, []
    for number in range(9):
        inputs, targets = loop.next()
        loss = loop.losses(inputs, targets)
        loss.backward()
        finish(loop, loss)
        last = loop.scheduler.last
        total += len(inputs)
        assert last is not None
        assert (last.examples, last.examples_total) == (len(inputs), total)
        assert last.loss == pytest.approx(loss.item())
        assert last.measured == (number % 4 == 0)
        measured.append(last.variance)
        assert last.noise_share == pytest.approx(
            ALPHA * last.variance_average / (4 * last.examples * last.loss_average)
        )
    assert len(set(measured)) == 3


@pytest.mark.parametrize(
    ("wanted", "multiple_of", "clipped", "size"),
    [
        (1.0, 9, "min", 9),
        (1e9, 7, "max", 63),
        (21.4, 7, None, 21),
        (63.9, 7, None, 63),
        (9.0, 9, None, 9),
        (10.0, 7, "min", 14),
        (4.6, 1, "min", 8),
    ],
)
def test_clipped_minds_multiples(wanted: float, multiple_of: int, clipped: str | None, size: int) -> None:
    loop = Loop(min_batch_size=8, max_batch_size=64, multiple_of=multiple_of)
    loss = loop.losses(*loop.next())
    loss.backward()
    assert loop.scheduler.variance is not None
    loop.optimizer.step()
    loop.optimizer.param_groups[0]["lr"] = wanted * loss.item() / loop.scheduler.variance.trace().item()
    loop.scheduler.step(loss)
    assert loop.scheduler.last is not None
    assert loop.scheduler.last.raw_batch_size == pytest.approx(wanted)
    assert (loop.scheduler.last.clipped, loop.scheduler.last_batch_size) == (clipped, size)


def test_the_unbiased_trace_is_not_corrected_again() -> None:
    from cabs.scheduler import Measurement

    fields = {"step": 1, "examples": 10, "variances": (20.0,), "norms": (5.0,)}
    assert Measurement(**fields, biased=True).true_norms == pytest.approx((5 - 20 / 9,))
    assert Measurement(**fields, biased=False).true_norms == pytest.approx((3.0,))


# -- the optimizer and the loader


def test_an_optimizer_that_did_not_step_is_told_once() -> None:
    loop = Loop()
    for number in range(3):
        loss = loop.losses(*loop.next())
        loss.backward()
        if number == 0:
            with pytest.warns(UserWarning, match="SGD.*has not made a step"):
                loop.scheduler.step(loss)
        else:
            loop.scheduler.step(loss)
        loop.optimizer.zero_grad()


def test_another_optimizer_than_the_one_stepped() -> None:
    loop = Loop()
    other = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loss = loop.losses(*loop.next())
    loss.backward()
    other.step()
    with pytest.warns(UserWarning, match="pass the optimizer that you step with"):
        loop.scheduler.step(loss)


@pytest.mark.filterwarnings("ignore:.*BatchNorm in training mode")
def test_a_last_example_alone_does_not_meet_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = AdaptiveLoader(data(33), batch_size=8, shuffle=True, seed=0)
    scheduler = CABS(model, optimizer, loader, min_batch_size=4, max_batch_size=32, check_owners=False)
    for _ in range(4):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
    assert scheduler.last is not None
    assert scheduler.last.examples_total == 4 * 33


def test_the_length_of_a_loader_that_moves() -> None:
    loop = Loop(loader={"stream": False})
    with pytest.raises(TypeError, match="size moves"):
        len(loop.loader)
    assert sum(len(inputs) for inputs, _ in loop.loader) == 200
    fixed = AdaptiveLoader(data(), batch_size=50)
    BatchSizeScheduler(loop.model, loop.optimizer, fixed, rules.Constant(50), max_batch_size=64)
    assert len(fixed) == 4


def test_a_loader_of_microbatches_in_a_plain_loop() -> None:
    loader = AdaptiveLoader(data(), batch_size=16, max_microbatch_size=8)

    def loop() -> None:
        for inputs, targets in loader:
            assert inputs is targets

    with pytest.raises(TypeError, match=r"for inputs, targets in batch:"):
        loop()


def test_two_schedulers_one_after_the_other() -> None:
    """A cell that runs twice: the second scheduler takes over, and closing the first does not disturb it."""
    loop = Loop()
    with pytest.warns(UserWarning, match="takes over"):
        again = CABS(loop.model, loop.optimizer, loop.loader, min_batch_size=4, max_batch_size=64)
    loop.scheduler.close()
    loss = loop.losses(*loop.next())
    loss.backward()
    loop.optimizer.step()
    again.step(loss)
    assert again.last is not None
    with pytest.raises(RuntimeError, match="closed"):
        loop.scheduler.step(loss)


def test_a_scheduler_that_is_dropped_in_the_middle_of_a_batch_leaves_nothing_behind() -> None:
    def begin() -> weakref.ref[torch.nn.Module]:
        loop = Loop()
        loop.losses(*loop.next()).backward()
        return weakref.ref(loop.model)

    modes = len(_get_current_function_mode_stack())
    models = [begin() for _ in range(3)]
    gc.collect()
    assert not any(model() for model in models)
    Loop().optimizer.step()
    assert len(_get_current_function_mode_stack()) == modes


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_that_a_scaler_skips_does_not_count(every: int) -> None:
    """Also where what was measured is finite, and where nothing is measured: the optimizer is who knows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(grad_scaler=scaler, measure_every=every)
    kept = []
    for number in range(12):
        inputs, targets = loop.next()
        before = loop.scheduler.state_dict()
        loss = loop.losses(inputs, targets)
        loop.optimizer.zero_grad()
        scaler.scale(loss).backward()
        skipped = number in (2, 5, 6)
        if skipped:
            next(loop.model.parameters()).grad[0, 0] = math.inf  # as an overflow behind what is measured
        scaler.step(loop.optimizer)
        scaler.update()
        assert loop.scheduler.step(loss) == loop.loader.batch_size
        assert (loop.scheduler.state_dict() == before) is skipped
        kept += [] if skipped else [len(inputs)]
    assert loop.scheduler.last is not None
    assert loop.scheduler.last.examples_total == sum(kept)


def test_a_scheduler_that_steps_before_the_scaler_is_told_so() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(grad_scaler=scaler)

    def steps() -> None:
        for _ in range(40):
            inputs, targets = loop.next()
            loss = loop.losses(inputs, targets)
            loop.optimizer.zero_grad()
            scaler.scale(loss).backward()
            loop.scheduler.step(loss)

    with pytest.warns(UserWarning, match=r"call optimizer\.step\(\) before it") as warned:
        steps()
    assert len(warned) == 1
