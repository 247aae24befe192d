"""The Trainer with batches whose size moves at every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from cabs.integrations.loggers import scalars
from cabs.integrations.transformers.callback import CABSCallback
from cabs.integrations.transformers.losses import Reduction, Step
from cabs.integrations.transformers.run import Run


class CABSTrainer(Trainer):
    """A ``Trainer`` whose batch size moves at every step, as a ``CABSCallback`` says.

    Takes what ``Trainer`` takes. Without a ``CABSCallback`` among the callbacks, one with its defaults is added. For
    another Trainer T: ``class MyTrainer(CABSTrainer, T): pass``.

    ``per_device_train_batch_size`` is the most examples that a process computes with at a time. Larger batches are
    accumulated. The first batch has the size that the Trainer's would have: that, times
    ``gradient_accumulation_steps``, times the number of processes, within the bounds.
    """

    _cabs: Run | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as ``Trainer.train`` does; when it ends, however it ends, the model has no hooks."""
        run = self._cabs = Run(self, self._cabs_callback())
        theirs = self.get_train_dataloader  # whoever has overridden it

        def steps() -> Any:
            run.restore_arguments()
            # Not prepared by accelerate, which would share out batches of a fixed size: the scheduler shares ours.
            with _replaced(self.accelerator, "prepare", lambda loader, **_: loader):
                loader = theirs()
            return run.open(loader)

        try:
            with _replaced(self, "get_train_dataloader", steps):
                return super().train(*args, **kwargs)
        finally:
            self._cabs = None
            run.close()

    @property
    def most_at_a_time(self) -> int:
        """The most examples that fit into memory, as far as ``auto_find_batch_size`` knows."""
        return int(self._train_batch_size)

    def prepared(self, batch: Mapping[str, Any]) -> Any:
        """A batch on the device, as ``training_step`` gets it."""
        return self._prepare_inputs(dict(batch))

    def _cabs_callback(self) -> CABSCallback:
        callbacks = self.callback_handler.callbacks
        ours = list(filter(_is_ours, callbacks))
        if len(ours) > 1:
            raise ValueError(f"the Trainer has {len(ours)} CABSCallbacks, and one batch size: leave one of them")
        callback = ours[0] if ours else CABSCallback()
        # The first, for others to see what it tells of progress.
        callbacks[:] = [callback, *(other for other in callbacks if other is not callback)]
        return callback

    def _load_callback_state(self) -> None:
        """Restores the other callbacks: ours would be made anew, without its options, and resumes by itself."""
        ours = {type(callback).__name__ for callback in self.callback_handler.callbacks if _is_ours(callback)}
        states: Any = self.state.stateful_callbacks  # a dict, whatever it is declared as
        others: Any = {name: state for name, state in states.items() if name not in ours}
        self.state.stateful_callbacks = others
        super()._load_callback_state()
        self.state.stateful_callbacks = states

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning-rate schedule, by examples where the number of steps is not known."""
        if self._cabs is None:
            return super().create_scheduler(num_training_steps, optimizer)
        super().create_scheduler(self._cabs.reference_steps(), optimizer)
        self.lr_scheduler = self._cabs.clock(self.lr_scheduler, self._created_lr_scheduler)
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The batch of a step, and how many items its labels are."""
        if self._cabs is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        step: Step | None = next(epoch_iterator, None)
        if step is None:
            self.control.should_epoch_stop = True
            return [], None
        _, items = super().get_batch_samples(iter(step.microbatches), len(step.microbatches), device)
        return [step], items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of all microbatches of a step; its loss."""
        run = self._cabs
        if run is None:
            return super().training_step(model, inputs, num_items_in_batch)
        reduction = run.reduction(inputs, num_items_in_batch)
        total = torch.zeros((), device=self.args.device)
        for microbatch in inputs.batch:
            delivery, backward = run.loader.delivery, _weighed(run, reduction)
            with _replaced(self.accelerator, "backward", backward):
                loss = super().training_step(model, microbatch, num_items_in_batch)
            # The Trainer shows the mean over processes, which is the step's loss then.
            part = run.loader.world_size * delivery.size / delivery.examples
            total += loss * reduction.of_mean(delivery) * part
        return total

    def floating_point_ops(self, inputs: Any) -> int:
        """Of all microbatches of a step."""
        steps = inputs.microbatches if isinstance(inputs, Step) else [inputs]
        return sum(super(CABSTrainer, self).floating_point_ops(microbatch) for microbatch in steps)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for microbatch in inputs.microbatches if isinstance(inputs, Step) else [inputs]:
            super()._track_num_input_tokens(microbatch)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs as ``Trainer.log`` does, with what the scheduler did in the last step."""
        run = self._cabs
        if run is not None and "loss" in logs and run.scheduler.last is not None:
            logs.update(scalars(run.scheduler.last))
        if run is not None and logs.get("train_runtime") and "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(run.examples_seen() / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model, with the arguments as they were given."""
        if self._cabs is None:
            super().save_model(*args, **kwargs)
            return
        now = self.args.gradient_accumulation_steps
        self._cabs.restore_arguments()
        try:
            super().save_model(*args, **kwargs)
        finally:
            self.args.gradient_accumulation_steps = now


def _is_ours(callback: Any) -> bool:
    return isinstance(callback, CABSCallback)


def _weighed(run: Run, reduction: Reduction) -> Any:
    """What ``accelerator.backward`` is while a microbatch is computed: weighed, as part of its step."""

    def backward(loss: Tensor, **kwargs: Any) -> None:
        run.scheduler.backward(loss * reduction.of_mean(run.loader.delivery))

    return backward


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a method of one object for a while."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
