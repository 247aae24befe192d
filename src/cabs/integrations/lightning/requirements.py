"""What the callback refuses, before training, each with what to do about it."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader

from cabs.integrations.lightning.packages import LightningModule, Trainer
from cabs.loader import AdaptiveLoader

STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
PRECISIONS = {"Precision", "MixedPrecision", "DoublePrecision", "HalfPrecision"}


def _is_own(value: object, names: set[str]) -> bool:
    """Whether something is of one of Lightning's own classes, and no subclass of it."""
    package = type(value).__module__.split(".")[0]
    return package in ("lightning", "pytorch_lightning") and type(value).__name__ in names


def check_trainer(trainer: Any, module: LightningModule) -> None:
    """Refuses what sizes that move at every step do not go with."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    if not _is_own(strategy, STRATEGIES):
        raise NotImplementedError(
            f"CABSCallback works with one device and with strategy='ddp' (also 'ddp_spawn' and the like), not with "
            f"{type(strategy).__name__}: choose one of these, or write the loop yourself (docs/distributed.md has "
            "fully_shard)"
        )
    if not _is_own(precision, PRECISIONS):
        raise NotImplementedError(
            f"CABSCallback does not know what {type(precision).__name__} does to gradients: choose precision "
            "'32-true', '64-true', 'bf16-true', 'bf16-mixed' or '16-mixed'"
        )
    if trainer.overfit_batches:
        raise ValueError(
            f"overfit_batches={trainer.overfit_batches} repeats the same batches, and here their size moves: fit a "
            "torch.utils.data.Subset of the data instead"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "reload_dataloaders_every_n_epochs makes new loaders, and CABSCallback stays with one: leave it out"
        )
    for callback in trainer.callbacks:
        if type(callback).__name__ in ("GradientAccumulationScheduler", "BatchSizeFinder"):
            raise ValueError(
                f"{type(callback).__name__} sets the batch size too, by its own lights: leave it out, or CABSCallback"
            )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise NotImplementedError(
            "training_step(dataloader_iter) takes batches itself: let it take a batch, training_step(batch, batch_idx)"
        )


def check_accumulation(given: int | None, trainer: Trainer, module: LightningModule) -> int:
    """How many batches make a step."""
    if trainer.world_size > 1 and max(given or 1, trainer.accumulate_grad_batches) > 1:
        raise NotImplementedError(
            "with several processes the gradients of accumulated batches would be weighed wrongly: leave "
            "accumulate_grad_batches out, and lower max_batch_size if a process's share does not fit into memory"
        )
    if not module.automatic_optimization:
        return 1 if given is None else given
    if given not in (None, trainer.accumulate_grad_batches):
        raise ValueError(
            f"accumulation is {given}, and the Trainer has accumulate_grad_batches={trainer.accumulate_grad_batches}: "
            "leave accumulation out, which is for manual optimization"
        )
    return trainer.accumulate_grad_batches


def adaptive(given: Any, trainer: Trainer) -> AdaptiveLoader:
    """The loader with sizes that move, of what was given to ``trainer.fit``."""
    if isinstance(given, DataLoader):
        given = AdaptiveLoader.from_dataloader(given)
    if not isinstance(given, AdaptiveLoader):
        raise TypeError(
            f"the training data came as a {type(given).__name__}: CABSCallback takes one DataLoader or one "
            "cabs.AdaptiveLoader, whose size it moves"
        )
    if given.max_microbatch_size is not None:
        raise NotImplementedError(
            "the AdaptiveLoader makes microbatches (max_microbatch_size), which Lightning's loop knows nothing of: "
            "leave that out, and use Trainer(accumulate_grad_batches=K)"
        )
    _check_shares(trainer, given.state_dict()["length"] is not None and not given.stream)
    return given


def _check_shares(trainer: Trainer, known: bool) -> None:
    """Parts of an epoch are parts of its examples, whose number must be known."""
    for name in ("limit_train_batches", "val_check_interval"):
        share = getattr(trainer, name, None)  # None if validation goes by time
        if isinstance(share, float) and share != 1 and not known:
            raise ValueError(
                f"{name}={share} is a part of an epoch, and nobody knows how many examples this one has: give a number "
                "of batches, an int"
            )


def refuse_early_length() -> None:
    raise ValueError(
        "configure_optimizers asked for the number of steps (trainer.estimated_stepping_batches), which is not known "
        "when batch sizes move: give the Trainer max_steps=…, or let the learning rate go by examples, with "
        "cabs.clocks.ByExamples (docs/lightning.md shows how)"
    )


def the_optimizer(trainer: Trainer) -> Any:
    """The one optimizer."""
    optimizers = trainer.optimizers
    if len(optimizers) == 1 and type(optimizers[0]).__name__ != "_MockOptimizer":
        return optimizers[0]
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    if len(optimizers) > 1:
        raise NotImplementedError(
            f"configure_optimizers returned {len(optimizers)} optimizers ({names}), and a batch has one size: put all "
            "parameters into one optimizer with several parameter groups"
        )
    raise ValueError("configure_optimizers returned no optimizer: there is no learning rate to choose batch sizes for")
