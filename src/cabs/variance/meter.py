"""Follows forward and backward passes of one model and gathers what its uses of parameters report."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cabs import torch_internals
from cabs.hooks import Hook
from cabs.norms import is_zero
from cabs.torch_internals import NO_BACKWARD, current_backward
from cabs.variance.backward import BackwardPass
from cabs.variance.beside import Beside, Few
from cabs.variance.choosing import invocation
from cabs.variance.examples import Examples, check_missed, check_same, check_whole
from cabs.variance.given import Given
from cabs.variance.inputs import ExamplesOf, tensors_in
from cabs.variance.installation import Installation
from cabs.variance.interception import Interceptor
from cabs.variance.invocations import Invocation, Layer, check_layer
from cabs.variance.memory import Marks
from cabs.variance.mixing import Mixing
from cabs.variance.owners import Lot, Owners
from cabs.variance.parameters import Parameters
from cabs.variance.passes import Passes
from cabs.variance.penalties import check_left_out, is_missed, is_penalty, left_out, look_at_penalty, note_hidden_use
from cabs.variance.probing import can_be_checked, check_owners
from cabs.variance.rows import EVERY
from cabs.variance.taps import OwnDerivatives
from cabs.variance.uses import Use
from cabs.variance.writes import measure_in_place, writes

_slots = itertools.count()


class Meter:
    """Hooks in a model, from ``__init__`` to ``remove``.

    Args:
        model: the module to follow.
        begin: makes the record of a new backward pass, given its number of examples and autograd's number for it.
        measured: which of m examples to measure, given whether all of them cost next to nothing.
        beside: which of m examples to measure beside compiled code; None to run it as plain Python instead.
        parameters: the model's, with their names.
        examples_of: finds the examples among the model's inputs.
        check: whether to hold owners against what a change of one example moves, once.
        log: notes all passes.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[int, int], BackwardPass],
        measured: Callable[[int, bool], slice],
        beside: Callable[[int], slice | None],
        parameters: Parameters,
        examples_of: ExamplesOf,
        check: bool,
        log: Passes,
    ) -> None:
        self._log = log
        self._paused, self._measured, self._beside_of = False, measured, beside
        self._unchecked = check
        self.looks = False  # whether a backward pass is under way that is none of training
        self._begin_pass = begin
        self._parameters, self._costly = parameters, False
        self._pass: tuple[int, Lot, BackwardPass] | None = None
        self._received: list[tuple[int, int]] = []
        self._roots: list[Tensor] = []
        self._given = 0  # how many examples a loader handed out last, if there is one
        self._forwards = False  # whether there were forward passes since the batch began
        self._missed, self._left_out = set[int](), dict[int, set[int]]()
        self._marks = marks = Marks(f"_cabs_owners_{next(_slots)}")
        self._examples, self.mixing = Examples(marks, examples_of, parameters.has), Mixing(marks, self.where)
        self._interceptor = Interceptor(marks, self)
        self._beside = Beside(self, marks, self._interceptor, model, check)
        told = self._begin_forward, self._check_owners, self._measure_layer
        self._installation = Installation(
            model, self._interceptor, lambda: self._active, *told, self._beside, self.remove
        )
        weakref.finalize(self, self._interceptor.abandon)
        self._leaf_hooks: dict[int, Any] = {}
        for parameter in model.parameters():
            self._watch(parameter)

    def pause(self, paused: bool) -> None:
        """Lets forward passes go by unmeasured, until told otherwise."""
        self._paused = paused
        if paused:
            self._end_forward()

    @property
    def _active(self) -> bool:
        return not self._paused and not self._log.ignored_in

    def look_away(self) -> None:
        self._interceptor.end()  # what goes on is no part of the step

    def look_again(self) -> None:
        if self._active and self._marks.lot is not None:
            self._interceptor.begin()

    @property
    def cheap(self) -> bool:
        """Whether all that was ever measured costs next to nothing."""
        return not self._costly

    def remove(self) -> None:
        self._installation.remove()
        for handle in self._leaf_hooks.values():
            handle.remove()
        self._end_forward()

    @property
    def lot(self) -> Lot | None:
        return self._marks.lot

    def expect(self, batch: Any, examples: int, rows: bool) -> None:
        """Told what a loader handed out: the examples of the next forward passes."""
        self._log.called_with = self._given = examples
        self.looks = False
        if self._active:
            self._installation.forget()
            with torch_internals.unseen():
                self._examples.expect(batch, examples, rows)
            self._forwards = True
            self._interceptor.begin(as_python=not self._installation.in_compiled_code)

    def _begin_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if current_backward() != NO_BACKWARD:
            return args, kwargs  # computed again, of tensors that are marked
        if not self._active:
            if not self._given and not self._log.ignored_in:
                self._log.called_with = self._examples.count(args, kwargs)
            return args, kwargs
        self._forwards = True
        if torch_internals.in_transform():
            return args, kwargs  # what it does with parameters is not seen, and is missed
        with torch_internals.unseen():
            return self._examples.enter(args, kwargs)

    def _check_owners(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Holds owners against what a change of one example moves, once."""
        ready = current_backward() == NO_BACKWARD and torch.is_grad_enabled() and not self._parameters.sharded
        ready = ready and not torch_internals.in_transform()
        if self._unchecked and ready and can_be_checked(self._marks) and not self._beside.open:
            self._unchecked = False
            check_owners(module, args, kwargs, self._marks, self._interceptor, self.where)
            self._interceptor.following.mixtures.clear()

    def owners(self, tensor: Tensor) -> Owners | None:
        return self._marks.get(tensor)

    def own(self, tensor: Tensor, owners: Owners) -> None:
        self._marks.set(tensor, owners)

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Makes a call and marks what comes of it."""
        return self._interceptor.follow(function, args, kwargs or {})

    def measure(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> Any:
        if writes(function):
            return measure_in_place(self, function, args, kwargs)
        if is_penalty(function, args, kwargs, self._marks):
            self._beside.spoil("a penalty in the loss has a part in the gradients of its parameters")
            look_at_penalty(tensors_in((args, kwargs)), self._marks)
            return self.follow(function, args, kwargs)
        return self.use(invocation(function, args, kwargs, given, self._marks.get))

    def _measure_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or self._marks.lot is None:
            return output
        owners = [found for tensor in tensors_in(args) if (found := self._marks.get(tensor)) is not None]
        if not owners or not torch.is_grad_enabled() or not output.requires_grad:
            return output
        examples = self._marks.lot.examples
        check_layer(layer, output, owners, examples)
        self._examples.mark_output(output, examples)
        return self.use(Layer(layer, args, output, self._marks.get))

    @contextmanager
    def looking(self) -> Iterator[None]:
        self.looks = True
        try:
            yield
        finally:
            self.looks = False

    def hidden_use(self, tensors: list[Tensor]) -> None:
        note_hidden_use(tensors, self._marks)

    def begin_backward(self, roots: list[Tensor]) -> None:
        self._roots = [root.detach() for root in roots]
        look_at_penalty(roots, self._marks)
        self.mixing.look_at_loss(roots)
        if any(root.requires_grad and self._marks.get(root) is None for root in roots):
            self._beside.spoil("backward is called on something else than a loss of its examples too")

    def use(self, call: Invocation) -> Any:
        use = Use(self, call, current_backward())
        output = use.forward()
        if use.rows is not None:
            for parameter in use.parameters:
                if self._parameters.is_news(parameter):
                    self._watch(parameter)
                # Recomputed activations repeat uses that were counted the first time; reentrant checkpoints were not.
                if use.task == NO_BACKWARD or not torch_internals.saved_tensors_are_packed():
                    use.lot.uses[id(parameter)] += 1
        return output

    def where(self, parameters: Sequence[Tensor]) -> str:
        """The name of the module that has some parameters."""
        names = [self._parameters.name(id(parameter)) for parameter in parameters]
        return names[0].rpartition(".")[0] or names[0]

    def measured(self, examples: int, cheap: bool) -> slice:
        self._costly |= not cheap
        return EVERY if OwnDerivatives.depth else self._measured(examples, cheap)

    def beside(self, examples: int) -> slice | None:
        chosen = None if self._parameters.sharded or not torch.is_grad_enabled() else self._beside_of(examples)
        self._costly |= chosen is not None
        return chosen

    def backward_pass(self, use: Use | Few) -> BackwardPass:
        """The record of the backward pass that runs now."""
        if use.lot.beside is not None:
            return use.lot.beside
        use.lot.closed = True
        use.lot.fired.add(use.part)
        task = current_backward() if use.task == NO_BACKWARD else use.task
        if self._pass is None or self._pass[0] != task:
            self._note_missed()
            self._received = [(number, key) for number, key in self._received if number == task]
            self._pass = (task, use.lot, self._begin_pass(use.lot.examples, task))
            self._pass[2].roots, self._roots = self._roots, []
        check_same(use.lot, self._pass[1], lambda: use.where)
        return self._pass[2]

    def _watch(self, parameter: Tensor) -> None:
        if parameter.requires_grad:
            self._leaf_hooks[id(parameter)] = parameter.register_hook(Hook(self._receive(parameter), self.remove))

    def _receive(self, parameter: Tensor) -> Callable[[Tensor], None]:
        key = id(parameter)

        def hook(gradient: Tensor) -> None:
            if OwnDerivatives.depth:
                return
            self._log.joins(current_backward())
            if not self._active or self.looks:
                return
            with torch_internals.unseen():
                compiled = self._beside.receive(parameter, gradient)
                claimed = compiled or (self._pass is not None and key in self._pass[2].claimed)
                if not claimed and is_zero(gradient):
                    return  # of rows that there are none of, say
                self._received.append((current_backward(), key))
                if self._pass is None or compiled:
                    return
                if is_missed(parameter, gradient, *self._pass[1:], self._parameters.sharded):
                    self._missed.add(key)

        return hook

    def check(self) -> None:
        """Refuses to report a variance that misses an example or a parameter."""
        self._log.check()
        self._note_missed()
        check_whole(None if self._pass is None else self._pass[1])
        check_missed({self._parameters.name(key) for key in self._missed} | self._parameters.unseen_shards())
        check_left_out({self._parameters.name(key) for key in self._log.of_completed(self._left_out)})

    def forget(self) -> None:
        """Begins a new batch."""
        self._forwards = False
        self._missed, self._left_out, self._pass, self._given = set(), {}, None, 0
        self._received.clear()
        self._beside.forget()
        self._end_forward()

    def _end_forward(self) -> None:
        """Lets go of the examples; nothing is seen until there are others."""
        self._interceptor.end()
        self._marks.lot = None
        self._installation.forget()

    def _note_missed(self) -> None:
        if self._pass is None:
            self._missed |= {key for _, key in self._received} if self._forwards else set()
        else:
            task, _, current = self._pass
            self._missed |= {k for n, k in self._received if n == task} - current.claimed | current.unaccounted()
            self._left_out[task] = left_out(current, self._received, self._leaf_hooks)
