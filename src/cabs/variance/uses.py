"""A use: one call of an operation on examples and parameters, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cabs.interrupts import gradients_on
from cabs.torch_internals import base_of, notes_of, only_reverse_mode, saved_tensors_are_packed, unseen
from cabs.variance.backward import BackwardPass
from cabs.variance.factors import PerExample
from cabs.variance.invocations import Invocation
from cabs.variance.origins import USE, Origin, origin_of
from cabs.variance.own import Own
from cabs.variance.owners import Lot, Owners
from cabs.variance.rows import EVERY, Rows
from cabs.variance.taps import Differentiated, Tap, apart, before_node, tensors_of


class Record(Protocol):
    """What a use reports to."""

    @property
    def lot(self) -> Lot | None: ...

    def follow(self, function: Callable[[], Any]) -> Any: ...

    @property
    def looks(self) -> bool: ...

    def owners(self, tensor: Tensor) -> Owners | None: ...

    def own(self, tensor: Tensor, owners: Owners) -> None: ...

    def measured(self, examples: int, cheap: bool) -> slice: ...

    def backward_pass(self, use: Use) -> BackwardPass: ...

    def where(self, parameters: Sequence[Tensor]) -> str: ...


class Use:
    """Makes the call with its taps in place, and measures it when its gradient arrives."""

    def __init__(self, record: Record, invocation: Invocation, task: int) -> None:
        assert record.lot is not None
        self.lot = record.lot
        self.task = task
        """The backward pass inside which this forward runs (recomputed activations), or NO_BACKWARD."""
        self.part = record.lot.parts
        self.rows: Rows | None = None
        """Whose the output is; None if it is nobody's, so that this is no use at all."""
        self._record = record
        self._invocation = invocation
        self._origins: dict[Any, Origin] = {name: origin_of(invocation.values[name]) for name in invocation.parameters}
        self._measured_by_output = [name for name in self._origins if name not in invocation.adopted]
        self._pass: BackwardPass | None = None
        self._summed: set[Any] = set()

    @property
    def parameters(self) -> list[Tensor]:
        return [leaf for origin in self._origins.values() for leaf in origin.leaves]

    def forward(self) -> Any:
        values = self._invocation.values
        if self._differentiates():
            names = [name for name, value in values.items() if isinstance(value, Tensor)]
            output = Differentiated.apply(self, names, *(values[name] for name in names))
            self._own(output)
            return output
        originals = {name: values[name] for name in self._invocation.parameters}
        if self._invocation.lowers_precision:
            self._lower_precision(values)
        if not self._invocation.sums_by_examples:
            for name, tensor in originals.items():
                values[name] = self._alias(name, tensor)
        output = self._call()
        for name in originals:
            if base_of(values[name]) is not None:  # after the call: one that writes into it (max_norm) moves its hooks
                values[name].register_hook(partial(self._receive, name))
        kept = [values[name].detach() for name in self._invocation.kept]
        # Autograd keeps these or not, as it sees fit; a second reference would keep them all alive.
        values.update(dict.fromkeys(self._invocation.kept))
        values.update({name: tensor.detach() for name, tensor in originals.items()})
        outputs = tensors_of(output)
        if not any(out.requires_grad for out in outputs):
            return output  # a comparison, say, through which no gradient comes back
        self._own(*outputs)
        if self.rows is None and self._invocation.adopted and not self._measured_by_output:
            self.rows = Rows(next(iter(self._invocation.adopted.values())), self.lot)
        if self.rows is None or not self._measured_by_output:
            return output
        if len(outputs) > 1 and not self._invocation.needs_tap:
            raise NotImplementedError(
                f"{self.where}: an operation with several outputs cannot be measured: use estimator='microbatch'"
            )
        if not (self._invocation.needs_tap or saved_tensors_are_packed()):
            self._hook(outputs[0], kept)
            return output
        return Tap.apply(self.backward, len(outputs), *outputs, *kept)

    def _call(self) -> Any:
        if not self._invocation.knows_owners:
            return self._record.follow(self._invocation.call)
        output = self._invocation.call()
        outputs = tensors_of(output)
        for out, owners in zip(outputs, self._invocation.mark(outputs), strict=True):
            self._record.own(out, owners)
        return output

    @property
    def where(self) -> str:
        return self._record.where(self.parameters)

    def _own(self, *outputs: Tensor) -> None:
        for output in outputs:
            owners = self._record.owners(output)
            if owners is not None:
                self.rows = self.rows or Rows(owners, self.lot)
                if output.grad_fn is not None:
                    notes_of(output.grad_fn)[USE] = True

    def _hook(self, output: Tensor, kept: list[Tensor]) -> None:
        """Asks for the gradient of the output as it is now, whatever is written into it later."""
        base = base_of(output)
        if base is None or base.grad_fn is None or base.numel() != output.numel() or self._invocation.sums_by_examples:
            before_node(output, partial(self._backward_once, kept))
            return
        # A view of memory of its own, as products of more than two dimensions are: what is written into a view gives it
        # another place in autograd's graph, and takes hooks away from it, but not from what it is a view of.
        size, stride, skipped = output.size(), output.stride(), output.storage_offset() - base.storage_offset()
        strides = base.stride()

        def hook(delta: Tensor) -> None:
            with unseen():
                if delta.stride() != strides:
                    laid_out = torch.empty_strided(delta.size(), strides, dtype=delta.dtype, device=delta.device)
                    delta = laid_out.copy_(delta)
                self._backward_once(kept, delta.as_strided(size, stride, delta.storage_offset() + skipped))

        before_node(base, hook)

    def _differentiates(self) -> bool:
        """Whether to do what autograd does: it is of use where both want the same, and plain reverse mode is simple."""
        if self._invocation.differentiated is None:
            return False
        device = self._invocation.values[self._invocation.parameters[0]].device.type
        return not torch.is_autocast_enabled(device) and only_reverse_mode()

    def call(self) -> tuple[Any, list[Tensor]]:
        """Makes the call without a graph; also what is to be saved for ``differentiate``."""
        values = self._invocation.values
        output = self._call()
        saved = [values[name] for name in self._invocation.saved]
        values.update(dict.fromkeys(self._invocation.saved))
        return output, saved

    def differentiate(self, delta: Tensor, saved: Sequence[Tensor], wanted: Sequence[Any]) -> Mapping[Any, Tensor]:
        """The gradients of the wanted arguments; measures on the way, and takes sums that come out of that."""
        call = self._invocation
        assert call.differentiated is not None
        values = {**call.values, **dict(zip(call.saved, saved, strict=True))}
        if self._record.looks:
            return call.differentiated(delta, wanted, **values)
        self._begin_backward()
        call.values = {}
        with apart(delta):
            sums: dict[Any, Tensor] = {}
            # A graph of the gradients needs them all from autograd's own operations.
            takes = () if torch.is_grad_enabled() else wanted
            with gradients_on(False):
                self._measure(delta, values, sums, takes)
            gradients = {**call.differentiated(delta, [name for name in wanted if name not in sums], **values), **sums}
            with gradients_on(False):
                for name in self._origins:
                    if name in gradients:
                        self._take_sum(name, gradients[name])
        return gradients

    def _backward_once(self, kept: list[Tensor], delta: Tensor) -> None:
        if not self._record.looks:
            self.backward((delta,), kept)
            kept.clear()

    def _alias(self, name: Any, parameter: Tensor) -> Tensor:
        """The parameter under another name, whose gradient is that of this use alone."""
        if self._invocation.sparse or parameter.is_sparse:  # which views do not take
            return Tap.apply(lambda gradients, kept: self._receive(name, gradients[0]), 1, parameter)
        return parameter.view_as(parameter)

    def _receive(self, name: Any, gradient: Tensor) -> None:
        """Takes what arrives at a parameter from this use alone."""
        if self.rows is None or self._record.looks:
            return
        with apart(gradient), gradients_on(False):
            if name in self._invocation.adopted:
                self._begin_backward(again=True)
                self._measure_adopted(name, gradient)
            self._take_sum(name, gradient)

    def _measure_adopted(self, name: Any, gradient: Tensor) -> None:
        assert self._pass is not None
        rows = Rows(self._invocation.adopted[name], self.lot)
        self._refuse_strays(gradient, rows)
        chosen = self._record.measured(self.lot.examples, False)
        for leaf, pulled in self._origins[name].pull_back(Own(gradient, rows, chosen), rows, chosen):
            self._pass.add(leaf, pulled, self._uses(leaf))

    def _lower_precision(self, values: dict[Any, Any]) -> None:
        # Autocast would make its own narrow copy and keep that; made here, it is the one both keep.
        for name in self._invocation.kept:
            device = values[name].device.type
            if torch.is_autocast_enabled(device) and values[name].dtype == torch.float32:
                values[name] = self._record.follow(partial(values[name].to, torch.get_autocast_dtype(device)))

    def backward(self, deltas: tuple[Tensor, ...], kept: Sequence[Tensor]) -> None:
        if self._record.looks:
            return
        self._begin_backward()
        call = self._invocation
        values = {**call.values, **dict(zip(call.kept, kept, strict=True))}
        call.values = {}
        with apart(deltas[0]), gradients_on(False):
            self._measure(deltas if len(deltas) > 1 else deltas[0], values, {}, ())

    def _begin_backward(self, again: bool = False) -> None:
        if self._pass is not None and not again:
            raise RuntimeError(
                f"{self.where}: backward ran twice through one forward pass; the gradients of single "
                "examples add up before they are squared, so call backward once on the sum of the losses"
            )
        self._pass = self._record.backward_pass(self)

    def _measure(self, delta: Any, values: Mapping[Any, Any], sums: dict[Any, Tensor], takes: Sequence[Any]) -> None:
        """Measures a use; of the arguments in ``takes`` it may find the gradient along with single examples'."""
        call, into, uses, rows = self._invocation, self._pass, self._uses, self.rows
        assert into is not None
        assert rows is not None
        self._refuse_strays(delta, rows)
        chosen = self._record.measured(rows.examples, call.cheap(delta, rows))
        gradients = call.gradients(values, delta, rows, chosen)
        if call.sums_cheaply or call.sums_by_examples:
            whole = gradients if chosen == EVERY else call.gradients(values, delta, rows, EVERY)
            self._sum(whole, into)
        for name in self._measured_by_output:
            origin = self._origins[name]
            leaf = origin.leaves[0]
            if name in takes and chosen == EVERY and origin.direct and uses(leaf) == 1 and into.wants_norms(leaf):
                both = gradients[name].squared_norms_and_sum(into.weights(leaf))
                if both is not None:
                    into.add_norms(leaf, both[0])
                    sums[name] = both[1].to(leaf.dtype)
                    continue
            for leaf, pulled in origin.pull_back(gradients[name], rows, chosen):
                into.add(leaf, pulled, uses(leaf))

    def _uses(self, parameter: Tensor) -> int:
        return self.lot.uses[id(parameter)]

    def _refuse_strays(self, delta: Any, rows: Rows) -> None:
        if rows.owners.settled or (isinstance(delta, Tensor) and not rows.strays(delta)):
            return
        raise RuntimeError(
            f"{self.where} cannot be measured: {rows.why_not}; estimator='microbatch' measures any model"
        )

    def _sum(self, gradients: Mapping[Any, PerExample], into: BackwardPass) -> None:
        """‖Σ_i G_i‖² from what the gradient is made of, where that beats reading the gradient or is the only way."""
        for name, origin in self._origins.items():
            leaf = origin.leaves[0]
            uses = self._uses(leaf)
            if self._invocation.sums_by_examples:
                into.add_sum(leaf, gradients[name].dense().sum(0), uses)
            elif origin.isometric and uses == 1 and into.sums_by_grams:
                square = gradients[name].squared_norm_of_sum()
                if square is not None:
                    into.add_square_of_sum(leaf, square)
                    self._summed.add(name)

    def _take_sum(self, name: Any, gradient: Tensor) -> None:
        """Takes Σ_i G_i as autograd computed it."""
        if self._pass is None:
            return
        squared = name in self._summed
        for leaf, pulled in self._origins[name].pull_back_sum(gradient):
            self._pass.add_sum(leaf, pulled, self._uses(leaf), squared)
