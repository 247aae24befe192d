"""What the scheduler does to the loader and the optimizer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from cabs import rules
from cabs.clocks import keep_half_lives
from cabs.loader import AdaptiveLoader
from cabs.parallel import Team
from cabs.scheduler.observing import Observer
from cabs.scheduler.requirements import HasBatchSize
from cabs.variance import GradientVariance


class Steered(Protocol):
    """A scheduler, as far as another one that follows it has to know."""

    loader: HasBatchSize | None
    monitor_only: bool
    variance: GradientVariance | None
    _closed: bool

    @property
    def optimizer(self) -> Any: ...

    def close(self) -> None: ...


_LATEST: weakref.WeakKeyDictionary[Any, weakref.ref[Steered]] = weakref.WeakKeyDictionary()
"""The scheduler that was made last for an optimizer."""


def succeed(scheduler: Steered) -> None:
    """Closes the scheduler that was made before for the same optimizer, if both would do the same: a cell run again."""
    known = _LATEST.get(scheduler.optimizer)
    before = None if known is None else known()
    if before is not None and not before._closed:
        measured = before.variance is not None and scheduler.variance is not None
        steers = not before.monitor_only and not scheduler.monitor_only and before.loader is scheduler.loader
        if measured or steers:
            what = "model was being measured" if measured else "loader's size was being chosen"
            warnings.warn(f"the {what} already: the new scheduler takes over, and the old one is closed", stacklevel=4)
            before.close()
    _LATEST[scheduler.optimizer] = weakref.ref(scheduler)


class Steering:
    """Sets the loader's batch size, and observes what it hands out.

    Args:
        loader: the loader, if there is one.
        observer: told what is handed out.
        team: the processes that share the batches, if there are several.
        accumulation: how many batches of the loader make a step.
        monitor_only: leave the loader as it is.
    """

    def __init__(
        self, loader: HasBatchSize | None, observer: Observer, team: Team | None, accumulation: int, monitor_only: bool
    ) -> None:
        self._loader, self._accumulation, self._monitor_only = loader, accumulation, monitor_only
        self._deliver, self._observer = observer.deliver, observer
        self._team = team
        if monitor_only:
            observer.only_watch()

    def first_size(self, rule: rules.Rule, least: int, most: int) -> float:
        """The size of the first step: the rule's, or the loader's as it is now; with a budget one that divides it."""
        size = rule.first_batch_size()
        if size is None:
            size = getattr(self._loader, "batch_size", None)
            size = least if size is None else size * self._accumulation
        return size if rule.budget is None else rules.fit(max(size, least), rule.budget, least, most)

    def dataset_size(self) -> int | None:
        """M, the number of examples in the data, if it is known."""
        try:
            return len(self._loader.dataset)  # type: ignore[union-attr]
        except (AttributeError, TypeError):
            return None

    def take_over(self, rule: rules.Rule, compares_microbatches: bool) -> None:
        """Makes the loader report what it hands out, and share its batches with the team."""
        loader = self._loader
        if not isinstance(loader, AdaptiveLoader):
            return
        loader.on_delivery = self._deliver
        loader.on_request = self._asked
        if self._monitor_only:
            return
        loader.steered = loader.steered or not isinstance(rule, rules.Constant)
        # One process has nothing but microbatches to compare.
        loader.least_microbatches = 2 if compares_microbatches and self._team is None else 1
        if self._team is not None:
            order = loader.state_dict()["seed"]
            loader.share(self._team.rank, self._team.size, seed=self._team.of_first(order))

    def _asked(self) -> None:
        self._observer.stopwatch.asked()

    def set_size(self, size: int) -> None:
        """Sets the size of the next step."""
        if not self._monitor_only:
            assert self._loader is not None
            self._loader.batch_size = size // self._accumulation

    def let_go(self) -> None:
        """Leaves the loader alone, unless another scheduler has taken it over."""
        loader = self._loader
        if isinstance(loader, AdaptiveLoader) and loader.on_delivery == self._deliver:
            loader.on_delivery, loader.on_request, loader.least_microbatches = None, None, 1


IN_A_ROW = 30
"""A ``GradScaler`` does not skip more steps than these in a row: it halves its scale at each."""


class OptimizerWatch:
    """Notices whether the optimizer makes its steps.

    Args:
        optimizer: the optimizer.
        stepped: called after each of its steps.
        expects_steps: whether to warn if the scheduler steps and the optimizer has not.
        scaled: whether a ``GradScaler`` may keep the optimizer from steps, as long as it looks for a scale.
    """

    def __init__(self, optimizer: Any, stepped: Callable[[], None], expects_steps: bool, scaled: bool) -> None:
        self._optimizer, self._name = optimizer, type(optimizer).__name__
        self._handle = None
        self._kept: tuple[Any, Callable[[], None]] | None = None
        if hasattr(optimizer, "register_step_post_hook"):
            self._handle = optimizer.register_step_post_hook(lambda *_: stepped())
        self._warns = expects_steps and self._handle is not None
        self._allowed = IN_A_ROW if scaled else 0
        self._scaled, self._in_a_row = scaled and self._handle is not None, 0

    def missed(self, stepped: bool) -> bool:
        """Whether a scaler skipped the step; warns, once, if the scheduler steps and the optimizer does not."""
        self._in_a_row = 0 if stepped else self._in_a_row + 1
        if self._in_a_row > self._allowed and self._warns:
            self._warns = False
            warnings.warn(
                f"scheduler.step() was called, and {self._name}, the optimizer that the scheduler was made with, has "
                "not made a step since the last call: call optimizer.step() before it, and pass the optimizer that you "
                "step with to the scheduler",
                stacklevel=4,
            )
        return self._scaled and not stepped

    def keep_half_lives(self, reference: int | None, batch_size: Callable[[], int]) -> None:
        """Sets the optimizer's averages before each of its steps, so that they forget as much per example.

        Args:
            reference: the size that they are meant for; None leaves them alone.
            batch_size: says the examples of the step that is about to be made.
        """
        if reference is None:
            return
        if not hasattr(self._optimizer, "register_step_pre_hook"):
            raise TypeError(f"{self._name} tells nobody before it steps: half-lives cannot be kept")
        set_for = keep_half_lives(self._optimizer, reference)
        handle = self._optimizer.register_step_pre_hook(lambda *_: set_for(batch_size()))
        self._kept = (handle, lambda: set_for(reference))

    def close(self) -> None:
        """Removes the hooks from the optimizer, and restores its averages."""
        if self._handle is not None:
            self._handle.remove()
        if self._kept is not None:
            handle, restore = self._kept
            handle.remove()
            restore()
            self._kept = None
