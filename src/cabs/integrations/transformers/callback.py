"""The Trainer's callback: makes the scheduler, and lets it step."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from cabs import rules
from cabs.integrations.options import rule_and_options
from cabs.integrations.transformers.run import Run
from cabs.scheduler import BatchSizeScheduler

FROM_TRAINER = ("accumulation", "grad_scaler", "trial")
"""What the Trainer says of a scheduler."""


class CABSCallback(TrainerCallback, ExportableState):
    """Chooses the batch size of every step, in a ``CABSTrainer``.

    Example::

        trainer = CABSTrainer(model, args, train_dataset=data, callbacks=[CABSCallback(max_batch_size=512)])
        trainer.train()

    Args:
        rule: one of ``cabs.rules``; the paper's CABS by default. A schedule puts no hook into the model.
        **options: what ``cabs.CABS`` takes, such as ``min_batch_size``, ``max_batch_size``, ``budget``.

    Attributes:
        scheduler: the scheduler, from the beginning of training on; its ``last`` is the record of the last step.
    """

    def __init__(self, rule: rules.Rule | None = None, **options: Any) -> None:
        self.rule, self.options = rule_and_options("CABSCallback", rule, options, FROM_TRAINER)
        self.scheduler: BatchSizeScheduler | None = None
        self._run: Run | None = None

    def state(self) -> dict[str, Any]:
        """Where scheduler and loader are, for the Trainer's checkpoints."""
        return {"args": {}, "attributes": {} if self._run is None else self._run.state_dict()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the scheduler, and resumes it if the Trainer resumes."""
        self._run = getattr(kwargs.get("train_dataloader"), "run", None)
        if self._run is None:
            raise TypeError(
                "this Trainer cannot change its batch size, a callback alone cannot make it, and nothing was trained: "
                "use cabs.integrations.transformers.CABSTrainer, or, with another Trainer T, "
                "`class MyTrainer(CABSTrainer, T): pass`"
            )
        self._run.begin(state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes one batch of the loader a step."""
        args.gradient_accumulation_steps = 1

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Chooses the next size, while the gradients are still there."""
        assert self._run is not None
        self._run.step(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tells the Trainer how far training has got."""
        assert self._run is not None
        self._run.tell(state)

    def close(self) -> None:
        """Forgets the training; the scheduler stays, to be looked at."""
        self._run = None
