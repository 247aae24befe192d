"""Compiled models: what is measured runs beside them.

Compiled code cannot be looked into, and is to keep its speed. So before it runs, a few of its examples go through the
module as plain Python, where every use of a parameter is seen; it then runs untouched, and the gradients that come back
to its outputs are noted. When the backward pass has ended, those of the few examples go back through the plain pass:
that gives their ‖G_i‖². The gradient of the whole batch is what arrives at the parameters.

It holds if the outputs of an example depend on that example alone. Where the plain pass does not show that, steps that
are measured run the whole model as plain Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cabs import torch_compiler, torch_internals
from cabs.hooks import Hook
from cabs.interrupts import gradients_on
from cabs.norms import is_zero
from cabs.torch_internals import NO_BACKWARD, tree_leaves, tree_map, unseen
from cabs.variance.backward import BackwardPass
from cabs.variance.inputs import tensors_within
from cabs.variance.interception import Interceptor
from cabs.variance.memory import Marks
from cabs.variance.owners import SUM, Lot, Owners, Turns
from cabs.variance.probing import as_before, callable_again
from cabs.variance.taps import OwnDerivatives

if TYPE_CHECKING:
    from cabs.variance.meter import Meter

ROUNDING = 0.05
"""How far outputs may be apart, relative to the largest: compiled code in half precision rounds in other places."""


class Unfit(Exception):
    """Why compiled code cannot be measured beside it."""


class Few:
    """The few examples of one lot, and what was noted of them; ``lot`` is that of all, and ``few`` theirs."""

    task, where = NO_BACKWARD, "compiled code"  # as a use has them

    def __init__(self, lot: Lot, chosen: slice) -> None:
        self.lot, self.chosen = lot, chosen
        self.examples, self.part = lot.examples, lot.parts
        self.few = Lot(len(range(lot.examples)[chosen]), given=True)
        self.whole = self.few.examples == self.examples
        self.called = False  # whether compiled code was run for them
        self.plain: list[tuple[Tensor, Owners | None]] = []
        """What they gave outside of it, and whose that is, until it has run."""
        self.parameters: set[int] = set()
        """The ids of those that it may use."""
        self.record: BackwardPass | None = None
        """Of the backward pass through all examples."""
        self.arrived: list[tuple[Tensor, Tensor]] = []
        """Plain outputs, and the gradients that belong to them."""


class Beside:
    """Measures compiled code by what a few examples show outside of it.

    Args:
        host: whose examples these are.
        marks: the owners of tensors.
        interceptor: what sees the calls of the plain pass.
        model: what has the parameters.
        check: whether to compare, once, what the few examples give alone and in the batch.
    """

    def __init__(self, host: Meter, marks: Marks, interceptor: Interceptor, model: nn.Module, check: bool) -> None:
        self._host, self._marks, self._interceptor, self._model = host, marks, interceptor, model
        self._unchecked = check
        self.runs = False  # whether a pass of the few examples is being made
        self._unfit = False
        self._few: Few | None = None
        self._fired: Few | None = None  # those of the backward pass that runs now

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Runs the few examples. Compiled code may follow if this tells all that has to be known."""
        lot = self._marks.lot
        chosen = None if lot is None or self._unfit else self._host.beside(lot.examples)
        if lot is None or chosen is None:
            return False
        if not self.open:
            self._few = Few(lot, chosen)
        assert self._few is not None
        try:
            self._few.plain = self._run(self._few, module, args, kwargs)
        except Exception as error:  # whatever the model raises: it was not made to be called like this
            self._give_up(error)
            self._few = self._few if self._few.called else None
            return False
        self._few.called = True
        return True

    def leave(self, output: Any) -> None:
        """Marks what came of the compiled code, and notes the gradients that come back to it."""
        few = self._few
        if few is None or not self.open:
            return
        with unseen(), gradients_on(False):
            outputs = tensors_within(output)
            alike = len(outputs) == len(few.plain)
            for out, (plain, owners) in zip(outputs, few.plain, strict=False):
                alike = alike and self._take(few, out, plain, owners)
        few.plain, self._unchecked = [], False
        if not alike:
            self._give_up("a few examples alone give something else than in the batch")

    # -- the few examples, forwards

    def _run(self, few: Few, module: nn.Module, args: Any, kwargs: Any) -> list[tuple[Tensor, Owners | None]]:
        """What the few examples give as plain Python, and whose that is."""
        hooks = [hook for p in self._model.parameters() for hook in torch_internals.hooks_of(p)]
        if not all(isinstance(hook, Hook) for hook in hooks):
            raise Unfit("hooks of others on its parameters may change gradients")
        if torch_internals.saved_tensors_are_packed():
            raise Unfit("it is called where activations are computed again or moved away (checkpointing)")
        with unseen():
            (args, kwargs), marked = self._cut(few, args, kwargs)
        again, noted = callable_again(module), list[str]()
        try:
            self._host.mixing.noted = noted
            with self._about(few), torch_compiler.plain_python(self), as_before(again) as random:
                with unseen():
                    for tensor, whose in marked:
                        self._marks.set(tensor, whose)
                output = again(*args, **kwargs)
                found = [(tensor, self._marks.get(tensor)) for tensor in tensors_within(output)]
        finally:
            self._host.mixing.noted = None
        if random():
            raise Unfit("it draws random numbers (dropout), and a few examples alone would draw others")
        few.parameters |= {id(p) for p in again.parameters()} | set(few.few.uses)
        if noted:
            raise Unfit(noted[0])
        if few.few.hidden:
            raise Unfit("it uses parameters where autograd is off (in a custom autograd.Function, say)")
        for tensor, owner in found:
            if tensor.requires_grad:
                _check_output(owner, few)
        return found

    def _cut(self, few: Few, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], list[tuple[Tensor, Owners]]]:
        """The arguments for the few examples, and whose the tensors in them are."""
        marked: list[tuple[Tensor, Owners]] = []

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            owners = self._marks.get(value)
            if owners is None:
                if value.requires_grad and not value.is_leaf:
                    raise Unfit("it is called with a tensor made of parameters")
                return value
            turns = Turns.of(owners, few.examples)
            if few.whole:
                part = value.detach().clone()
            elif turns is None:
                raise Unfit("it is called with tensors that do not have the examples in turn along one dimension")
            else:
                part = turns.cut(value.detach(), few.examples, few.chosen)
                owners = turns.owners(value.dim(), few.few.examples)
            marked.append((part.requires_grad_(value.requires_grad), owners))
            return part

        inside = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        if any(id(t) not in inside and self._marks.get(t) is not None for t in tensors_within((args, kwargs))):
            raise Unfit("the examples are in objects that cannot be taken apart")
        return tree_map(cut, (args, kwargs)), marked

    # -- backwards

    def _take(self, few: Few, out: Tensor, plain: Tensor, owners: Owners | None) -> bool:
        """Marks an output and asks for its gradient; False if it is not what it should be."""
        turns = None if few.whole else Turns.of(owners, few.few.examples)
        if few.whole and out.shape == plain.shape:
            self._marks.set(out, owners)
        elif turns is not None and turns.fits(out.shape, plain.shape, few.examples):
            self._marks.set(out, turns.owners(out.dim(), few.examples))
        else:
            return not out.requires_grad and not plain.requires_grad
        if out.requires_grad and plain.requires_grad:
            part = partial(turns.cut, examples=few.examples, chosen=few.chosen) if turns else Tensor.clone
            out.register_hook(partial(self._arrive, few, plain, part))
            return not self._unchecked or _close(part(out), plain)
        return out.requires_grad == plain.requires_grad

    def _arrive(self, few: Few, plain: Tensor, part: Callable[[Tensor], Tensor], delta: Tensor) -> None:
        if self._host.looks or OwnDerivatives.depth:
            return
        with unseen(), gradients_on(False):
            record = self._host.backward_pass(few)
            if few.record is None:
                few.record, self._fired = record, few
                record.unmeasured = True  # until it is
                torch_internals.at_the_end_of_backward(partial(self._finish, few))
            elif few.record is not record:
                raise RuntimeError(
                    "backward ran twice through one forward pass; the gradients of single examples add up before they "
                    "are squared, so call backward once on the sum of the losses"
                )
            few.arrived.append((plain, part(delta)))

    def receive(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Takes what arrives at a parameter, if it comes from compiled code."""
        few, key = self._fired, id(parameter)
        if few is None or few.record is None or few.lot.uses[key] or key not in few.parameters:
            return False
        few.record.add_whole(parameter, gradient, square=False)
        return True

    def _finish(self, few: Few) -> None:
        """Sends the gradients of the few examples back through the plain pass."""
        record, (outputs, deltas) = few.record, zip(*few.arrived, strict=True)
        assert record is not None
        few.arrived, self._fired, few.few.beside = [], None, record.beside(few.few.examples)
        if any(few.lot.uses[key] or key in few.lot.hidden for key in few.few.uses):
            self._give_up("parameters of it are used outside of it too")
        if self._unfit:
            return
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        try:
            with self._about(few), OwnDerivatives(), gradients_on(False):
                gradients = self._interceptor.differentiate(outputs, parameters, deltas)
            with unseen(), gradients_on(False):
                record.absorb(few.few.beside)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None and id(parameter) not in record.claimed and not is_zero(gradient):
                        raise Unfit("it uses parameters in a way that cannot be seen")
            record.unmeasured = False
        except Exception as error:  # said again, and at its place, where all of it runs as plain Python
            self._give_up(error)

    @contextmanager
    def _about(self, few: Few) -> Iterator[None]:
        """Within, the examples at hand are the few."""
        lot = self._marks.lot
        try:
            self.runs, self._marks.lot = True, few.few
            yield
        finally:
            self.runs, self._marks.lot = False, lot

    def spoil(self, why: str) -> None:
        """What compiled code was run for cannot be measured after all."""
        if self.open:
            self._give_up(why)

    @property
    def open(self) -> bool:
        """Whether compiled code was run for the examples at hand."""
        return self._few is not None and self._few.lot is self._marks.lot

    def forget(self) -> None:
        """Begins a new batch."""
        self._few = self._fired = None
        self.runs, self._host.mixing.noted = False, None  # should an interrupt have left them

    def _give_up(self, why: Exception | str) -> None:
        if not self._unfit:
            self._unfit = True
            told = why if isinstance(why, (str, Unfit)) else f"{type(why).__name__}: {why}"
            warnings.warn(
                f"the compiled model cannot be measured beside its compiled code: {told}. Steps that are measured run "
                "it as plain Python instead, which is right and slower",
                stacklevel=2,
            )


def _check_output(owners: Owners | None, few: Few) -> None:
    if owners is None:
        raise Unfit("an output does not depend on the examples")
    if owners.highest == SUM:
        raise Unfit("it returns a sum or a mean over examples, such as its own loss")
    if not owners.settled:
        raise Unfit(f"an output is not one example's ({owners.why})")
    if not few.whole and Turns.of(owners, few.few.examples) is None:
        raise Unfit("an output does not have the examples in turn along one dimension")


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= ROUNDING * other.abs().max().clamp(min=1e-12)) if one.numel() else True
