"""The variance from the gradients of whole passes: no look into the model, whatever it is made of.

K passes of b examples each have gradients g_k that vary like single ones, only b times less:
tr Σ = b · K/(K − 1) · (mean ‖g_k‖² − ‖g‖²). It costs nothing where gradients are accumulated anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cabs.variance.backward import BackwardPass
from cabs.variance.inputs import ExamplesOf, tensors_within
from cabs.variance.interception import Hook, displace, keep_out_of_compiled_code
from cabs.variance.torch_internals import NO_BACKWARD, current_backward


class MicrobatchMeter:
    """Follows the gradients that reach the parameters in each backward pass.

    Args:
        model: the module to follow.
        begin: makes the record of a new backward pass, given its number of examples.
        squared: whether to square a pass that begins after so many examples.
        examples_of: finds the examples among the model's inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[int], BackwardPass],
        squared: Callable[[], bool],
        examples_of: ExamplesOf,
    ) -> None:
        displace(model)
        keep_out_of_compiled_code()
        self._begin, self._squared = begin, squared
        self._examples_of = examples_of
        self._examples, self._given = 0, False
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
        """Lets backward passes go by unmeasured, until told otherwise."""
        self._paused = paused

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Begins a new batch."""
        self._pass = None

    def check(self) -> None:
        """Nothing can be missed: gradients are seen where they arrive."""

    def expect(self, batch: object, examples: int) -> None:
        """Told what a loader handed out."""
        self._examples, self._given = examples, True

    def _look_at_inputs(self, module: nn.Module, args: object, kwargs: object) -> None:
        if torch.is_grad_enabled() and current_backward() == NO_BACKWARD and not self._given:
            tensors = tensors_within((args, kwargs))
            found = self._examples_of.owners((args, kwargs), tensors)
            self._examples = self._examples_of.count(tensors) if found is None else found[0]

    def _receive(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self._paused:
                return
            task = current_backward()
            if self._pass is None or self._pass[0] != task:
                squared = self._squared()
                self._pass = (task, self._begin(self._examples), squared)
            _, into, squared = self._pass
            with torch.no_grad():
                into.add_whole(parameter, gradient, squared)

        return hook


def traces(sums: Tensor, mean_squares: Tensor, examples: int, passes: Tensor, measured: Tensor) -> Tensor:
    """tr Σ of each group, without bias, from passes of any sizes.

    E‖g_k‖² = ‖∇F‖² + tr Σ / b_k and E‖g‖² = ‖∇F‖² + tr Σ / m: the difference of the two means over the passes,
    each weighed by its examples, is tr Σ times that of 1/b_k and 1/m.

    Args:
        sums: Σ_k b_k ‖g_k‖² of each group, over the passes that were squared.
        mean_squares: ‖g‖² of each group.
        examples: m.
        passes: how many passes were squared.
        measured: how many examples they had.
    """
    return (sums / measured - mean_squares) / (passes / measured - 1 / examples)
