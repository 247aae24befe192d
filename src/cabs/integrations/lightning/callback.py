"""The callback that chooses the batch size of every step in Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from cabs import rules
from cabs.couplings import Coupling
from cabs.integrations.lightning import requirements
from cabs.integrations.lightning.loop import Loop, log
from cabs.integrations.lightning.losses import Losses
from cabs.integrations.lightning.packages import Callback, LightningModule, Trainer
from cabs.integrations.loggers import scalars
from cabs.loader import AdaptiveLoader
from cabs.scheduler import BatchSizeScheduler
from cabs.scheduler.requirements import bounds, check_rule


class CABSCallback(Callback):
    """Chooses the batch size of every step of ``trainer.fit``.

    Example::

        trainer = lightning.Trainer(max_epochs=3, callbacks=[CABSCallback(min_batch_size=16, max_batch_size=2048)])
        trainer.fit(module, train_dataloaders=DataLoader(dataset, batch_size=16, shuffle=True))

    The training loader is a ``DataLoader``, which is replaced by a ``cabs.AdaptiveLoader`` made of it, or such a loader
    itself. Its batch size is the first. Takes what ``cabs.CABS`` takes; what the scheduler must know of accumulation,
    precision and processes it finds out from the trainer. Loggers of the trainer get the numbers of
    ``cabs.integrations.loggers.scalars``.

    Args:
        rule: one of ``cabs.rules``, instead of the paper's. A schedule only measures nothing.
        loss_floor: F_*, a lower bound of the loss that training cannot get below.
        noise_share: ρ, the share of the loss that may be gradient noise, see ``cabs.CABS``.
        budget: the examples that training will see, all of them.
        cost: what a step costs, see ``cabs.CABS``.
        small_data: correct for batches drawn without replacement.
        min_batch_size: the smallest size ever chosen.
        max_batch_size: the largest.
        smoothing: μ of the moving averages.
        estimator: ``"exact"``, ``"paper"`` or ``"microbatch"``.
        max_examples: measure only so many examples of each batch.
        measure_every: measure at every so many steps.
        accumulation: how many batches make a step in manual optimization; elsewhere the trainer's
            ``accumulate_grad_batches``.
        monitor_only: measure and report, but leave the loader alone.
        assume_sgd: take any optimizer for plain SGD.
        coupling: what a step of the optimizer does with a gradient, where its class does not tell.
        multiple_of: choose only multiples of this.
        check_owners: check on the first batch that examples are told apart as they should be; in one process only.
        keep_half_lives: the batch size that the optimizer's momentum or betas are meant for.
        progress_bar: whether the progress bar shows the batch size, and which part of the epoch's examples are done.

    Attributes:
        scheduler: what chooses the sizes; None before training. After ``fit`` it is closed, and may still be read.
    """

    def __init__(
        self,
        *,
        rule: rules.Rule | None = None,
        loss_floor: float = 0.0,
        noise_share: float | None = None,
        budget: int | None = None,
        cost: Literal["examples", "measured"] | tuple[float, float] = "examples",
        small_data: bool = False,
        min_batch_size: int = 16,
        max_batch_size: int = 2048,
        smoothing: float = 0.95,
        estimator: str = "exact",
        max_examples: int | Literal["auto"] | None = "auto",
        measure_every: int | Literal["auto"] = "auto",
        accumulation: int | None = None,
        monitor_only: bool = False,
        assume_sgd: bool = False,
        coupling: Coupling | None = None,
        multiple_of: int = 1,
        check_owners: bool = True,
        keep_half_lives: int | None = None,
        progress_bar: bool = True,
    ) -> None:
        papers = rules.CABS(loss_floor, noise_share=noise_share, budget=budget, cost=cost, small_data=small_data)
        if rule is not None and papers != rules.CABS():
            raise ValueError(
                "loss_floor, noise_share, budget, cost and small_data are of the paper's rule, and rule= is another: "
                "give them to that, rule=rules.CABS(…)"
            )
        self._rule = papers if rule is None else rule
        check_rule(self._rule, *bounds(min_batch_size, max_batch_size, multiple_of, self._rule))
        self._options: dict[str, Any] = {
            "min_batch_size": min_batch_size,
            "max_batch_size": max_batch_size,
            "smoothing": smoothing,
            "estimator": estimator,
            "max_examples": max_examples,
            "measure_every": measure_every,
            "monitor_only": monitor_only,
            "assume_sgd": assume_sgd,
            "coupling": coupling,
            "multiple_of": multiple_of,
            "keep_half_lives": keep_half_lives,
        }
        self._accumulation, self._check_owners = accumulation, check_owners
        self._monitor_only, self._progress_bar = monitor_only, progress_bar
        self.scheduler: BatchSizeScheduler | None = None
        self._loop: Loop | None = None
        self._losses: Losses | None = None
        self._position: dict[str, Any] | None = None
        self._resumed: dict[str, Any] = {}

    # -- before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what cannot be done, and takes over the fit loop."""
        self._resumed = {}
        if stage != "fit":
            return
        self._close()
        self.scheduler, self._position = None, None
        requirements.check_trainer(trainer, pl_module)
        requirements.check_accumulation(self._accumulation, trainer, pl_module)
        self._loop = Loop(trainer, lambda given: self._loader(given, trainer), requirements.refuse_early_length)

    def _loader(self, given: Any, trainer: Trainer) -> AdaptiveLoader | None:
        """What the batches come from; None if that is not ours to change."""
        if self._monitor_only and not isinstance(given, AdaptiveLoader):
            return None
        loader = requirements.adaptive(given, trainer)
        if "loader" in self._resumed:
            loader.load_state_dict(self._resumed["loader"])
        return loader

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses optimizers before anything else begins."""
        requirements.the_optimizer(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the scheduler: model, optimizer and loader are as they will be."""
        optimizer = requirements.the_optimizer(trainer)
        accumulation = requirements.check_accumulation(self._accumulation, trainer, pl_module)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        assert trainer.model is not None
        loop = self._taken()
        loader: Any = trainer.train_dataloader if loop is None else loop.loader
        self.scheduler = BatchSizeScheduler(
            trainer.model,
            optimizer,
            loader,
            self._rule,
            accumulation=accumulation,
            grad_scaler=scaler,
            # In DDP Lightning calls training_step through the model, and that must not be called once more.
            check_owners=self._check_owners and trainer.model is pl_module,
            **self._options,
        )
        if self._resumed:
            self.scheduler.load_state_dict(self._resumed["scheduler"])
        self._losses = Losses(optimizer, accumulation, scaler, returned=pl_module.automatic_optimization)
        if loop is not None:
            loop.begin(resumed=bool(self._resumed))

    def _taken(self) -> Loop | None:
        """The fit loop, if its batches are ours."""
        return None if self._loop is None or self._loop.epochs is None else self._loop

    # -- training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the epoch's validations from its beginning."""
        if (loop := self._taken()) is not None:
            loop.begin(resumed=False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Tells the fit loop whether this batch is the epoch's last."""
        if self._losses is not None:
            self._losses.begin_batch()
        if (loop := self._taken()) is not None:
            loop.begin_batch()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Notes what goes into ``backward``."""
        if self._losses is not None:
            self._losses.note_backward(loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Notes that a step is to be made, which a GradScaler may skip."""
        if self._losses is not None:
            self._losses.note_attempt()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the loss of the step just made, if one was, and sets the size of the next."""
        scheduler, losses = self.scheduler, self._losses
        assert scheduler is not None
        assert losses is not None
        loss = losses.of_step(outputs)
        if loss is not None:
            scheduler.step(loss)
            self._report(trainer, pl_module, scheduler)
        if (loop := self._taken()) is not None:
            loop.end_batch()
            if not losses.pending:
                self._position = loop.position()

    def _report(self, trainer: Trainer, pl_module: LightningModule, scheduler: BatchSizeScheduler) -> None:
        assert scheduler.last is not None
        numbers = scalars(scheduler.last)
        log(trainer, numbers)
        if self._progress_bar and trainer.progress_bar_callback is not None:
            shown = {"cabs/batch_size": numbers["cabs/batch_size"]}
            if (loop := self._taken()) is not None and loop.knows_length:
                shown["cabs/epoch"] = loop.epoch_share()
            pl_module.log_dict(shown, prog_bar=True, logger=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes where the next epoch begins."""
        if (loop := self._taken()) is not None and self._losses is not None and not self._losses.pending:
            self._position = loop.position()

    # -- after training

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes every hook out of the model, the optimizer and the fit loop."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same after an interrupt."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The same where there was nothing to train."""
        self._close()

    def _close(self) -> None:
        if self._loop is None:
            return  # there is nothing open
        if self._losses is not None:
            self._losses.close()
        if self.scheduler is not None:
            self.scheduler.close()
        self._loop.let_go()
        self._losses, self._loop = None, None

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and where the loader was after its last step."""
        if self.scheduler is None:
            return self._resumed
        state = {"scheduler": self.scheduler.state_dict()}
        position = self._resumed.get("loader") if self._position is None else self._position
        return state if position is None else {**state, "loader": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps a checkpoint's state until training begins."""
        self._resumed = dict(state)
