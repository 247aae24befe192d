"""A batch in microbatches is the same batch: gradients, tr Σ, F and the sizes that follow."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, rules
from cabs.scheduler.microbatch_size import MARGIN, Memory, find_microbatch_size

X = 4 * torch.randn(300, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (300,), generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, 3)
    ).double()


def train(microbatch_size: int | None, steps: int, **options: Any) -> tuple[nn.Module, list[tuple[Any, ...]]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = AdaptiveLoader(TensorDataset(X, Y), shuffle=True, seed=2, stream=True, max_microbatch_size=microbatch_size)
    scheduler = CABS(model, optimizer, loader, min_batch_size=5, max_batch_size=64, max_examples=None, **options)
    history = []
    for _, batch in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        if microbatch_size is None:
            inputs, targets = batch
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
        else:
            for inputs, targets in batch:
                scheduler.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
            scheduler.step()
        last = scheduler.last
        assert last is not None
        history.append((last.batch_size, last.loss, last.variance, last.gradient_norm_squared, last.examples))
    return model, history


@settings(max_examples=8, deadline=None)
@given(microbatch_size=st.integers(1, 30), every=st.integers(1, 3), smoothing=st.sampled_from([0.0, 0.5]))
def test_microbatches_give_the_trajectory_of_whole_batches(microbatch_size: int, every: int, smoothing: float) -> None:
    options = {"measure_every": every, "smoothing": smoothing}
    model, expected = train(None, 12, **options)
    other, got = train(microbatch_size, 12, **options)
    assert [step[0] for step in got] == [step[0] for step in expected]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert len({step[0] for step in expected}) > 1, "the sizes should move"


def test_losses_of_single_examples_and_a_scaler() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = AdaptiveLoader(TensorDataset(X, Y), batch_size=10, max_microbatch_size=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = CABS(model, optimizer, loader, min_batch_size=10, max_examples=None, grad_scaler=scaler)
    for inputs, targets in next(iter(loader)):
        scheduler.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
    scaler.unscale_(optimizer)
    same = network()
    loss = F.cross_entropy(same(X[:10]), Y[:10])
    expected = torch.autograd.grad(loss, list(same.parameters()))
    gradient = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    scaler.step(optimizer)
    scheduler.step()
    torch.testing.assert_close(gradient, list(expected))
    assert scheduler.last is not None
    assert scheduler.last.loss == pytest.approx(loss.item())


def test_few_examples_are_measured_of_the_whole_batch_not_of_each_microbatch() -> None:
    model = network()
    loader = AdaptiveLoader(TensorDataset(X, Y), batch_size=64, max_microbatch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = CABS(model, optimizer, loader, min_batch_size=64, max_examples=8)
    for inputs, targets in next(iter(loader)):
        scheduler.backward(F.cross_entropy(model(inputs), targets))
    assert scheduler.variance is not None
    assert len(scheduler.variance.squared_norms()) == 8


@pytest.mark.parametrize("most", [4, 100])  # 100 holds the whole batch: it is cut in two all the same
def test_the_estimator_microbatch_compares_the_microbatches(most: int) -> None:
    """tr Σ = (Σ_k b_k ‖g_k‖² / m − ‖g‖²) / (K/m − 1/m), from the gradients of the microbatches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(TensorDataset(X, Y), batch_size=11, max_microbatch_size=most)
    scheduler = CABS(model, optimizer, loader, min_batch_size=11, estimator="microbatch")
    batch = next(iter(loader))
    squares, mean = 0.0, torch.zeros(())
    for inputs, targets in batch:
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
        flat = torch.cat([g.flatten() for g in gradients])
        squares += len(inputs) * float(flat.square().sum())
        mean = mean + len(inputs) / 11 * flat
        scheduler.backward(F.cross_entropy(model(inputs), targets))
    optimizer.step()
    scheduler.step()
    assert scheduler.last is not None
    expected = (squares / 11 - float(mean.square().sum())) / ((len(batch) - 1) / 11)
    assert len(batch) == (3 if most == 4 else 2)
    assert scheduler.last.variance == pytest.approx(expected, rel=1e-9)


