"""Compiled models: what is measured runs beside them.

Compiled code cannot be looked into, and is to keep its speed. So before it runs, a few of its examples go through the
module as plain Python, where every use of a parameter is seen; it then runs untouched, and the gradients that come back
to its outputs are noted. When the backward pass has ended, those of the few examples go back through the plain pass:
that gives their ‖G_i‖². The gradient of the whole batch is what arrives at the parameters.

It holds if an example's outputs depend on nothing but that example, in a way that the plain pass shows. Wherever it does
not show that, the measured steps run the model as plain Python, as a whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cabs import torch_compiler
from cabs.hooks import Hook
from cabs.interrupts import gradients_on
from cabs.torch_internals import NO_BACKWARD, at_the_end_of_backward, hooks_of, tree_leaves, tree_map, unseen
from cabs.variance.backward import BackwardPass
from cabs.variance.inputs import tensors_within
from cabs.variance.memory import Marks
from cabs.variance.mixing import Mixing
from cabs.variance.owners import SUM, Lot, Owners
from cabs.variance.probing import as_before, callable_again
from cabs.variance.taps import OwnDerivatives

ROUNDING = 0.05
"""How far outputs may be apart, relative to the largest: compiled code in half precision rounds in other places."""


class Unfit(Exception):
    """Why a module cannot be measured beside its compiled code."""


class Host(Protocol):
    """Whose examples these are."""

    mixing: Mixing
    looks: bool

    def backward_pass(self, use: Any) -> BackwardPass:
        """The record of the backward pass that runs now."""

    def beside(self, examples: int) -> slice | None:
        """Which of so many examples to run; None if nothing is to be measured beside."""


@dataclass(frozen=True)
class Rows:
    """Where the examples are in a tensor: along one dimension, all in turn, each ``repeats`` times, ``times`` over."""

    dim: int
    times: int
    repeats: int

    @classmethod
    def of(cls, owners: Owners | None, examples: int) -> Rows | None:
        """None if that is not how it is, or there is nothing to tell by."""
        pattern = None if owners is None or not owners.varying else owners.pattern(examples)
        return None if owners is None or pattern is None else cls(owners.varying[0], *pattern)

    def ids(self, examples: int) -> Tensor:
        """The example of each place."""
        return torch.arange(examples).view(1, -1, 1).expand(self.times, -1, self.repeats).flatten()

    def some(self, tensor: Tensor, examples: int, chosen: slice) -> Tensor:
        """The places of some of the examples."""
        places = torch.arange(self.times * examples * self.repeats).view(self.times, examples, self.repeats)
        return tensor.index_select(self.dim, places[:, chosen].flatten().to(tensor.device))

    def fits(self, shape: torch.Size, few: torch.Size, examples: int) -> bool:
        """Whether a shape is that of a few examples, with all of them."""
        here, there = list(shape), list(few)
        if len(here) != len(there):
            return False
        there[self.dim] = self.times * self.repeats * examples
        return here == there


@dataclass
class Call:
    """One call of compiled code; ``plain`` is what the few examples gave, outside of it."""

    module: nn.Module
    plain: list[Tensor]
    owners: list[Owners | None]


class Few:
    """The few examples of one lot, and what was noted of them.

    Attributes:
        lot: all the examples.
        chosen: which of them these are.
        few: the lot of these.
        task: here a use and a measurement beside are alike: NO_BACKWARD.
    """

    task = NO_BACKWARD
    where = "compiled code"

    def __init__(self, lot: Lot, chosen: slice) -> None:
        self.lot, self.chosen = lot, chosen
        self.part = lot.parts
        self.few = Lot(len(range(lot.examples)[chosen]), given=True)
        self.record: BackwardPass | None = None
        """Of the backward pass through all examples."""
        self.norms: BackwardPass | None = None
        """Of that of the few."""
        self.arrived: list[tuple[Tensor, Tensor]] = []
        """Plain outputs, and the gradients that belong to them."""

    @property
    def whole(self) -> bool:
        return self.few.examples == self.lot.examples


class Beside:
    """Measures compiled code by what a few examples show outside of it.

    Args:
        host: whose examples these are.
        marks: the owners of tensors.
        parameters: those that are trained.
        check: whether to compare, once, what the few examples give alone and in the batch.
    """

    def __init__(self, host: Host, marks: Marks, parameters: Callable[[], list[Tensor]], check: bool) -> None:
        self._host, self._marks, self._parameters = host, marks, parameters
        self._unchecked = check
        self.runs = False
        """Whether a pass of the few examples is being made."""
        self._unfit = False
        self._few: Few | None = None
        self._call: Call | None = None
        self._random = False

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Runs the few examples. Compiled code may follow if this tells all that has to be known."""
        lot = self._marks.lot
        chosen = None if lot is None or self._unfit else self._host.beside(lot.examples)
        if lot is None or chosen is None:
            return False
        if self._few is None or self._few.lot is not lot:
            self._few = Few(lot, chosen)
        try:
            if any(not isinstance(hook, Hook) for p in self._parameters() for hook in hooks_of(p)):
                raise Unfit("hooks of others on its parameters may change gradients")
            self._call = self._run(self._few, module, args, kwargs)
        except Exception as error:  # whatever the model raises: it was not made to be called like this
            self._give_up(module, str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}")
            return False
        return True

    def leave(self, output: Any) -> None:
        """Marks what came of the compiled code, and notes the gradients that come back to it."""
        call, few = self._call, self._few
        self._call = None
        if call is None or few is None or few.lot is not self._marks.lot:
            return
        with unseen(), gradients_on(False):
            outputs = tensors_within(output)
            alike = len(outputs) == len(call.plain)
            for out, plain, owners in zip(outputs, call.plain, call.owners, strict=False):
                alike = alike and self._take(few, out, plain, owners)
        if not alike:
            self._give_up(call.module, "its outputs for a few examples are not those that they have in the batch")

    # -- the few examples, forwards

    def _run(self, few: Few, module: nn.Module, args: Any, kwargs: Any) -> Call:
        with unseen():
            (args, kwargs), marked = self._cut(few, args, kwargs)
            again = callable_again(module)
        lot, noted = self._marks.lot, self._host.mixing.noted
        try:
            self.runs, self._marks.lot, self._host.mixing.noted = True, few.few, []
            with unseen():
                for tensor, owners in marked:
                    self._marks.set(tensor, owners)
            with torch_compiler.plain_python(self), as_before(again) as random:
                output = again(*args, **kwargs)
            self._random = random()
            tensors = tensors_within(output)
            owners = [self._marks.get(tensor) for tensor in tensors]
            mixtures = self._host.mixing.noted
        finally:
            self.runs, self._marks.lot, self._host.mixing.noted = False, lot, noted
        if mixtures:
            raise Unfit(mixtures[0])
        if few.few.hidden:
            raise Unfit("it uses parameters where autograd is off (in a custom autograd.Function, say)")
        for tensor, owner in zip(tensors, owners, strict=True):
            if tensor.requires_grad:
                _check_output(tensor, owner, few.few.examples, few.whole)
        return Call(module, tensors, owners)

    def _cut(self, few: Few, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], list[tuple[Tensor, Owners]]]:
        """The arguments for the few examples, and whose the tensors in them are."""
        examples, marked = few.lot.examples, list[tuple[Tensor, Owners]]()

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            owners = self._marks.get(value)
            if owners is None:
                if value.requires_grad and not value.is_leaf:
                    raise Unfit("it is called with a tensor made of parameters")
                return value
            rows = Rows.of(owners, examples)
            if few.whole:
                part = value.detach().clone()
            elif rows is None:
                raise Unfit("it is called with tensors that do not have the examples in turn along one dimension")
            else:
                part = rows.some(value.detach(), examples, few.chosen)
                owners = Owners.along(rows.dim, value.dim(), rows.ids(few.few.examples))
            marked.append((part.requires_grad_(value.requires_grad), owners))
            return part

        inside = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        if any(id(t) not in inside and self._marks.get(t) is not None for t in tensors_within((args, kwargs))):
            raise Unfit("the examples are in objects that cannot be taken apart")
        return tree_map(cut, (args, kwargs)), marked

    # -- backwards

    def _take(self, few: Few, out: Tensor, plain: Tensor, owners: Owners | None) -> bool:
        """Marks an output and asks for its gradient; False if it is not what it should be."""
        rows = None if few.whole else Rows.of(owners, few.few.examples)
        if few.whole and out.shape == plain.shape:
            self._marks.set(out, owners)
        elif rows is not None and rows.fits(out.shape, plain.shape, few.lot.examples):
            self._marks.set(out, Owners.along(rows.dim, out.dim(), rows.ids(few.lot.examples)))
        else:
            return not out.requires_grad and not plain.requires_grad
        if out.requires_grad != plain.requires_grad:
            return False
        if out.requires_grad:
            part = partial(rows.some, examples=few.lot.examples, chosen=few.chosen) if rows else Tensor.clone
            out.register_hook(partial(self._arrive, few, plain, part))
            if self._unchecked and not self._random:
                return _close(part(out), plain)
        return True

    def _arrive(self, few: Few, plain: Tensor, part: Callable[[Tensor], Tensor], delta: Tensor) -> None:
        if self._host.looks or OwnDerivatives.depth or few is not self._few:
            return
        with unseen(), gradients_on(False):
            record = self._host.backward_pass(few)
            if few.record is None:
                few.record = record
                record.unmeasured = True  # until it is
                at_the_end_of_backward(partial(self._finish, few))
            elif few.record is not record:
                raise RuntimeError(
                    "backward ran twice through one forward pass; the gradients of single examples add up before they "
                    "are squared, so call backward once on the sum of the losses"
                )
            few.arrived.append((plain, part(delta)))

    def receive(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Takes what arrives at a parameter, if it comes from compiled code."""
        few = self._few
        if few is None or few.record is None or not few.few.uses[id(parameter)]:
            return False
        few.record.add_whole(parameter, gradient, square=False)
        return True

    def _finish(self, few: Few) -> None:
        """Sends the gradients of the few examples back through the plain pass."""
        record, (outputs, deltas) = few.record, zip(*few.arrived, strict=True)
        few.arrived = []
        assert record is not None
        few.norms = record.beside(few.few.examples)
        shared = {key for key in few.few.uses if few.lot.uses[key]} | (few.lot.hidden & set(few.few.uses))
        if shared:
            self.spoil("parameters of it are used outside of it too")
        if few is not self._few or self._unfit:
            return
        try:
            with OwnDerivatives(), unseen(), gradients_on(False):
                torch.autograd.grad(outputs, self._parameters(), deltas, allow_unused=True)
                record.absorb(few.norms)
            record.unmeasured = False
        except Exception as error:  # said again, and at its place, where all of it runs as plain Python
            self.spoil(f"{type(error).__name__}: {error}")

    def spoil(self, why: str) -> None:
        """What compiled code was run for since the batch began cannot be measured."""
        if self._few is not None and not self._unfit:
            self._give_up(None, why)

    def norms_of(self, lot: Lot) -> BackwardPass | None:
        """Where to write the norms of the few examples, if these are they."""
        return self._few.norms if self._few is not None and self._few.few is lot else None

    @property
    def open(self) -> bool:
        """Whether compiled code was run for the examples at hand."""
        return self._few is not None and self._few.lot is self._marks.lot

    def forget(self) -> None:
        """Begins a new batch."""
        self._few = self._call = None

    def _give_up(self, module: nn.Module | None, why: str) -> None:
        self._unfit = True
        name = "a compiled model" if module is None else f"compiled {type(module).__name__}"
        warnings.warn(
            f"{name} is not measured beside its compiled code, since {why}. Steps that are measured run it uncompiled: "
            "right, and slower",
            stacklevel=2,
        )


def _check_output(tensor: Tensor, owners: Owners | None, examples: int, whole: bool) -> None:
    if owners is None:
        raise Unfit("an output does not depend on the examples")
    if owners.highest == SUM:
        raise Unfit("it returns a sum or a mean over examples, such as its own loss")
    if not owners.settled:
        raise Unfit(f"an output is not one example's ({owners.why})")
    if not whole and Rows.of(owners, examples) is None:
        raise Unfit("an output does not have the examples in turn along one dimension")


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= ROUNDING * other.abs().max().clamp(min=1e-12)) if one.numel() else True
