"""Follows forward and backward passes of one model and gathers what its uses of parameters report."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cabs.variance import torch_internals
from cabs.variance.backward import BackwardPass, close
from cabs.variance.inputs import ExamplesOf, of_examples
from cabs.variance.interception import Hook, Installation, Interceptor, tensors_in, tensors_within
from cabs.variance.invocations import ADDITIONS, Adopted, Invocation, Layer, invocation
from cabs.variance.moves.reductions import batch_norm_mixes
from cabs.variance.origins import origin
from cabs.variance.owners import SUM, Lot, Marks, Owners, covers_its_memory_once
from cabs.variance.parameters import Parameters
from cabs.variance.torch_internals import NO_BACKWARD, current_backward
from cabs.variance.uses import Use

_slots = itertools.count()


class Meter:
    """Hooks in a model, from ``__init__`` to ``remove``.

    Args:
        model: the module to follow.
        begin: makes the record of a new backward pass, given its number of examples.
        measured: which of m examples to measure, given whether all of them cost next to nothing.
        parameters: the model's, with their names.
        examples_of: finds the examples among the model's inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[int], BackwardPass],
        measured: Callable[[int, bool], slice],
        parameters: Parameters,
        examples_of: ExamplesOf,
    ) -> None:
        self._measured = measured
        self._begin_pass = begin
        self._examples_of = examples_of
        self._parameters = parameters
        self._costly = False
        self._warned: set[str] = set()
        self._uses: Counter[int] = Counter()
        self._pass: tuple[int, Lot, BackwardPass] | None = None
        self._received: list[tuple[int, int]] = []
        self._forwards = False
        """Whether there were forward passes since the batch began."""
        self._missed: set[int] = set()
        self._hidden: set[int] = set()
        """Parameters that met examples where autograd was off: perhaps in a custom autograd.Function."""
        self._marks = Marks(f"_cabs_owners_{next(_slots)}")
        self._interceptor = Interceptor(self._marks, self)
        self._installation = Installation(
            model, self._interceptor, self._begin_forward, self._measure_layer, self.remove
        )
        self._leaf_hooks: list[Any] = []
        for parameter in model.parameters():
            self._watch(parameter)

    def pause(self, paused: bool) -> None:
        """Lets forward passes go by unmeasured, until told otherwise."""
        self._installation.active = not paused
        if paused:
            self._end_forward()

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
        if not self._installation.active:
            return
        self._installation.forget()
        self._open(Lot(examples, given=True))
        torch_internals.enter(self._interceptor)
        tensors = tensors_within(batch)
        found = self._examples_of.owners(batch, tensors)
        if found is not None:
            self._mark_rows(tensors, found[1])
            return
        for tensor in of_examples(tensors, 0, examples):
            if covers_its_memory_once(tensor):
                self._mark(tensor, 0, torch.arange(examples))

    def _open(self, lot: Lot) -> None:
        self._marks.lot = lot
        self._uses.clear()
        self._hidden.clear()
        self._forwards = True

    def _begin_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Finds the examples among the arguments of an outermost call."""
        if current_backward() != NO_BACKWARD:
            return args, kwargs  # computed again, of tensors that are marked
        tensors = tensors_within((args, kwargs))
        lot = self._marks.lot
        if lot is not None and not lot.closed:
            marked = [owners for tensor in tensors if (owners := self._marks.get(tensor)) is not None]
            if marked:
                lot.see(marked)
                return args, kwargs
        said = self._examples_of.owners((args, kwargs), tensors)
        if said is not None:
            if lot is None or lot.closed or lot.examples != said[0]:
                self._open(Lot(said[0]))
            self._mark_rows(tensors, said[1])
            return args, kwargs
        if lot is not None and lot.given and not lot.closed:
            return self._mark_inputs(args, kwargs, tensors, torch.arange(lot.examples))
        examples = self._examples_of.count(tensors)
        if lot is not None and not lot.closed and any(map(self._marks.beside, tensors)):
            # Another part of the same memory: a batch that goes through the model in parts.
            ids = torch.arange(examples) + lot.examples
            lot.examples += examples
            return self._mark_inputs(args, kwargs, tensors, ids)
        if lot is None or lot.closed or examples != lot.examples:
            self._open(Lot(examples))
        return self._mark_inputs(args, kwargs, tensors, torch.arange(examples))

    def _mark_inputs(self, args: Any, kwargs: Any, tensors: list[Tensor], ids: Tensor) -> tuple[Any, Any]:
        examples, dim = len(ids), self._examples_of.dim
        found = of_examples(tensors, dim, examples)
        if not found and tensors:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise RuntimeError(
                f"there are {examples} examples, and the model was called with inputs of shapes {shapes}: none has "
                f"{examples} entries along dimension {dim}; call the model with the loader's batch, or say whose each row "
                "is with owners of GradientVariance"
            )
        apart = {id(t): t.clone() for t in found if not covers_its_memory_once(t)}
        if apart:  # examples that share memory (windows, expanded rows) cannot be told apart there
            args, kwargs = pytree.tree_map(lambda v: apart.get(id(v), v), (args, kwargs))
        assert self._marks.lot is not None
        self._marks.lot.see([Owners(ids)])
        for tensor in found:
            one = apart.get(id(tensor), tensor)
            self._mark(one, dim if one.dim() > dim else 0, ids)
        return args, kwargs

    def _mark_rows(self, tensors: list[Tensor], ids: Tensor) -> None:
        dim = self._examples_of.dim
        for tensor in tensors:
            if tensor.dim() > dim and tensor.shape[dim] == len(ids) and covers_its_memory_once(tensor):
                self._mark(tensor, dim, ids)

    def _mark(self, tensor: Tensor, dim: int, ids: Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            self._marks.set(tensor, Owners.along(dim, tensor.dim(), ids))

    def owners(self, tensor: Tensor) -> Owners | None:
        return self._marks.get(tensor)

    def own(self, tensor: Tensor, owners: Owners) -> None:
        self._marks.set(tensor, owners)

    def follow(self, call: Callable[[], Any]) -> Any:
        """Makes a call and marks what comes of it."""
        return self._interceptor.follow(call, (), {})

    def measure(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if writes(function):
            return self._measure_in_place(function, args, kwargs)
        if function in SUMS and self._adds_to_a_sum(args, kwargs):
            return self._interceptor.follow(function, args, kwargs)
        call = invocation(function, args, kwargs, self._marks.get)
        self._warn_of_statistics(function, call)
        return self._use(call)

    def _adds_to_a_sum(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether parameters are added to what all examples were added up to: a penalty, which is no example's."""
        owned = [found for tensor in tensors_in((args, kwargs)) if (found := self._marks.get(tensor)) is not None]
        return all(bool((owners.table == SUM).all()) for owners in owned)

    def _measure_in_place(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As the form that returns a new tensor, which is then written where the result belongs."""
        target, *rest = args
        name = function.__name__
        if self._marks.get(target) is None and target.requires_grad:
            raise NotImplementedError(
                f"{name} writes examples into a tensor made of parameters: put them together with torch.cat or torch.where"
            )
        if name == "__setitem__":
            with torch.no_grad():
                place = self._interceptor.follow(Tensor.__getitem__, (target, rest[0]), {})
            self._interceptor.follow(function, (target, rest[0], self._adopt(place, rest[1])), {})
            return None
        if name == "copy_":
            return self._interceptor.follow(function, (target, self._adopt(target, rest[0])), kwargs)
        twin = getattr(Tensor, INPLACE_OPERATORS.get(name, name.removesuffix("_")), None)
        if twin is None:
            raise NotImplementedError(f"{name} writes a parameter's effect into a tensor in place, and has no other form")
        before = target if twin in ADDITIONS else self._interceptor.follow(target.clone, (), {})
        result = self.measure(twin, (before, *rest), kwargs)
        return self._interceptor.follow(Tensor.copy_, (target, result), {})

    def _adopt(self, place: Tensor, value: Any) -> Any:
        """A parameter that is written to where examples are belongs to these."""
        owners = self._marks.get(place)
        if not isinstance(value, Tensor) or not value.requires_grad or self._marks.get(value) is not None:
            return value
        if owners is None:
            raise NotImplementedError("a parameter is written into memory that examples share: use torch.where")
        return self._use(Adopted(value.expand(place.shape).to(place.dtype), owners))

    def _measure_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or self._marks.lot is None:
            return output
        owners = [found for tensor in tensors_in(args) if (found := self._marks.get(tensor)) is not None]
        examples = self._marks.lot.examples
        if not owners or not torch.is_grad_enabled() or not output.requires_grad:
            return output
        if any(o.varying != (0,) or o.pattern(examples) != (1, 1) for o in owners) or output.shape[0] != examples:
            raise NotImplementedError(
                f"{type(layer).__name__} has a formula registered, which takes examples along the first dimension, and is "
                "given something else"
            )
        self._mark(output, 0, torch.arange(examples))
        return self._use(Layer(layer, args, output, self._marks.get))

    def _warn_of_statistics(self, function: Callable[..., Any], call: Invocation) -> None:
        if "training" in call.values and call.values["training"]:
            owners = self._marks.get(call.values["input"])
            if batch_norm_mixes(None if owners is None else owners.table):
                leaves = [value for name, value in call.values.items() if name in call.parameters]
                self.warn(f"{self.where(leaves)} mixes the examples of a batch (BatchNorm in training mode)")

    def hidden_use(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.requires_grad and self._marks.get(tensor) is None:
                self._hidden.update(id(leaf) for leaf in origin(tensor).leaves)

    def mixed(self, outputs: list[Tensor], places: list[str]) -> None:
        """Where gradients come back through a mixture, no gradient is a single example's."""
        for output in outputs:
            output.register_hook(lambda gradient: self.warn(f"the loss of one example depends on others ({places[0]})"))

    def warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"{what}, so that the gradient of a single example is not defined: measuring each example's contribution "
                "to the batch gradient instead. estimator='microbatch' does without.",
                stacklevel=2,
            )

    def _use(self, call: Invocation) -> Any:
        use = Use(self, call, current_backward())
        output = use.forward()
        if use.rows is not None:
            for parameter in use.parameters:
                if self._parameters.is_news(parameter):
                    self._watch(parameter)
                # Recomputed activations (checkpointing) repeat uses that were counted the first time.
                if use.task == NO_BACKWARD or not self._uses[id(parameter)]:
                    self._uses[id(parameter)] += 1
        return output

    def where(self, parameters: Sequence[Tensor]) -> str:
        """The name of the module that has some parameters."""
        names = [self._parameters.name(id(parameter)) for parameter in parameters]
        return names[0].rpartition(".")[0] or names[0]

    # -- backward

    def measured(self, examples: int, cheap: bool) -> slice:
        self._costly |= not cheap
        return self._measured(examples, cheap)

    def expected_uses(self, parameter: Tensor) -> int:
        return self._uses[id(parameter)]

    def backward_pass(self, use: Use) -> BackwardPass:
        """The record of the backward pass that runs now."""
        use.lot.closed = True
        task = current_backward() if use.task == NO_BACKWARD else use.task
        if self._pass is None or self._pass[0] != task:
            self._note_missed()
            self._received = [(number, key) for number, key in self._received if number == task]
            self._pass = (task, use.lot, self._begin_pass(use.lot.examples))
        if self._pass[1] is not use.lot:
            raise RuntimeError(
                f"{use.where}: a backward pass through two forward passes, one of {use.lot.examples} examples and one of "
                f"{self._pass[1].examples}: all parts of a loss must be of the same examples; call backward for each"
            )
        return self._pass[2]

    def _watch(self, parameter: Tensor) -> None:
        if parameter.requires_grad:
            self._leaf_hooks.append(parameter.register_hook(Hook(self._receive(parameter), self.remove)))

    def _receive(self, parameter: Tensor) -> Callable[[Tensor], None]:
        key = id(parameter)

        def hook(gradient: Tensor) -> None:
            if not self._installation.active:
                return
            self._received.append((current_backward(), key))
            with torch_internals.unseen():
                total = None if self._pass is None else self._pass[2].receive(parameter, gradient)
                if key in self._hidden and (total is None or not close(total, gradient)):
                    self._missed.add(key)

        return hook

    def check(self) -> None:
        """Refuses to report a variance that misses an example or a parameter."""
        self._note_missed()
        if self._pass is not None and self._pass[1].given and len(self._pass[1].seen) != self._pass[1].examples:
            lot = self._pass[1]
            raise RuntimeError(
                f"the loader handed out {lot.examples} examples and the model was called with {len(lot.seen)} of them: call "
                "the model with all of a batch before backward"
            )
        missed = {self._parameters.name(key) for key in self._missed} | self._parameters.unseen_shards()
        if missed:
            names = ", ".join(sorted(missed))
            raise RuntimeError(
                f"gradients reached {names} by a way that cannot be seen (a custom autograd.Function or scripted "
                "code): register a rule for the layer with cabs.variance.register_layer, or use "
                "estimator='microbatch'"
            )

    def forget(self) -> None:
        """Begins a new batch."""
        self._forwards = False
        self._missed.clear()
        self._received.clear()
        self._pass = None
        self._end_forward()

    def _end_forward(self) -> None:
        """Lets go of the examples; nothing is seen until there are others."""
        torch_internals.leave(self._interceptor)
        self._marks.lot = None
        self._installation.forget()

    def __del__(self) -> None:
        torch_internals.leave(self._interceptor)

    def _note_missed(self) -> None:
        if self._pass is None:
            self._missed |= {key for _, key in self._received} if self._forwards else set()
        else:
            task, _, current = self._pass
            self._missed |= {key for number, key in self._received if number == task} - current.claimed


SUMS = {*ADDITIONS, torch.stack, torch.cat}

INPLACE_OPERATORS = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div", "__ipow__": "pow",
    "__imatmul__": "matmul",
}  # fmt: skip


def writes(function: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in INPLACE_OPERATORS or name == "__setitem__"
