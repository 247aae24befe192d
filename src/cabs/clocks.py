"""Clocks that count examples, for everything in a training run that counts steps.

When the batch size moves, steps are no measure of progress: learning-rate schedules would run faster or slower, and
averages would remember more or fewer examples. Here both go by examples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, ReduceLROnPlateau


class ByExamples:
    """Drives a learning-rate scheduler by examples: one of its steps for every so many.

    The learning rate at some number of examples is the same whatever the batch sizes were::

        schedule = ByExamples(CosineAnnealingLR(optimizer, T_max=1000), every=90)       # 90,000 examples
        …
        scheduler.step(loss)
        schedule.step(scheduler.last.examples_total)

    A ``LambdaLR`` and ``CosineAnnealingWarmRestarts`` jump to where they should be, so ``every=1`` costs nothing.
    Others can only be stepped, so give them some hundred or thousand steps in all.

    Args:
        scheduler: any of ``torch.optim.lr_scheduler``, made as always and not yet stepped.
        every: the examples of one of its steps.
    """

    def __init__(self, scheduler: LRScheduler, every: int = 1) -> None:
        if not hasattr(scheduler, "step") or not hasattr(scheduler, "optimizer"):
            raise TypeError(f"{scheduler!r} is no learning-rate scheduler of torch")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every is {every!r}: it must be a positive number of examples")
        self.scheduler = scheduler
        self.every = every
        self.examples_total = 0

    def step(self, examples_total: int, *metrics: float) -> None:
        """Brings the learning rate to where it should be after so many examples.

        Args:
            examples_total: all examples so far.
            *metrics: what ``ReduceLROnPlateau`` wants to see; its patience counts steps of ``every`` examples.

        Raises:
            ValueError: there were more examples before.
        """
        if examples_total < self.examples_total:
            raise ValueError(f"{examples_total} examples are fewer than the {self.examples_total} before")
        before, now = self.examples_total // self.every, examples_total // self.every
        self.examples_total = examples_total
        if now == before:
            return
        if isinstance(self.scheduler, CosineAnnealingWarmRestarts):
            self.scheduler.step(now)
            return
        if isinstance(self.scheduler, LambdaLR):
            # Its rate is the first times a function of last_epoch: no step depends on the one before.
            self.scheduler.last_epoch = now - 1
            before = now - 1
        for _ in range(before, now):
            self.scheduler.step(*metrics)  # type: ignore[arg-type]

    def get_last_lr(self) -> list[float]:
        """The learning rates of the groups."""
        return [float(rate) for rate in self.scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """The clock and the scheduler's own state."""
        return {"every": self.every, "examples_total": self.examples_total, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` left off.

        Raises:
            ValueError: the state was saved with another ``every``.
        """
        if state["every"] != self.every:
            raise ValueError(f"the state counts {state['every']} examples a step, this clock {self.every}")
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self.examples_total = int(state["examples_total"])


@functools.lru_cache(maxsize=32)
def factors_of(make: Callable[[torch.optim.Optimizer], LRScheduler], every: int) -> Callable[[int], float]:
    """A torch scheduler as a function from examples to its learning rate, 1 being the optimizer's.

    Args:
        make: what makes the scheduler, ``lambda optimizer: CosineAnnealingLR(optimizer, 100)``.
        every: the examples of one of its steps.
    """
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(f"{scheduler!r} is no learning-rate schedule of torch, which depends on the step alone")
    rates = [float(optimizer.param_groups[0]["lr"])]
    optimizer.step()  # torch warns of schedulers that step before their optimizer

    def factor(examples: int) -> float:
        while len(rates) <= examples // every:
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates[examples // every]

    return factor


def half_life(beta: float, batch_size: float, reference: float) -> float:
    """β^(m/m_ref): the β that forgets as much in a step of m examples as ``beta`` does in m_ref examples.

    Raises:
        ValueError: β is not in [0, 1], or a size is not positive.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}: it must be in [0, 1]")
    if batch_size <= 0 or reference <= 0:
        raise ValueError(f"the batch sizes {batch_size} and {reference} must be positive")
    return float(beta ** (batch_size / reference))


def average_by_examples(
    decay: float, reference: int, batch_size: Callable[[], int]
) -> Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | int], None]:
    """A weight average whose half-life is counted in examples, the ``multi_avg_fn`` of torch's ``AveragedModel``.

    ::

        average = AveragedModel(model, multi_avg_fn=average_by_examples(0.999, 64, lambda: scheduler.last.examples))

    Args:
        decay: the decay at a step of ``reference`` examples.
        reference: m_ref.
        batch_size: says the examples of the step just made.
    """
    half_life(decay, reference, reference)

    @torch.no_grad()
    def update(averaged: Sequence[Tensor], current: Sequence[Tensor], count: Tensor | int) -> None:
        weight = 1 - half_life(decay, batch_size(), reference)
        for old, new in zip(averaged, current, strict=True):
            if old.is_floating_point() or old.is_complex():
                old.lerp_(new.to(old.dtype), weight)
            else:
                old.copy_(new)

    return update


def keep_half_lives(optimizer: torch.optim.Optimizer, reference: int) -> Callable[[int], None]:
    """Keeps the half-lives of an optimizer's averages in examples: Adam's betas, momentum, RMSprop's α, Adadelta's ρ.

    The optimizer's present values are for steps of ``reference`` examples. Call the function that is returned with the
    size of the next batch before every step. With momentum, α = lr/(1 − β) moves along: larger batches carry less.

    The optimizer's own numbers stay in its groups as ``initial_…``, as learning-rate schedulers do it, so that they are
    saved and loaded with it. Adam corrects its averages as if β had always been what it is now; within the first
    half-life that is off where m has moved since.

    Raises:
        ValueError: the optimizer has no averages, or the reference is not positive.
    """
    names = {"betas", "momentum"}
    if isinstance(optimizer, torch.optim.RMSprop):
        names.add("alpha")
    if isinstance(optimizer, torch.optim.Adadelta):
        names.add("rho")
    if reference < 1:
        raise ValueError(f"the reference batch size is {reference}: it must be positive")
    if not any(group.get(name) for group in optimizer.param_groups for name in names):
        raise ValueError(
            f"{type(optimizer).__name__} keeps no averages with these settings: there is no half-life to keep"
        )

    def set_for(batch_size: int) -> None:
        for group in optimizer.param_groups:
            for name in names & group.keys():
                first = group.setdefault(f"initial_{name}", group[name])
                if isinstance(first, tuple | list):
                    group[name] = tuple(half_life(beta, batch_size, reference) for beta in first)
                else:
                    group[name] = half_life(first, batch_size, reference)

    set_for(reference)
    return set_for
