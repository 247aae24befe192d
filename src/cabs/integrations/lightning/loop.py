"""Lightning's fit loop with batches whose number nobody knows. The one file that reaches into Lightning.

Where Lightning knows no number of batches, it takes every batch a step ahead, in order to know which is the last, and
sizes would lag by a step. So it is given a limit beyond any epoch, and told here which batch is the last: the loader
knows that by its examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from cabs.integrations.lightning.packages import Trainer
from cabs.loader import AdaptiveLoader

BEYOND = 2**40
"""More batches than any epoch has."""


class Epochs:
    """A loader as Lightning iterates over it: nothing begins before the first batch is asked for."""

    def __init__(self, loader: AdaptiveLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.pass_over: Any = None
        """The pass over the loader that is under way."""

    def __len__(self) -> int:
        raise TypeError("the number of batches is not known, since their size moves: count examples")

    def __iter__(self) -> Iterator[Any]:
        self.pass_over = batches = iter(self.loader)
        try:
            yield from batches
        finally:
            batches.close()  # type: ignore[attr-defined]


class Loop:
    """Takes over the fit loop of a trainer.

    Args:
        trainer: the trainer.
        loader_of: makes the loader of what was given to ``trainer.fit``; None leaves that and the loop as they are.
        early: called if ``configure_optimizers`` asks for the number of batches.
    """

    def __init__(
        self, trainer: Trainer, loader_of: Callable[[Any], AdaptiveLoader | None], early: Callable[[], None]
    ) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop
        self._optimizers = trainer.optimizers
        self.epochs: Epochs | None = None
        self._validations = 0
        source, set_up = self._loop._data_source, self._loop.setup_data
        request = source.dataloader

        def dataloader() -> Any:
            given = request()
            loader = loader_of(given)
            if loader is None:
                return given
            if isinstance(trainer.limit_train_batches, float):
                trainer.limit_train_batches = BEYOND  # until it is set up
            self.epochs = Epochs(loader)
            return self.epochs

        def setup_data() -> None:
            limit = trainer.limit_train_batches
            try:
                set_up()
            finally:
                trainer.limit_train_batches = limit
            if self.epochs is not None:
                if trainer.optimizers is self._optimizers and trainer.max_steps == -1:
                    early()
                self._set_limits()

        vars(source)["dataloader"], vars(self._loop)["setup_data"] = dataloader, setup_data

    def let_go(self) -> None:
        """Leaves the fit loop as it was."""
        vars(self._loop._data_source).pop("dataloader", None)
        vars(self._loop).pop("setup_data", None)

    @property
    def loader(self) -> AdaptiveLoader:
        """What the batches come from."""
        assert self.epochs is not None
        return self.epochs.loader

    @property
    def _limit(self) -> int | float:
        limit = self._trainer.limit_train_batches
        return limit if isinstance(limit, int) else math.inf

    @property
    def _validation_share(self) -> float | None:
        """The part of an epoch after which to validate, if it is no number of batches and no time."""
        interval = getattr(self._trainer, "val_check_interval", None)
        return interval if isinstance(interval, float) else None

    def _set_limits(self) -> None:
        """Corrects what Lightning made of its limit."""
        trainer, loop, progress = self._trainer, self._loop, self._loop.epoch_loop.batch_progress
        loop.max_batches = self._limit
        if loop.restarting:
            # Of an epoch that was over, Lightning finds that out by a number of batches that was reached.
            loop.max_batches = 1 if progress.is_last_batch else math.inf
        share = self._validation_share
        if share is not None:
            by_batches = share < 1 and self._limit < math.inf
            trainer.val_check_batch = max(1, int(self._limit * share)) if by_batches else math.inf

    def begin_batch(self) -> None:
        """Tells the loop whether a batch is the last, before anything is done with it."""
        self._loop.max_batches = self._limit
        progress = self._loop.epoch_loop.batch_progress
        # With drop_last the rest is left out or not by the next step's size, which is known after this one.
        waits = self.loader.drop_last and self._makes_step()
        if not waits and self._at_end():
            progress.is_last_batch = True

    def _makes_step(self) -> bool:
        trainer, ready = self._trainer, self._loop.epoch_loop.batch_progress.current.ready
        return not trainer.lightning_module.automatic_optimization or ready % trainer.accumulate_grad_batches == 0

    def end_batch(self) -> None:
        """Tells the loop whether the epoch is over, and whether to validate, now that the next size is known."""
        progress, loop = self._loop.epoch_loop.batch_progress, self._loop.epoch_loop
        if not progress.is_last_batch and self._at_end():
            progress.is_last_batch = True
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._validate_by_examples()

    def _validate_by_examples(self) -> None:
        share = self._validation_share
        if share is None or share == 1 or self._limit < math.inf:
            return
        done = self._loop.epoch_loop.batch_idx + 1
        number = int(self.epoch_share() / share + 1e-9)
        # Lightning validates after batches whose number this divides.
        self._trainer.val_check_batch = done if number > self._validations else done + 1
        self._validations = number

    def begin(self, resumed: bool) -> None:
        """An epoch begins, or is resumed."""
        share = self._validation_share
        self._validations = int(self.epoch_share() / share + 1e-9) if resumed and share else 0

    @property
    def knows_length(self) -> bool:
        """Whether an epoch has an end, and its number of examples is known."""
        return self.loader.state_dict()["length"] is not None and not self.loader.stream

    def epoch_share(self) -> float:
        """The part of the epoch's examples that was handed out."""
        state, limit = self.loader.state_dict(), self._trainer.limit_train_batches
        whole = state["length"] * (limit if isinstance(limit, float) else 1.0)
        return float(state["consumed"] / whole) if whole else 1.0

    def _at_end(self) -> bool:
        assert self.epochs is not None
        limit = self._trainer.limit_train_batches
        limited = isinstance(limit, float) and limit < 1 and self.epoch_share() >= 1
        return limited or bool(self.epochs.pass_over.at_end())

    def position(self) -> dict[str, Any]:
        """Where the loader is, as its state; at the end of an epoch, the next one's beginning."""
        progress = self._loop.epoch_loop.batch_progress
        over = progress.is_last_batch or progress.current.ready >= self._loop.max_batches
        state = self.loader.state_dict()
        if over and state["consumed"] and not self.loader.stream:
            state.update(epoch=state["epoch"] + 1, consumed=0)
        return state


def log(trainer: Trainer, numbers: dict[str, float]) -> None:
    """Hands numbers to the trainer's loggers, if it is time to log."""
    if trainer._logger_connector.should_update_logs:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