def test_sizes_may_be_multiples() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = AdaptiveLoader(TensorDataset(X, Y), shuffle=True, seed=0, stream=True)
    scheduler = CABS(model, optimizer, loader, min_batch_size=3, max_batch_size=64, smoothing=0, multiple_of=2)
    sizes = set()
    for _, (inputs, targets) in zip(range(10), loader, strict=False):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sizes.add(scheduler.step(loss))
    assert all(4 <= size <= 64 and size % 2 == 0 for size in sizes)
    assert len(sizes) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple_of": 0}, "at least 1"),
        ({"multiple_of": 50, "min_batch_size": 16, "max_batch_size": 40}, "no multiple of 50"),
        ({"rule": rules.Constant(18), "multiple_of": 4}, "no multiple of 4"),
        ({"loader": "auto"}, "pass trial="),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 1)
    microbatch_size = options.pop("loader", None)
    loader = AdaptiveLoader(TensorDataset(torch.randn(99, 2)), batch_size=16, max_microbatch_size=microbatch_size)
    with pytest.raises(ValueError, match=message):
        BatchSizeScheduler(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **{"rule": rules.CABS(), **options}
        )


@pytest.mark.filterwarnings("ignore:scheduler.step.. was called")
def test_loops_that_are_not_right_are_told() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = AdaptiveLoader(TensorDataset(X, Y), batch_size=10, max_microbatch_size=4)
    scheduler = CABS(model, optimizer, loader, min_batch_size=10)

    def loss_of(microbatch: Any) -> Tensor:
        return F.cross_entropy(model(microbatch[0]), microbatch[1])

    with pytest.raises(RuntimeError, match="there is none: take batches from the loader"):
        scheduler.backward(loss_of((X[:2], Y[:2])))
    with pytest.raises(RuntimeError, match="without a loss goes with"):
        scheduler.step()
    batches = iter(loader)
    batch = next(batches)
    microbatch = next(batch)
    with pytest.raises(ValueError, match="entries for a microbatch of 4"):
        scheduler.backward(torch.zeros(3))
    scheduler.backward(loss_of(microbatch))
    with pytest.raises(RuntimeError, match="4 of the batch's 10 examples"):
        scheduler.step()
    for microbatch in next(batches):
        (loss := loss_of(microbatch)).backward()
    with pytest.raises(RuntimeError, match="batches come in microbatches"):
        scheduler.step(loss)
    for microbatch in next(batches):
        scheduler.backward(loss := loss_of(microbatch))
    with pytest.raises(RuntimeError, match="call step\\(\\) without one"):
        scheduler.step(loss)
    for microbatch in next(batches):
        scheduler.backward(loss_of(microbatch))
    scheduler.step()


class Pretended(Memory):
    """A device where examples take as much memory as they say."""

    def __init__(self, total: float, each: float, fixed: float = 0.0) -> None:
        self.total, self.each, self.fixed = total, each, fixed
        self.tried: list[int] = []

    def limit(self) -> float:
        return self.total

    def peak(self, work: Callable[[], None]) -> float:
        work()
        needed = self.fixed + self.each * self.tried[-1]
        return math.inf if needed > self.total else needed


