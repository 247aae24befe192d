"""Loops with an Accelerator, against the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cabs import CABS, AdaptiveLoader, rules
from cabs.integrations.accelerate import prepare

X = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
BOUNDS: dict[str, Any] = {"min_batch_size": 4, "max_batch_size": 64}
History = list[tuple[int, float]]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    _reset()


def _reset() -> None:
    """accelerate keeps its state for the whole process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def parts(dropout: float = 0.0, **options: Any) -> tuple[nn.Module, Any, AdaptiveLoader]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
    loader = AdaptiveLoader(TensorDataset(X, Y), batch_size=16, shuffle=True, seed=4, **options)
    return model, torch.optim.Adam(model.parameters(), lr=5e-2), loader


def plain(epochs: int = 2, accumulation: int = 1, precision: Any = None, **options: Any) -> History:
    model, optimizer, loader = parts()
    scheduler = CABS(model, optimizer, loader, accumulation=accumulation, **{**BOUNDS, **options})
    history, total, batches = [], 0.0, 0
    for _ in range(epochs):
        for inputs, targets in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                outputs = model(inputs)
            loss = F.cross_entropy(outputs.float(), targets)
            (loss / accumulation).backward()
            total, batches = total + loss.item() / accumulation, batches + 1
            if batches % accumulation == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step(loss if accumulation == 1 else total)
                history.append(last(scheduler))
                optimizer.zero_grad()
                total = 0.0
    return history


def last(scheduler: Any) -> tuple[int, float]:
    assert scheduler.last is not None
    return scheduler.last.examples, scheduler.last.loss


def train(accelerator: Accelerator, prepared: Any, epochs: int = 2, steps: int | None = None) -> History:
    """The loop as accelerate's guide has it, and one line more."""
    model, optimizer, loader, scheduler = prepared
    history: History = []
    while loader.epoch < epochs:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step(loss)
                if accelerator.sync_gradients:
                    history.append(last(scheduler))
                optimizer.zero_grad()
            if len(history) == steps:
                return history
    return history


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_the_sizes_of_the_plain_loop(accumulation: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    history = train(accelerator, prepare(accelerator, *parts(), **BOUNDS))
    expected = plain(accumulation=accumulation)
    assert [step[0] for step in history] == [step[0] for step in expected]
    assert [step[1] for step in history] == pytest.approx([step[1] for step in expected], rel=1e-5)
    assert len({step[0] for step in history}) > 2


def test_mixed_precision() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    history = train(accelerator, prepare(accelerator, *parts(), **BOUNDS))
    assert history == plain(precision="bf16")


def test_microbatches() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = prepare(
        accelerator, *parts(max_microbatch_size=8), **BOUNDS, max_examples=None, measure_every=1
    )
    history = []
    for batch in loader:
        for inputs, targets in batch:
            scheduler.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        history.append(scheduler.last.examples)
        optimizer.zero_grad()
    whole = prepare(accelerator, *parts(), **BOUNDS, max_examples=None, measure_every=1)
    expected = []
    for inputs, targets in whole[2]:
        loss = F.cross_entropy(whole[0](inputs), targets)
        accelerator.backward(loss)
        whole[1].step()
        whole[3].step(loss)
        expected.append(whole[3].last.examples)
        whole[1].zero_grad()
    assert history == expected
    loader.batch_size = 20
    for inputs, targets in next(iter(loader)):
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
    with pytest.raises(RuntimeError, match=r"come in microbatches .* call scheduler\.backward\(loss\)"):
        scheduler.step(loss)


def test_the_saved_state_resumes(tmp_path: Path) -> None:
    def begun() -> tuple[Accelerator, Any]:
        _reset()
        accelerator = Accelerator(cpu=True)
        return accelerator, prepare(accelerator, *parts(dropout=0.1), **BOUNDS)

    whole = train(*begun())
    accelerator, prepared = begun()
    before = train(accelerator, prepared, steps=7)
    accelerator.save_state(str(tmp_path))
    accelerator, prepared = begun()
    accelerator.load_state(str(tmp_path))
    assert before + train(accelerator, prepared) == whole


def test_a_data_loader_becomes_one_whose_size_moves() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = parts()
    given = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, given, **BOUNDS)
    assert isinstance(loader, AdaptiveLoader)
    history = train(accelerator, (model, optimizer, loader, scheduler), epochs=1)
    assert history[0][0] == 16
    assert sum(step[0] for step in history) == 200


def test_what_is_prepared_already_stays_as_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())
    assert isinstance(loader, AdaptiveLoader)
    history = train(accelerator, prepare(accelerator, model, optimizer, loader, **BOUNDS))
    assert history == plain()
    with pytest.raises(TypeError, match="DataLoaderShard makes its batches in a way of its own"):
        prepare(accelerator, model, optimizer, accelerator.prepare(DataLoader(TensorDataset(X, Y), batch_size=16)))


def test_a_schedule_puts_no_hook_into_the_model() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = prepare(accelerator, *parts(), rule=rules.Steps("0:16 32:40"))
    assert prepared[3].variance is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in prepared[0].modules())
    assert [step[0] for step in train(accelerator, prepared, epochs=1)] == [16, 16, 40, 40, 40, 40, 8]


def test_evaluation_and_gather_for_metrics_do_not_count() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = prepare(accelerator, *parts(), **BOUNDS)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(X, Y), batch_size=64))
    history = []
    for _ in range(2):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step(loss)
            history.append(last(scheduler))
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in evaluation]
        assert len(torch.cat(right)) == 200
        model.train()
    assert history == plain()


def test_batches_come_on_the_device() -> None:
    accelerator = Accelerator(cpu=True)
    _, _, loader, _ = prepare(accelerator, *parts(), **BOUNDS)
    assert loader.place is not None
    inputs, others = loader.place((X, {"y": Y}))
    assert inputs.device == others["y"].device == accelerator.device
    for most in (None, 8):
        loader = AdaptiveLoader(TensorDataset(X, Y), batch_size=16, max_microbatch_size=most)
        loader.place = lambda batch: [each.to("meta") for each in batch]
        batch = next(iter(loader))
        assert all(each.device.type == "meta" for each in (batch if most is None else next(batch)))


def test_an_interrupted_accumulation_is_not_counted_twice() -> None:
    """A batch whose backward pass failed is dropped; its step goes on with the next."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = prepare(accelerator, *parts(), **BOUNDS, measure_every=1)
    batches = iter(loader)
    losses: list[float] = []

    def part(fails: bool = False) -> None:
        inputs, targets = next(batches)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            if fails:
                accelerator.step -= 1  # the loop makes this part again
                raise KeyboardInterrupt
            accelerator.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()

    part()
    with pytest.raises(KeyboardInterrupt):
        part(fails=True)
    part()
    assert scheduler.last is not None
    assert scheduler.last.examples == 32
    assert scheduler.last.loss == pytest.approx(sum(losses) / 2)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.XLA])
def test_processes_that_cannot_be_steered(kind: DistributedType, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.state, "distributed_type", kind)
    with pytest.raises(NotImplementedError, match=f"with DistributedDataParallel, not with {kind.name}"):
        prepare(accelerator, *parts())


def test_arguments_that_the_accelerator_knows() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TypeError, match="prepare takes no accumulation: it is known from the framework"):
        prepare(accelerator, *parts(), accumulation=2)
    with pytest.raises(TypeError, match="prepare takes no size"):
        prepare(accelerator, *parts(), size=2)
