"""The autopilot in loops with an ``Accelerator`` of Hugging Face's ``accelerate``."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from cabs import rules
from cabs.integrations import missing
from cabs.integrations.options import rule_and_options
from cabs.loader import AdaptiveLoader
from cabs.scheduler import BatchSizeScheduler

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, send_to_device
except ModuleNotFoundError as error:
    raise missing("accelerate", error) from error

KNOWN = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU"}
"""How accelerate calls one process, and DistributedDataParallel on several kinds of devices."""


def check_processes(accelerator: Accelerator) -> None:
    """Refuses ways to train with several processes that cannot be steered, or that nobody has tried."""
    kind = DistributedType(accelerator.distributed_type).name
    refused = [] if kind in KNOWN else [kind]
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if getattr(parallelism, name, 1) > 1:
            refused.append(name)
    if refused:
        raise NotImplementedError(
            f"batch sizes move in one process and with DistributedDataParallel, not with {', '.join(refused)}: start "
            "the script with torchrun or `accelerate launch --multi_gpu`, and leave that out"
        )


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loader: AdaptiveLoader | DataLoader[Any],
    rule: rules.Rule | None = None,
    **options: Any,
) -> tuple[Any, Any, AdaptiveLoader, AcceleratedScheduler]:
    """Prepares what a loop trains with, as ``accelerator.prepare`` does, and makes the scheduler of its batch size.

    Batches come on the accelerator's device, each process gets its share of every batch, and ``save_state`` and
    ``load_state`` take scheduler and loader along.

    Example::

        model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, max_batch_size=512)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()

    Args:
        accelerator: the accelerator. With ``gradient_accumulation_steps`` the loop is inside of
            ``accelerator.accumulate(model)``, as always.
        model: the model, prepared already or not.
        optimizer: its optimizer, likewise.
        loader: the data of all processes; a ``DataLoader`` that was not prepared becomes an ``AdaptiveLoader``, whose
            first batch is what the processes would have taken together.
        rule: one of ``cabs.rules``; the paper's CABS by default.
        **options: what ``cabs.CABS`` takes.

    Returns:
        Model, optimizer, loader and scheduler.

    Raises:
        NotImplementedError: the accelerator trains in a way that cannot be steered.
    """
    check_processes(accelerator)
    rule, options = rule_and_options("prepare", rule, options, ("accumulation", "grad_scaler"))
    if not isinstance(loader, AdaptiveLoader):
        together = 1 if accelerator.split_batches else accelerator.num_processes
        loader = AdaptiveLoader.from_dataloader(loader)
        loader.batch_size *= together
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = AcceleratedScheduler(accelerator, model, optimizer, loader, rule, **options)
    if accelerator.device_placement:
        loader.place = partial(send_to_device, device=accelerator.device, non_blocking=accelerator.non_blocking)
    accelerator.register_for_checkpointing(scheduler, loader)
    return model, optimizer, loader, scheduler


class AcceleratedScheduler(BatchSizeScheduler):
    """A scheduler that steps when its accelerator's optimizer does.

    Call ``step(loss)`` after every ``optimizer.step()``, before ``optimizer.zero_grad()``. Where gradients are
    accumulated, it adds the losses up and waits for the last of them, as the optimizer does.

    Args:
        accelerator: the accelerator that the loop uses.
        model: the model, as prepared by it.
        optimizer: the optimizer, as prepared by it.
        loader: the loader.
        rule: one of ``cabs.rules``.
        **options: what ``BatchSizeScheduler`` takes.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        loader: AdaptiveLoader,
        rule: rules.Rule,
        **options: Any,
    ) -> None:
        accumulation = accelerator.gradient_accumulation_steps
        super().__init__(
            model, optimizer, loader, rule, accumulation=accumulation, grad_scaler=accelerator.scaler, **options
        )
        self._accelerator, self._batches = accelerator, loader
        self._losses: dict[int, float] = {}
        """By the number of the batch, as they went into backward."""

    def step(self, loss: Tensor | float | None = None) -> int:
        """Takes the loss of the batch, and sets the size of the next step if this was its last batch.

        Returns:
            The size of the next step, or of this one if it goes on.
        """
        if self.accumulation == 1 or loss is None:
            return super().step(loss)
        mean = loss.detach().mean() if isinstance(loss, Tensor) else loss
        self._losses[self._batches.delivery.batch] = float(mean) / self.accumulation
        if not self._accelerator.sync_gradients:
            return self.last_batch_size
        # Of those that are in the step: a batch may have been dropped.
        taken = {batch.delivery.batch for batch in self._observer.record.batches}
        total = sum(part for number, part in self._losses.items() if number in taken)
        self._losses.clear()
        return super().step(total)