def find(memory: Pretended, most: int) -> int:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    loader = AdaptiveLoader(TensorDataset(torch.randn(50, 2)), batch_size=16, max_microbatch_size="auto")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model)
    state = torch.get_rng_state()

    def trial(batch: Any) -> Tensor:
        memory.tried.append(len(batch[0]))
        return model(batch[0]).square().mean()

    found = find_microbatch_size(model, trial, loader, most, memory=memory)
    assert torch.equal(torch.get_rng_state(), state)
    for mine, theirs in zip(model.state_dict().values(), before.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    return found


@given(total=st.floats(10, 1e4), fixed=st.floats(0, 5), most=st.integers(2, 600))
@settings(max_examples=25, deadline=None)
def test_auto_finds_the_largest_power_of_two_that_fits(total: float, fixed: float, most: int) -> None:
    memory = Pretended(total, 1.0, fixed)
    found = find(memory, most)
    candidates = [size for size in (*(2**k for k in range(1, 13)), most) if size <= most]
    fits = [size for size in candidates if fixed + size <= (1 - MARGIN) * total]
    assert found == max(fits)
    assert all(fixed + size <= total for size in memory.tried), "a trial that would break something was not made"


def test_auto_says_when_nothing_fits() -> None:
    with pytest.raises(MemoryError, match="2 examples does not fit"):
        find(Pretended(1.0, 1.0), 64)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells how much memory was used")
def test_auto_on_this_machine() -> None:
    model = network().float()
    loader = AdaptiveLoader(TensorDataset(X.float(), Y), batch_size=16, max_microbatch_size="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trial(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    scheduler = CABS(model, optimizer, loader, min_batch_size=16, max_batch_size=512, trial=trial)
    assert loader.max_microbatch_size == 512, "tiny images fit"
    for inputs, targets in next(iter(loader)):
        scheduler.backward(F.cross_entropy(model(inputs), targets))
    optimizer.step()
    scheduler.step()


MEMORY = """
import torch
from cabs.scheduler.microbatch_size import HostMemory

memory = HostMemory()
idle = memory.peak(lambda: None)
busy = memory.peak(lambda: print(torch.ones(2**24)[0]))
assert 2**26 * 0.9 < busy - idle < 2**26 * 1.5, (idle, busy)
assert memory.limit() > idle
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells how much memory was used")
def test_the_memory_of_the_host_is_measured() -> None:
    """In a process of its own: what other tests have freed would be used again, and the process would not grow."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


COMPILED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from cabs import AdaptiveLoader

compiled = []

def backend(graph, inputs):
    compiled.append(inputs[-1].shape)
    return graph.forward

model = torch.compile(nn.Linear(2, 1), backend=backend, dynamic=False)
loader = AdaptiveLoader(TensorDataset(torch.randn(5000, 2)), batch_size=65, stream=True, max_microbatch_size=64)
for _, batch in zip(range(100), loader):
    for (inputs,) in batch:
        model(inputs)
    loader.batch_size += 1
assert 1 < len(compiled) <= torch._dynamo.config.recompile_limit, compiled
"""


@pytest.mark.slow
def test_a_compiled_model_meets_few_shapes() -> None:
    """In a process of its own: what dynamo remembers of other tests would be in the way."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "rule",
    [
        rules.CABS(budget=64),
        rules.CABS(noise_share=0.1),
        rules.CABS(cost=(20.0, 1.0)),
        rules.NormTest(0.8),
        rules.NoiseScale(),
        rules.Steps("0:5 40:17 100:33"),
        rules.Ramp(5, 60, 200),
        rules.Geometric(5, 2, 50),
        rules.OnPlateau(5, 2, 40),
        rules.DecayToBatch(lambda examples: 1 / (1 + examples // 50), 5),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_every_rule_in_pieces(rule: rules.Rule) -> None:
    """The sizes are those of whole batches, to the integer."""
    sizes = []
    for pieces in (None, 4):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = AdaptiveLoader(TensorDataset(X, Y), 5, shuffle=True, seed=2, stream=True, max_microbatch_size=pieces)
        scheduler = BatchSizeScheduler(
            model,
            optimizer,
            loader,
            rule,
            min_batch_size=5,
            max_batch_size=64,
            max_examples=None,
            measure_every=1,
            smoothing=0.3,
        )
        sizes.append([])
        for _, batch in zip(range(12), loader, strict=False):
            optimizer.zero_grad()
            for inputs, targets in [batch] if pieces is None else batch:
                scheduler.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
            sizes[-1].append(scheduler.step())
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 1


def test_microbatches_made_ahead_count_when_they_are_taken() -> None:
    made: list[int] = []

    def collate(examples: list[Any]) -> Tensor:
        made.append(len(examples))
        return torch.stack([example[1] for example in examples])

    data = TensorDataset(X, Y)
    loader = AdaptiveLoader(data, batch_size=10, collate_fn=collate, max_microbatch_size=4)
    batch = next(iter(loader))
    first = next(batch)
    rest = batch.load()
    assert made == [4, 4, 2]
    assert loader.delivery.left == 2
    again = batch.load()
    assert all(one is other for one, other in zip(again, rest, strict=True))
    taken = list(batch)
    assert all(one is other for one, other in zip(taken, rest, strict=True))
    assert loader.delivery.left == 0
    assert torch.equal(torch.cat([first, *taken]), Y[:10])
    assert made == [4, 4, 2]
    assert batch.load() == []


def test_a_batch_that_cannot_be_made_ahead_is_not_delivered() -> None:
    failing = [False, True]

    def collate(examples: list[Any]) -> Tensor:
        if failing and failing.pop(0):
            raise OSError("no such example")
        return torch.stack([example[1] for example in examples])

    loader = AdaptiveLoader(TensorDataset(X, Y), batch_size=8, collate_fn=collate, max_microbatch_size=4)
    batches = iter(loader)
    with pytest.raises(OSError, match="no such example"):
        next(batches).load()
    assert loader.state_dict()["consumed"] == 0
    assert torch.equal(torch.cat(next(batches).load()), Y[:8])
