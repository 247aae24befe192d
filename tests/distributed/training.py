"""Small training runs that one process or several can make, and what they report."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from cabs import AdaptiveLoader, BatchSizeScheduler, rules


@dataclass
class Setting:
    """A run: how long, and what of the machinery it uses."""

    steps: int = 8
    microbatch_size: int | None = None
    length: int = 60
    stream: bool = True
    least: int = 3
    most: int = 40
    weighs_itself: bool = False
    """Whether the loop calls ``loss.backward()`` rather than ``scheduler.backward(loss)``."""
    clip: float | None = None
    scaler: bool = False
    groups: bool = False
    optimizer: str = "sgd"
    rule: str = "cabs"
    options: dict[str, Any] = field(default_factory=dict)
    compiled: str = ""
    """What is compiled: the module within DistributedDataParallel, or the whole."""


OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "sgd": (torch.optim.SGD, 1.0),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), 0.1),
    "adamw": (torch.optim.AdamW, 0.03),
    "rmsprop": (partial(torch.optim.RMSprop, centered=True, momentum=0.5), 0.01),
    "adagrad": (torch.optim.Adagrad, 0.1),
}
"""Optimizers and learning rates."""

RULES: dict[str, rules.Rule] = {
    "cabs": rules.CABS(),
    "constant": rules.Constant(7),
    "share": rules.CABS(noise_share=0.1, small_data=True),
    "horizon": rules.CABS(budget=120),
    "cost": rules.CABS(cost=(20.0, 1.0)),
    "measured": rules.CABS(cost="measured"),
    "norm test": rules.NormTest(0.8),
    "gain per cost": rules.GainPerCost(0.5),
    "noise scale": rules.NoiseScale(),
    "inner product": rules.InnerProductTest(0.5, 1.0),
    "steps": rules.Steps("0:5 20:9 50:16"),
    "ramp": rules.Ramp(4, 30, 90),
    "geometric": rules.Geometric(4, 2, 30),
    "plateau": rules.OnPlateau(4, 2, 20),
    "decay": rules.DecayToBatch(lambda examples: 1 / (1 + examples // 25), 4),
    "sequence": rules.Sequential([rules.Constant(5), rules.Repeat(rules.Ramp(4, 12, 30, "cosine"), 30)], [25]),
}
"""Every rule, with numbers that make sizes move within some steps."""


@dataclass
class Outcome:
    sizes: list[int]
    numbers: list[tuple[float, ...]]
    weights: Tensor


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = 4 * torch.randn(length, 1, 6, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (length,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)
    ).double()


def train(setting: Setting) -> Outcome:
    """The run, in one process or in each of several."""
    model = network()
    if setting.compiled == "module":
        model = torch.compile(model, backend="aot_eager")
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    if setting.compiled == "whole":
        model = torch.compile(model, backend="aot_eager")
    parameters = list(model.parameters())
    kind, lr = OPTIMIZERS[setting.optimizer]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": lr / 2}] if setting.groups else parameters
    optimizer = kind(groups, lr=lr)
    # Processes draw different seeds here; the first one's must win.
    seed = None if dist.is_initialized() and dist.get_rank() else 7
    loader = AdaptiveLoader(
        data(setting.length),
        shuffle=True,
        seed=seed,
        stream=setting.stream,
        max_microbatch_size=setting.microbatch_size,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if setting.scaler else None
    scheduler = BatchSizeScheduler(
        model,
        optimizer,
        loader,
        RULES[setting.rule],
        min_batch_size=setting.least,
        max_batch_size=setting.most,
        **{"smoothing": 0.3, "max_examples": None, "measure_every": 1, "grad_scaler": scaler, **setting.options},
    )
    outcome = Outcome([], [], torch.empty(0))
    steps = 0
    while steps < setting.steps:
        for batch in loader:
            _step(setting, model, optimizer, scheduler, scaler, batch)
            last = scheduler.last
            assert last is not None
            assert loader.batch_size == last.batch_size
            outcome.sizes.append(last.batch_size)
            outcome.numbers.append((last.loss, last.variance, last.gradient_norm_squared, last.raw_batch_size))
            steps += 1
            if steps == setting.steps:
                break
    outcome.weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    scheduler.close()
    return outcome


def _step(
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: BatchSizeScheduler,
    scaler: torch.amp.GradScaler | None,
    batch: Any,
) -> None:
    optimizer.zero_grad()
    if setting.weighs_itself:
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
    else:
        for inputs, targets in [batch] if setting.microbatch_size is None else batch:
            scheduler.backward(F.cross_entropy(model(inputs), targets))
        loss = None
    if scaler is not None:
        scaler.unscale_(optimizer)
    if setting.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    scheduler.step(loss)


def penalized() -> str:
    """What the scheduler says of a penalty in the loss of several processes."""
    model = DistributedDataParallel(network())
    loader = AdaptiveLoader(data(30), seed=0)
    scheduler = BatchSizeScheduler(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, rules.CABS(), min_batch_size=6, max_batch_size=6
    )
    inputs, targets = next(iter(loader))
    loss = F.cross_entropy(model(inputs), targets)
    (loss + sum(p.square().sum() for p in model.parameters())).backward()
    try:
        scheduler.step(loss)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def second_scheduler() -> list[float]:
    """A notebook's cell that runs twice: the gradients are right with the new scheduler, and after it."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = []
    for turn in range(3):
        loader = AdaptiveLoader(data(30), batch_size=5, seed=0)
        options = {"min_batch_size": 5, "max_batch_size": 5, "monitor_only": False}
        if turn < 2:
            scheduler = BatchSizeScheduler(model, optimizer, loader, rules.Constant(5), **options)
        else:
            scheduler.close()
            loader.share(dist.get_rank(), dist.get_world_size())
        inputs, targets = next(iter(loader))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        gradients.append(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    return gradients


def monitored(watched: bool) -> tuple[list[int], list[int], list[list[float]], list[float], list[int]]:
    """A user's own loop over a loader that is not shared, with a scheduler that only monitors or without.

    Returns:
        The sizes of batches, the loader's settings afterwards, the examples, the weights, and the examples counted.
    """
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = AdaptiveLoader(data(30), batch_size=5 + dist.get_rank(), shuffle=True, seed=dist.get_rank())
    before = loader.state_dict()
    scheduler = None
    if watched:
        scheduler = BatchSizeScheduler(
            model, optimizer, loader, rules.CABS(), min_batch_size=2, max_batch_size=64, monitor_only=True
        )
        assert loader.state_dict() == before
    sizes, examples, counted = [], [], []
    for (inputs, targets), _ in zip(loader, range(4), strict=False):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sizes.append(len(inputs))
        examples.append(inputs[:, 0, 0, 0].tolist())
        if scheduler is not None:
            scheduler.step(loss)
            assert scheduler.last is not None
            counted.append(scheduler.last.examples)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return sizes, [loader.batch_size, loader.world_size, len(loader)], examples, weights, counted


def foreign_hook() -> str:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = DistributedDataParallel(network())
    model.register_comm_hook(None, allreduce_hook)
    loader = AdaptiveLoader(data(30), batch_size=5, seed=0)
    try:
        BatchSizeScheduler(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, rules.CABS(), min_batch_size=5)
    except ValueError as error:
        return str(error)
    return "nothing"


def found_size() -> tuple[int, float]:
    """max_microbatch_size="auto" with several processes, and a step with it."""
    model = DistributedDataParallel(network())
    loader = AdaptiveLoader(data(60), batch_size=12, seed=0, max_microbatch_size="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = BatchSizeScheduler(
        model,
        optimizer,
        loader,
        rules.CABS(),
        min_batch_size=12,
        max_batch_size=64,
        trial=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )
    for inputs, targets in next(iter(loader)):
        scheduler.backward(F.cross_entropy(model(inputs), targets))
    scheduler.step()
    assert isinstance(loader.max_microbatch_size, int)
    assert scheduler.last is not None
    return loader.max_microbatch_size, scheduler.last.loss
