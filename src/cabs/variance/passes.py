"""The backward passes that a step is made of: those whose gradients are in ``.grad`` when the optimizer steps.

A pass counts as long as its gradients are there. ``zero_grad`` takes them away, and with them the pass: so whatever is
computed on the side (a first pass of SAM, an adversarial input, a batch that was dropped) is not counted, and nobody
has to say so. ``autograd.grad`` leaves ``.grad`` alone and does not count either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor

from cabs.interrupts import gradients_on
from cabs.norms import is_zero
from cabs.torch_internals import at_the_end_of_backward, current_backward, unseen, version_of


class Pass:
    """One backward pass.

    Attributes:
        task: autograd's number for it.
        examples: how many examples it was about, as far as is known.
        completed: whether it ran to its end, rather than being interrupted.
    """

    def __init__(self, task: int, examples: int) -> None:
        self.task = task
        self.examples = examples
        self.completed = False


class Passes:
    """Notes every backward pass that adds to ``.grad``.

    Args:
        parameters: the model's.
        sharded: whether processes have a part of each parameter. Gradients then arrive elsewhere and later, and every
            pass is taken to count.
    """

    def __init__(self, parameters: Iterable[Tensor], sharded: bool) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._sharded = sharded
        self._now: Pass | None = None
        self._joins = False
        """Whether the pass that runs now adds to the gradients of others."""
        self._counted: list[Pass] = []
        self._given_up: list[Pass] = []
        self._left: list[tuple[int, int] | None] = []
        """What the last pass left in ``.grad`` when it ended: each tensor's id, and how often it was written to."""
        self._rewritten = False
        """Whether somebody else wrote into the gradients between passes of the step at hand."""
        self.leftover = 0
        """How many passes of a step that was given up are in the gradients of the step at hand."""
        self.ignored_in: set[object] = set()
        """The blocks that are open in which passes do not count."""
        self.called_with = 0
        """How many examples the model was called with last, or a loader handed out."""
        self._handles = []
        if not sharded:
            hook = _weakly(self._arrived)
            self._handles = [p.register_post_accumulate_grad_hook(hook) for p in self._parameters]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __len__(self) -> int:
        """How many passes the step at hand is made of, as far as is known."""
        return len(self._counted)

    @property
    def examples(self) -> int:
        """How many examples these passes were about."""
        return sum(one.examples for one in self._counted)

    def tasks(self) -> set[int]:
        """Autograd's numbers of these passes."""
        return {one.task for one in self._counted}

    def joins(self, task: int) -> bool:
        """Told of a backward pass as soon as it is seen: whether it adds to earlier gradients of the same step."""
        if self._now is None or self._now.task != task:
            self._now, self._joins = Pass(task, self.called_with), self._gradients_are_there()
            if self._joins and self._left and self._left != self._in_grad():
                self._rewritten = True
        return self._sharded or self._joins

    def counts(self, task: int) -> bool:
        """Whether a pass is part of the step at hand."""
        return self._sharded or any(one.task == task for one in self._counted)

    def of_completed(self, found: Mapping[int, set[int]]) -> set[int]:
        """What was found of passes of the step at hand that nothing interrupted, by their numbers."""
        return set().union(*(found.get(one.task, set()) for one in self._counted if one.completed))

    def check(self) -> None:
        """Refuses gradients that are not the sum of what the passes of the step at hand have added to them."""
        if self._rewritten:
            raise RuntimeError(
                "gradients were changed between backward passes of one step (clipped, scaled, set to zero in part), so "
                "that what is stepped with is not the sum of what was measured: change them once, after the last "
                "backward pass of the step"
            )

    def give_up(self) -> None:
        """The step at hand is not going to be made."""
        self._given_up += [one for one in self._counted if one.completed]
        self._counted = []

    def forget(self) -> None:
        """The step was made."""
        self._counted, self._given_up, self.leftover = [], [], 0
        self._left, self._rewritten = [], False

    def _arrived(self, parameter: Tensor) -> None:
        """Called when a gradient has been added to ``.grad``."""
        now = self._now
        if now is None or (self._counted and self._counted[-1] is now):
            return
        if self.ignored_in or now.task != current_backward():
            return
        self._left = []
        if not self._joins:
            self._counted, self.leftover, self._rewritten = [], 0, False
        else:
            self.leftover += len(self._given_up)
        self._given_up = []
        self._counted.append(now)
        at_the_end_of_backward(partial(self._ended, now))

    def _ended(self, now: Pass) -> None:
        now.completed = True
        at_the_end_of_backward(self._look)  # after others, who may have gradients to exchange between processes

    def _look(self) -> None:
        self._left = self._in_grad()

    def _in_grad(self) -> list[tuple[int, int] | None]:
        with unseen():
            gradients = [p.grad for p in self._parameters]
            return [None if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]

    def _gradients_are_there(self) -> bool:
        if not self._counted and not self._given_up and not self.leftover:
            return False  # whatever is there is older than the step
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        with gradients_on(False):
            return not all(map(is_zero, gradients))


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The method, which keeps nothing alive: the garbage collector does not see hooks of this kind, nor cycles."""
    known = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        method = known()
        if method is not None:
            method(parameter)

    return hook
