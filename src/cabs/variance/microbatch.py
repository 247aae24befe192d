"""The variance from the gradients of whole passes, for any model.

K passes of b examples each have gradients g_k that vary like single ones, only b times less:
tr Σ = b · K/(K − 1) · (mean ‖g_k‖² − ‖g‖²). It costs nothing where gradients are accumulated anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cabs.hooks import Hook, displace
from cabs.interrupts import gradients_on
from cabs.torch_compiler import keep_out_of_compiled_code
from cabs.torch_internals import NO_BACKWARD, current_backward
from cabs.variance.backward import BackwardPass
from cabs.variance.inputs import ExamplesOf, tensors_within
from cabs.variance.passes import Passes


class MicrobatchMeter:
    """Follows the gradients that reach the parameters in each backward pass.

    Args:
        model: the module to follow.
        begin: makes the record of a new backward pass, given its number of examples and autograd's number for it.
        squared: whether to square a pass that begins after so many examples.
        examples_of: finds the examples among the model's inputs.
        log: notes all passes.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[int, int], BackwardPass],
        squared: Callable[[], bool],
        examples_of: ExamplesOf,
        log: Passes,
    ) -> None:
        displace(model)
        keep_out_of_compiled_code(Hook.__call__)
        self._begin, self._squared, self._log = begin, squared, log
        self._examples_of = examples_of
        self._examples = self._given = 0
        self._paused = False
        self._pass: tuple[int, BackwardPass, bool] | None = None
        self._handles = [
            model.register_forward_pre_hook(Hook(self._look_at_inputs, self.remove), with_kwargs=True),
            # A forward hook, though it does nothing, lets a later measurement find this one.
            model.register_forward_hook(Hook(lambda *_: None, self.remove)),
            *(p.register_hook(Hook(self._receive(p), self.remove)) for p in model.parameters() if p.requires_grad),
        ]

    cheap = True
    """Gradients are there anyway."""

    def pause(self, paused: bool) -> None:
        """Does not measure backward passes until told otherwise."""
        self._paused = paused

    def look_away(self) -> None:
        """What follows is not part of the step."""

    def look_again(self) -> None:
        """The step continues."""

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Begins a new batch."""
        self._pass, self._given = None, 0

    def check(self) -> None:
        """Nothing can be missed: gradients are seen where they arrive."""
        self._log.check()

    def expect(self, batch: object, examples: int, rows: bool) -> None:
        """Told what a loader handed out."""
        self._examples = self._given = examples
        self._log.called_with = examples

    def _look_at_inputs(self, module: nn.Module, args: object, kwargs: object) -> None:
        if torch.is_grad_enabled() and current_backward() == NO_BACKWARD:
            # A part of what the loader handed out, if the loop cuts batches itself.
            self._examples = self._count(args, kwargs)
            self._log.called_with = self._examples

    def _count(self, args: object, kwargs: object) -> int:
        tensors = tensors_within((args, kwargs))
        try:
            found = self._examples_of.owners((args, kwargs), tensors)
            counted = self._examples_of.count(tensors) if found is None else found[0]
        except ValueError:
            if not self._given:
                raise
            return self._given
        return min(counted, self._given) if self._given else counted

    def _receive(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            task = current_backward()
            self._log.joins(task)
            if self._paused or self._log.ignored_in:
                return
            if self._pass is None or self._pass[0] != task:
                squared = self._squared()
                self._pass = (task, self._begin(self._examples, task), squared)
            _, into, squared = self._pass
            with gradients_on(False):
                into.add_whole(parameter, gradient, squared)

        return hook
