"""Follows forward and backward passes of one model and gathers what its uses of parameters report."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cabs import torch_internals
from cabs.interrupts import gradients_on
from cabs.torch_internals import NO_BACKWARD, current_backward
from cabs.variance.backward import BackwardPass, close
from cabs.variance.examples import Examples
from cabs.variance.following import place
from cabs.variance.hooks import Hook
from cabs.variance.inputs import ExamplesOf, tensors_in
from cabs.variance.interception import Installation, Interceptor
from cabs.variance.invocations import ADDITIONS, Invocation, Layer, invocation
from cabs.variance.memory import Marks
from cabs.variance.moves.reductions import batch_norm_mixes
from cabs.variance.origins import fed_with_data, origin_of
from cabs.variance.owners import SUM, Lot, Owners
from cabs.variance.parameters import Parameters
from cabs.variance.passes import Passes
from cabs.variance.probing import Probe, as_before, callable_again, disagreement, with_another_example
from cabs.variance.registry import OPERATIONS
from cabs.variance.uses import Use
from cabs.variance.writes import measure_in_place, writes

_slots = itertools.count()


class Meter:
    """Hooks in a model, from ``__init__`` to ``remove``.

    Args:
        model: the module to follow.
        begin: makes the record of a new backward pass, given its number of examples and autograd's number for it.
        measured: which of m examples to measure, given whether all of them cost next to nothing.
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
        parameters: Parameters,
        examples_of: ExamplesOf,
        check: bool,
        log: Passes,
    ) -> None:
        self._log = log
        self._measured = measured
        self._unchecked = check
        self.looks = False
        """Whether a backward pass is under way that is none of training."""
        self._begin_pass = begin
        self._parameters = parameters
        self._costly = False
        self._warned: set[str] = set()
        self._pass: tuple[int, Lot, BackwardPass] | None = None
        self._received: list[tuple[int, int]] = []
        self._given = 0
        """How many examples a loader handed out last; 0 if there is none."""
        self._roots: list[Tensor] = []
        self._forwards = False
        """Whether there were forward passes since the batch began."""
        self._missed: set[int] = set()
        self._marks = Marks(f"_cabs_owners_{next(_slots)}")
        self._examples = Examples(self._marks, examples_of)
        self._interceptor = Interceptor(self._marks, self)
        self._installation = Installation(
            model, self._interceptor, self._begin_forward, self._check_owners, self._measure_layer, self.remove
        )
        self._leaf_hooks: list[Any] = []
        for parameter in model.parameters():
            self._watch(parameter)

    def pause(self, paused: bool) -> None:
        """Lets forward passes go by unmeasured, until told otherwise."""
        self._installation.active = not paused
        if paused:
            self._end_forward()

    def suspend(self) -> bool:
        """Looks away until ``resume``; whether there was anything to see."""
        active, self._installation.active = self._installation.active, False
        self._interceptor.end()
        return active

    def resume(self, active: bool) -> None:
        """Looks again."""
        self._installation.active = active
        if active and self._marks.lot is not None:
            self._interceptor.begin()

    @property
    def cheap(self) -> bool:
        """Whether all that was ever measured costs next to nothing."""
        return not self._costly

    def remove(self) -> None:
        self._installation.remove()
        for handle in self._leaf_hooks:
            handle.remove()
        self._end_forward()

    # -- forward

    @property
    def lot(self) -> Lot | None:
        return self._marks.lot

    def expect(self, batch: Any, examples: int) -> None:
        """Told what a loader handed out: the examples of the next forward passes."""
        self._log.called_with = self._given = examples
        if self._installation.active:
            self._installation.forget()
            with torch_internals.unseen():
                self._examples.expect(batch, examples)
            self._forwards = True
            self._interceptor.begin()

    def _begin_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if current_backward() != NO_BACKWARD:
            return args, kwargs  # computed again, of tensors that are marked
        self.looks = False  # which an interrupt may have left on
        if not self._installation.active:
            if not self._given:
                self._log.called_with = self._examples.count(args, kwargs)
            return args, kwargs
        self._forwards = True
        with torch_internals.unseen():
            return self._examples.enter(args, kwargs)

    def _check_owners(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Changes one example and sees whose rows move; see ``probing``."""
        again, lot = callable_again(module), self._marks.lot
        if not self._unchecked or again is None or lot is None or lot.examples < 2 or self._parameters.sharded:
            return
        if current_backward() != NO_BACKWARD or not torch.is_grad_enabled():
            return
        self._unchecked = False
        number = lot.examples // 2
        probes = []
        with torch_internals.unseen(), gradients_on(False):
            calls = [(args, kwargs), with_another_example(args, kwargs, self._marks, number, number - 1)]
        try:
            for call in calls:
                probes.append(Probe(self._marks, self.where))
                self._interceptor.probe = probes[-1]
                with as_before(again), gradients_on(False):
                    again(*call[0], **call[1])
        except Exception as error:
            warnings.warn(
                f"whose row is whose was not checked, since the model cannot be called again with one example changed: "
                f"{type(error).__name__}: {error}; check_owners=False leaves the check out",
                stacklevel=2,
            )
            return
        finally:
            self._interceptor.probe = None
            self._interceptor.following.mixtures.clear()
        wrong = disagreement(probes[0].seen, probes[1].seen, number)
        if wrong is not None:
            raise RuntimeError(wrong)

    def owners(self, tensor: Tensor) -> Owners | None:
        return self._marks.get(tensor)

    def own(self, tensor: Tensor, owners: Owners) -> None:
        self._marks.set(tensor, owners)

    def follow(
        self, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Makes a call and marks what comes of it."""
        return self._interceptor.follow(function, args, kwargs or {})

    def measure(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if writes(function):
            return measure_in_place(self, function, args, kwargs)
        if function in SUMS and self._adds_to_a_sum(args, kwargs):
            self._look_at_penalties(tensors_in((args, kwargs)))
            return self.follow(function, args, kwargs)
        call = invocation(function, args, kwargs, self._marks.get)
        return self.use(call)

    def _adds_to_a_sum(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether parameters are added to what all examples were added up to: a penalty, which is no example's."""
        owned = [found for tensor in tensors_in((args, kwargs)) if (found := self._marks.get(tensor)) is not None]
        return all(bool((owners.table == SUM).all()) for owners in owned)

    def _look_at_penalties(self, tensors: list[Tensor]) -> None:
        """A penalty is made of parameters; what layers make of other numbers is no penalty, and nobody's."""
        assert self._marks.lot is not None
        for tensor in tensors:
            if tensor.requires_grad and self._marks.get(tensor) is None:
                self._marks.lot.hidden.update(id(leaf) for leaf in fed_with_data(tensor))

    def _measure_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or self._marks.lot is None:
            return output
        owners = [found for tensor in tensors_in(args) if (found := self._marks.get(tensor)) is not None]
        examples = self._marks.lot.examples
        if not owners or not torch.is_grad_enabled() or not output.requires_grad:
            return output
        if any(o.varying != (0,) or o.pattern(examples) != (1, 1) for o in owners) or output.shape[0] != examples:
            raise NotImplementedError(
                f"{type(layer).__name__} has a formula registered, which takes examples along the first dimension, and "
                "is given something else"
            )
        self._examples.mark_output(output, examples)
        return self.use(Layer(layer, args, output, self._marks.get))

    def look_at_statistics(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = dict(zip(OPERATIONS[function].names, args, strict=False)) | kwargs
        names = [p for p in values.values() if isinstance(p, Tensor) and p.requires_grad and self._marks.get(p) is None]
        where = self.where([p for p in names if p.is_leaf]) if any(p.is_leaf for p in names) else f"{place()}:"
        if values.get("training"):
            owners = self._marks.get(values["input"])
            if batch_norm_mixes(None if owners is None else owners.table):
                self.warn(f"{where} mixes the examples of a batch (BatchNorm in training mode)")
        if values.get("scale_grad_by_freq"):
            self.warn(f"{where} divides gradients by how often all examples look a row up (scale_grad_by_freq)")

    @contextmanager
    def looking(self) -> Iterator[None]:
        before, self.looks = self.looks, True
        try:
            yield
        finally:
            self.looks = before

    def hidden_use(self, tensors: list[Tensor]) -> None:
        if all(tensor.requires_grad for tensor in tensors):
            return  # parameters among themselves
        for tensor in tensors:
            if tensor.requires_grad and self._marks.get(tensor) is None:
                assert self._marks.lot is not None
                self._marks.lot.hidden.update(id(leaf) for leaf in origin_of(tensor).leaves)

    def begin_backward(self, roots: list[Tensor]) -> None:
        self._roots = [root.detach() for root in roots]

    def mixed(self, outputs: list[Tensor], places: list[str]) -> None:
        """Where gradients come back through a mixture, no gradient is a single example's."""
        for output in outputs:
            output.register_hook(lambda gradient: self.warn(f"the loss of one example depends on others ({places[0]})"))

    def warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"{what}, so that the gradient of a single example is not defined: measuring each example's "
                "contribution to the batch gradient instead. estimator='microbatch' does without.",
                stacklevel=2,
            )

    def use(self, call: Invocation) -> Any:
        use = Use(self, call, current_backward())
        output = use.forward()
        if use.rows is not None:
            for parameter in use.parameters:
                if self._parameters.is_news(parameter):
                    self._watch(parameter)
                # Recomputed activations (checkpointing) repeat uses that were counted the first time.
                if use.task == NO_BACKWARD or not use.lot.uses[id(parameter)]:
                    use.lot.uses[id(parameter)] += 1
        return output

    def where(self, parameters: Sequence[Tensor]) -> str:
        """The name of the module that has some parameters."""
        names = [self._parameters.name(id(parameter)) for parameter in parameters]
        return names[0].rpartition(".")[0] or names[0]

    # -- backward

    def measured(self, examples: int, cheap: bool) -> slice:
        self._costly |= not cheap
        return self._measured(examples, cheap)

    def backward_pass(self, use: Use) -> BackwardPass:
        """The record of the backward pass that runs now."""
        use.lot.closed = True
        use.lot.fired.add(use.part)
        task = current_backward() if use.task == NO_BACKWARD else use.task
        if self._pass is None or self._pass[0] != task:
            self._note_missed()
            self._received = [(number, key) for number, key in self._received if number == task]
            self._pass = (task, use.lot, self._begin_pass(use.lot.examples, task))
            self._pass[2].roots, self._roots = self._roots, []
        if self._pass[1] is not use.lot:
            raise RuntimeError(
                f"{use.where}: a backward pass through two forward passes, one of {use.lot.examples} examples and one "
                f"of {self._pass[1].examples}: all parts of a loss must be of the same examples; call backward for each"
            )
        return self._pass[2]

    def _watch(self, parameter: Tensor) -> None:
        if parameter.requires_grad:
            self._leaf_hooks.append(parameter.register_hook(Hook(self._receive(parameter), self.remove)))

    def _receive(self, parameter: Tensor) -> Callable[[Tensor], None]:
        key = id(parameter)

        def hook(gradient: Tensor) -> None:
            if torch_internals.OwnDerivatives.depth:
                return
            self._log.joins(current_backward())
            if not self._installation.active or self.looks:
                return
            with torch_internals.unseen():
                if not self._claimed(key) and not bool(
                    (gradient.coalesce().values() if gradient.is_sparse else gradient).any()
                ):
                    return  # of rows that there are none of, say
                self._received.append((current_backward(), key))
                total = None if self._pass is None else self._pass[2].receive(parameter, gradient)
                hidden = set() if self._pass is None else self._pass[1].hidden
                if key in hidden and (total is None or not close(total, gradient)):
                    self._missed.add(key)

        return hook

    def _claimed(self, key: int) -> bool:
        return self._pass is not None and key in self._pass[2].claimed

    def check(self) -> None:
        """Refuses to report a variance that misses an example or a parameter."""
        self._note_missed()
        if self._pass is not None and len(self._pass[1].fired) < self._pass[1].parts:
            raise RuntimeError(
                "the model was called with parts of one tensor, and gradients came back for some of them only: call "
                "backward for all of a batch at once, or put a forward pass that is not trained with under no_grad()"
            )
        if self._pass is not None and self._pass[1].given and len(self._pass[1].seen) != self._pass[1].examples:
            lot = self._pass[1]
            raise RuntimeError(
                f"the loader handed out {lot.examples} examples and the model was called with {len(lot.seen)} of them: "
                "call the model with all of a batch before backward"
            )
        missed = {self._parameters.name(key) for key in self._missed} | self._parameters.unseen_shards()
        if missed:
            names = ", ".join(sorted(missed))
            raise RuntimeError(
                f"gradients reached {names} by a way that cannot be seen (a custom autograd.Function, scripted "
                "code, or inputs that are not known to be the examples'): register a formula for the layer with "
                "cabs.variance.register_layer, or use estimator='microbatch'"
            )

    def forget(self) -> None:
        """Begins a new batch."""
        self._forwards = False
        self._missed.clear()
        self._received.clear()
        self._pass = None
        self._given = 0
        self._end_forward()

    def _end_forward(self) -> None:
        """Lets go of the examples; nothing is seen until there are others."""
        self._interceptor.end()
        self._marks.lot = None
        self._installation.forget()

    def __del__(self) -> None:
        self._interceptor.end()

    def _note_missed(self) -> None:
        if self._pass is None:
            self._missed |= {key for _, key in self._received} if self._forwards else set()
        else:
            task, _, current = self._pass
            self._missed |= {key for number, key in self._received if number == task} - current.claimed


SUMS = {*ADDITIONS, torch.stack, torch.cat}
