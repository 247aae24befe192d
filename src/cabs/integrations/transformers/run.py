"""One training: its loader, its scheduler, and what the Trainer must be told about sizes that move."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from cabs.clocks import ByExamples
from cabs.integrations.transformers.losses import Reduction, Step, asked, items_of_examples
from cabs.integrations.transformers.requirements import check_trainer
from cabs.loader import AdaptiveLoader
from cabs.scheduler import BatchSizeScheduler


class Run:
    """One training.

    Args:
        trainer: the ``CABSTrainer``.
        callback: its ``CABSCallback``.
    """

    def __init__(self, trainer: Any, callback: Any) -> None:
        check_trainer(trainer)
        self._trainer, self._callback, self.args = trainer, callback, trainer.args
        self._theirs = {name: getattr(self.args, name) for name in ("gradient_accumulation_steps", "ignore_data_skip")}
        self.first_size: int = (
            self.args.train_batch_size * self.args.gradient_accumulation_steps * max(1, self.args.world_size)
        )
        self._reduction: Reduction | None = None
        self._warned = False
        self._examples_before = 0
        self.loader: AdaptiveLoader

    @property
    def scheduler(self) -> BatchSizeScheduler:
        """The scheduler, which the callback keeps."""
        scheduler: BatchSizeScheduler | None = self._callback.scheduler
        assert scheduler is not None
        return scheduler

    # -- before the first step

    def open(self, loader: Any) -> Steps:
        """Makes the Trainer's loader one whose size may move."""
        self.args.ignore_data_skip = True  # the loader resumes by itself: batches tell nobody where
        most = self._trainer.most_at_a_time  # less than first asked for, if auto_find_batch_size found that too much
        if isinstance(loader, AdaptiveLoader):
            loader.max_microbatch_size = loader.max_microbatch_size or most
            self.first_size = loader.batch_size
        else:
            size = getattr(loader, "batch_size", None) or most
            if size != most:  # somebody's own loader
                self.first_size, most = self.first_size // self.args.train_batch_size * size, size
            changes: dict[str, Any] = {"batch_size": self.first_size, "max_microbatch_size": most}
            if getattr(loader, "generator", None) is None:
                changes["seed"] = self.args.seed if self.args.data_seed is None else self.args.data_seed
            loader = AdaptiveLoader.from_dataloader(loader, **changes)
        self.loader = loader
        return Steps(self)

    def begin(self, state: Any) -> None:
        """Makes the scheduler, where the Trainer begins or resumes."""
        self.restore_arguments()
        if self._callback.scheduler is not None:
            self._callback.scheduler.close()
        saved = self._saved(state) if state.global_step else None
        self._callback.scheduler = BatchSizeScheduler(
            self._trainer.model_wrapped,
            self._trainer.optimizer,
            self.loader,
            self._callback.rule,
            grad_scaler=self._trainer.accelerator.scaler,
            **self._callback.options,
        )
        if saved is not None:
            self.loader.load_state_dict(saved["loader"])
            self.scheduler.load_state_dict(saved["scheduler"])
        self._examples_before = self.loader.state_dict()["total"]
        self._estimate(state, state.global_step)

    def _saved(self, state: Any) -> dict[str, Any]:
        """What the checkpoint has of the scheduler and the loader."""
        name = type(self._callback).__name__
        saved: dict[str, Any] = state.stateful_callbacks.get(name, {}).get("attributes", {})
        if not saved:
            raise ValueError(
                f"the checkpoint of step {state.global_step} has no state of {name}, so that nobody knows its next "
                "size and example: it was saved by another Trainer. Begin a new training with its weights instead"
            )
        return saved

    def state_dict(self) -> dict[str, Any]:
        """Where scheduler and loader are."""
        return {"scheduler": self.scheduler.state_dict(), "loader": self.loader.state_dict()}

    def clock(self, schedule: Any, made: bool) -> Any:
        """A learning-rate schedule that goes by examples, where one of steps would not know its end.

        Args:
            schedule: the Trainer's.
            made: whether the Trainer has made it, by ``lr_scheduler_type``.
        """
        if made and self.args.max_steps <= 0 and isinstance(schedule, LambdaLR):
            schedule = ByExamples(schedule, every=self.first_size)
        return Clock(schedule, self) if isinstance(schedule, ByExamples) else schedule

    def reference_steps(self) -> int:
        """How many steps of the first size all epochs have."""
        examples = self._all_examples()
        return self.args.max_steps if examples is None else math.ceil(examples / self.first_size)

    # -- a step

    def reduction(self, step: Step, items: Tensor | int | None) -> Reduction:
        """What the loss is a mean of; asked once, when it first matters."""
        several = len(step.batch) > 1 or self.loader.world_size > 1
        unequal = items is not None and not self._warned and self.scheduler.variance is not None
        if unequal:
            counts = items_of_examples(self._trainer, step)
            unequal = len(counts) > 0 and bool((counts != counts[0]).any())
        if items is None or not (several or unequal):
            return Reduction()
        if self._reduction is None:
            self._reduction = self._asked(step, items)
        reduction = self._reduction or Reduction()  # all losses are zero, or not finite: no matter
        if unequal and reduction.divided:
            self._warned = True
            warnings.warn(
                f"the examples of a batch have from {int(counts.min())} to {int(counts.max())} labels that count, and "
                "the Trainer's loss is the mean over all of these, so that the gradient of a single example is not "
                "defined: measuring each example's contribution to the batch gradient instead",
                stacklevel=2,
            )
        return reduction

    def _asked(self, step: Step, items: Tensor | int) -> Reduction | None:
        told = getattr(self._trainer, "loss_is_scaled_for_ga", None)  # by its author
        if told is not None and self.loader.world_size == 1:
            return Reduction(bool(told))
        real = (one for one, size in zip(step.microbatches, step.batch.sizes, strict=True) if size)
        return next(filter(None, (asked(self._trainer, microbatch, items) for microbatch in real)), None)

    def step(self, state: Any) -> None:
        """Chooses the size of the next step, after the optimizer's."""
        self.scheduler.step()
        self._estimate(state, state.global_step + 1)

    def tell(self, state: Any) -> None:
        """Tells the Trainer how far training has got."""
        epoch, seen, length = self._progress()
        state.epoch = epoch + seen / length if length else float(epoch)
        for callback in self._trainer.callback_handler.callbacks:
            bar: Any = getattr(callback, "training_bar", None)
            if hasattr(bar, "total"):
                bar.total = state.max_steps

    def finished(self) -> bool:
        """Whether all steps were made."""
        state = self._trainer.state
        return bool(state.global_step >= state.max_steps)

    def examples_seen(self) -> int:
        """Since this training began, or resumed."""
        return int(self.loader.state_dict()["total"]) - self._examples_before

    # -- how long it takes

    def _progress(self) -> tuple[int, int, int | None]:
        """The epoch, how many of its examples were seen or will be left out, and how many it has."""
        state = self.loader.state_dict()
        length, seen = state["length"], state["consumed"]
        if length is not None and self.loader.drop_last and seen and length - seen < self.loader.batch_size:
            seen = length
        return state["epoch"], seen, length

    def _all_examples(self) -> int | None:
        length = self.loader.state_dict()["length"]
        return None if self.args.max_steps > 0 or length is None else math.ceil(self.args.num_train_epochs * length)

    def _estimate(self, state: Any, steps: int) -> None:
        """Sets the number of all steps as it would be with the present size: the Trainer stops there."""
        examples = self._all_examples()
        if examples is None:
            return
        epoch, seen, length = self._progress()
        assert length is not None
        left = examples - epoch * length - seen
        state.max_steps = steps + max(0, math.ceil(left / self.loader.batch_size))

    # -- the end

    def restore_arguments(self) -> None:
        """Makes the Trainer's arguments again what they were."""
        for name, value in self._theirs.items():
            setattr(self.args, name, value)

    def close(self) -> None:
        """Leaves model, optimizer and arguments as they were before."""
        self.restore_arguments()
        if self._callback.scheduler is not None:
            self._callback.scheduler.close()
        self._callback.close()
        if isinstance(self._trainer.lr_scheduler, Clock):
            self._trainer.lr_scheduler = self._trainer.lr_scheduler.schedule


