"""A small problem, trained by Lightning and by a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from cabs import AdaptiveLoader, BatchSizeScheduler, rules
from cabs.integrations.lightning import CABSCallback

OPTIONS: dict[str, Any] = {"min_batch_size": 4, "max_batch_size": 60, "smoothing": 0.6}
"""With these, sizes move within some steps."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


def data(length: int = 150) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(length, 6, generator=generator)
    noise = 0.3 * torch.randn(length, generator=generator)
    return TensorDataset(inputs, ((inputs[:, 0] + noise) > 0).long() + (inputs[:, 1] > 0.5).long())


class Module(lightning.LightningModule):
    """A small network; notes how many examples it sees in training and in validation."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
        self.optimizer = optimizer
        self.sizes: list[int] = []
        self.validated_after: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking and (self.validated_after[-1:] != [len(self.sizes)]):
            self.validated_after.append(len(self.sizes))
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Manual(Module):
    """The same in manual optimization."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@dataclass
class Plain:
    """What a plain loop did."""

    module: Module
    sizes: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    @property
    def weights(self) -> Tensor:
        return weights(self.module)


def weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def loader(length: int = 150, **options: Any) -> AdaptiveLoader:
    return AdaptiveLoader(data(length), **{"batch_size": 8, "shuffle": True, "seed": 3, **options})


def plain_loop(
    optimizer: str = "sgd",
    *,
    epochs: int = 3,
    rule: rules.Rule | None = None,
    accumulation: int = 1,
    clip: Callable[[Any], Any] | None = None,
    batches: AdaptiveLoader | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    most_steps: int | None = None,
    after_step: Callable[[torch.optim.Optimizer], Any] | None = None,
    **options: Any,
) -> Plain:
    """The loop that users write without Lightning."""
    plain = Plain(Module(optimizer).to(dtype))
    module, batches = plain.module, loader() if batches is None else batches
    steps = module.configure_optimizers()
    scheduler = BatchSizeScheduler(
        module,
        steps,
        batches,
        rule or rules.CABS(),
        accumulation=accumulation,
        grad_scaler=scaler,
        **{**OPTIONS, **options},
    )
    for _ in range(epochs):
        made, total, examples = 0, 0.0, 0
        steps.zero_grad()
        iterator = iter(batches)
        for inputs, targets in iterator:
            plain.parts.append(len(inputs))
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = module.loss((inputs.to(dtype), targets)) / accumulation
            (loss if scaler is None else scaler.scale(loss)).backward()
            made, total, examples = made + 1, total + loss.item(), examples + len(inputs)
            if made < accumulation and not iterator.at_end():  # type: ignore[attr-defined]
                continue
            if scaler is not None:
                scaler.unscale_(steps)
            if clip is not None:
                clip(module.parameters())
            if scaler is None:
                steps.step()
            else:
                scaler.step(steps)
                scaler.update()
            scheduler.step(total * accumulation / made)
            steps.zero_grad()
            plain.sizes.append(examples)
            made, total, examples = 0, 0.0, 0
            if after_step is not None:
                after_step(steps)
            if len(plain.sizes) == most_steps:
                break
    scheduler.close()
    return plain


def trainer(*callbacks: Any, **options: Any) -> lightning.Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(callbacks=list(callbacks), **{"max_epochs": 3, **quiet, **options})


def fit(
    module: Module,
    callback: CABSCallback | None = None,
    batches: Any = None,
    *,
    validates: bool = False,
    **options: Any,
) -> CABSCallback:
    """Trains with Lightning."""
    callback = callback or CABSCallback(**OPTIONS)
    validation = DataLoader(data(40), batch_size=20) if validates else None
    more = options.pop("callbacks", [])
    path = options.pop("ckpt_path", None)
    trainer(callback, *more, **options).fit(
        module, loader() if batches is None else batches, validation, ckpt_path=path
    )
    return callback