class Steps:
    """What the Trainer goes through: one item a step, a batch of whatever size.

    Args:
        run: the training.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.dataset = run, run.loader.dataset

    @property
    def batch_size(self) -> int:
        """Examples of the next step."""
        return self.run.loader.batch_size

    def __len__(self) -> int:
        """The most steps an epoch can have, of one example each: the Trainer wants a number that epochs end before.

        Raises:
            TypeError: the number of steps is given, and not that of epochs, or the length of the data is not known.
        """
        length = self.run.loader.state_dict()["length"]
        if self.run.args.max_steps > 0 or length is None:
            raise TypeError("the number of steps in an epoch is not known, since their sizes move")
        return int(length)

    def __iter__(self) -> Iterator[Step]:
        if self.run.finished():
            return  # the checkpoint of a training's end
        batches = iter(self.run.loader)
        try:
            batch = next(batches, None)
            if batch is None:  # resumed at the very end of an epoch
                batches = iter(self.run.loader)
                batch = next(batches, None)
            while batch is not None:
                yield Step(batch)
                batch = next(batches, None)
        finally:
            batches.close()  # type: ignore[attr-defined]


class Clock:
    """A learning-rate schedule by examples that is stepped as the Trainer steps its own.

    Args:
        schedule: the schedule.
        run: knows the examples.
    """

    def __init__(self, schedule: ByExamples, run: Run) -> None:
        self.schedule, self.optimizer, self._run = schedule, schedule.scheduler.optimizer, run

    def step(self) -> None:
        """After a step of the optimizer."""
        last = self._run.scheduler.last
        if last is not None:
            self.schedule.step(last.examples_total)

    def get_last_lr(self) -> list[float]:
        """The learning rates of the groups."""
        return self.schedule.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where ``state_dict`` left off; the state of another Trainer does not tell, and is refused later."""
        every = state.get("every", self.schedule.every)
        if every != self.schedule.every:
            raise ValueError(
                f"the checkpoint's learning-rate schedule counts steps of {every} examples, the size of its first "
                f"batch, and here that is {self.schedule.every}: choose per_device_train_batch_size and "
                "gradient_accumulation_steps so that, times the number of processes, they are the same"
            )
        if "every" in state:
            self.schedule.load_state_dict(state)
