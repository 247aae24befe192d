"""A use: one call of an operation on examples and parameters, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cabs.variance.backward import BackwardPass
from cabs.variance.factors import PerExample, Positions
from cabs.variance.interception import Tap, saved_tensors_are_packed
from cabs.variance.invocations import Invocation
from cabs.variance.layout import Layout


class Meter(Protocol):
    """What a use reports to."""

    def measured(self, examples: int, cheap: bool) -> slice: ...

    def backward_pass(self, use: Use) -> BackwardPass: ...

    def expected_uses(self, parameter: Tensor) -> int: ...

    def where(self, use: Use) -> str: ...


class Use:
    """Makes the call with its taps in place, and measures it when its gradient arrives."""

    def __init__(self, meter: Meter, invocation: Invocation, layout: Layout, task: int) -> None:
        self.layout = layout
        self.task = task
        """The backward pass inside which this forward runs (recomputed activations), or -1."""
        self._meter = meter
        self._invocation = invocation
        self._origins: dict[Any, Origin] = {name: origin(invocation.values[name]) for name in invocation.parameters}
        self._pass: BackwardPass | None = None
        self._summed: set[Any] = set()

    @property
    def parameters(self) -> list[Tensor]:
        return [leaf for origin in self._origins.values() for leaf in origin.leaves]

    def forward(self) -> Any:
        values = self._invocation.values
        if self._differentiates():
            names = [name for name, value in values.items() if isinstance(value, Tensor)]
            return Differentiated.apply(self, names, *(values[name] for name in names))
        originals = {name: values[name] for name in self._invocation.parameters}
        if self._invocation.lowers_precision:
            self._lower_precision(values)
        if not self._invocation.sums_by_examples:
            for name, tensor in originals.items():
                values[name] = self._alias(name, tensor)
        output = self._invocation.call()
        kept = [values[name].detach() for name in self._invocation.kept]
        # Autograd keeps these or not, as it sees fit; a second reference would keep them all alive.
        values.update(dict.fromkeys(self._invocation.kept))
        values.update({name: tensor.detach() for name, tensor in originals.items()})
        self._check(output)
        if self._invocation.in_place or not (self._invocation.needs_tap or saved_tensors_are_packed()):
            output.register_hook(partial(self._backward_once, kept))
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        return Tap.apply(self.backward, len(outputs), *outputs, *kept)

    def _check(self, output: Any) -> None:
        if isinstance(output, Tensor) and not self.layout.holds(output) and not self.layout.holds_rows(output):
            raise ValueError(
                f"{self._meter.where(self)} gives a tensor of shape {tuple(output.shape)} for {self.layout.examples} "
                f"examples, which must run along dimension {self.layout.dim}: see batch_dim and count_examples of "
                "GradientVariance"
            )

    def _differentiates(self) -> bool:
        """Whether to do what autograd does: it is of use where both want the same, and plain reverse mode is simple."""
        if self._invocation.differentiated is None or self._invocation.in_place:
            return False
        device = self._invocation.values[self._invocation.parameters[0]].device.type
        return not (
            torch.is_autocast_enabled(device)
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        )

    def call(self) -> tuple[Any, list[Tensor]]:
        """Makes the call without a graph; also what is to be saved for ``differentiate``."""
        values = self._invocation.values
        output = self._invocation.call()
        self._check(output)
        saved = [values[name] for name in self._invocation.saved]
        values.update(dict.fromkeys(self._invocation.saved))
        return output, saved

    def differentiate(self, delta: Tensor, saved: Sequence[Tensor], wanted: Sequence[Any]) -> Mapping[Any, Tensor]:
        """The gradients of the wanted arguments; measures on the way, and takes sums that come out of that."""
        call = self._invocation
        assert call.differentiated is not None
        self._begin_backward()
        values = {**call.values, **dict(zip(call.saved, saved, strict=True))}
        call.values = {}
        with _full_precision(delta):
            sums: dict[Any, Tensor] = {}
            # A graph of the gradients needs them all from autograd's own operations.
            takes = () if torch.is_grad_enabled() else wanted
            with torch.no_grad():
                self._measure(delta, values, sums, takes)
            gradients = {**call.differentiated(delta, [name for name in wanted if name not in sums], **values), **sums}
            with torch.no_grad():
                for name in self._origins:
                    if name in gradients:
                        self._take_sum(name, gradients[name])
        return gradients

    def _backward_once(self, kept: list[Tensor], delta: Tensor) -> None:
        self.backward((delta,), kept)
        kept.clear()

    def _alias(self, name: Any, parameter: Tensor) -> Tensor:
        """The parameter under another name, whose gradient is that of this use alone."""
        if self._invocation.sparse:  # which views do not take
            return Tap.apply(lambda gradients, kept: self._take_sum(name, gradients[0]), 1, parameter)
        alias = parameter.view_as(parameter)
        alias.register_hook(partial(self._take_sum, name))
        return alias

    def _lower_precision(self, values: dict[Any, Any]) -> None:
        # Autocast would make its own narrow copy and keep that; made here, it is the one both keep.
        for name in self._invocation.kept:
            device = values[name].device.type
            if torch.is_autocast_enabled(device) and values[name].dtype == torch.float32:
                values[name] = values[name].to(torch.get_autocast_dtype(device))

    def backward(self, deltas: tuple[Tensor, ...], kept: Sequence[Tensor]) -> None:
        self._begin_backward()
        call = self._invocation
        values = {**call.values, **dict(zip(call.kept, kept, strict=True))}
        call.values = {}
        with torch.no_grad(), _full_precision(deltas[0]):
            self._measure(deltas if len(deltas) > 1 else deltas[0], values, {}, ())

    def _begin_backward(self) -> None:
        if self._pass is not None:
            raise RuntimeError(
                f"{self._meter.where(self)}: backward ran twice through one forward pass; the gradients of single "
                "examples add up before they are squared, so call backward once on the sum of the losses"
            )
        self._pass = self._meter.backward_pass(self)

    def _measure(self, delta: Any, values: Mapping[Any, Any], sums: dict[Any, Tensor], takes: Sequence[Any]) -> None:
        """Measures a use; of the arguments in ``takes`` it may find the gradient along with single examples'."""
        call, into, uses = self._invocation, self._pass, self._meter.expected_uses
        assert into is not None
        every = slice(None)
        chosen = self._meter.measured(self.layout.examples, call.cheap(delta))
        gradients = call.gradients(values, delta, self.layout, chosen)
        if call.sums_cheaply or call.sums_by_examples:
            whole = gradients if chosen == every else call.gradients(values, delta, self.layout, every)
            self._sum(whole, into)
        for name, origin in self._origins.items():
            leaf = origin.leaves[0]
            if name in takes and chosen == every and origin.direct and uses(leaf) == 1 and into.wants_norms(leaf):
                both = gradients[name].squared_norms_and_sum()
                if both is not None:
                    into.add_norms(leaf, both[0])
                    sums[name] = both[1].to(leaf.dtype)
                    continue
            for leaf, pulled in origin.pull_back(gradients[name]):
                into.add(leaf, pulled, uses(leaf))

    def _sum(self, gradients: Mapping[Any, PerExample], into: BackwardPass) -> None:
        """‖Σ_i G_i‖² from what the gradient is made of, where that beats reading the gradient or is the only way."""
        for name, origin in self._origins.items():
            leaf = origin.leaves[0]
            uses = self._meter.expected_uses(leaf)
            if self._invocation.sums_by_examples:
                into.add_sum(leaf, gradients[name].dense().sum(0), uses)
            elif origin.isometric and uses == 1 and not into.accumulates:
                square = gradients[name].squared_norm_of_sum()
                if square is not None:
                    into.add_square_of_sum(leaf, square)
                    self._summed.add(name)

    def _take_sum(self, name: Any, gradient: Tensor) -> None:
        """Takes Σ_i G_i as autograd computed it."""
        if self._pass is None:
            return
        origin = self._origins[name]
        self._pass.addresses.update(origin.address(gradient, self._meter.expected_uses))
        if name not in self._summed:
            for leaf, pulled in origin.pull_back_sum(gradient):
                self._pass.add_sum(leaf, pulled, self._meter.expected_uses(leaf))


class Differentiated(torch.autograd.Function):
    """A call whose gradients the use computes itself."""

    @staticmethod
    def forward(ctx: Any, use: Use, names: list[Any], *tensors: Tensor) -> Any:
        ctx.use, ctx.names = use, names
        output, saved = use.call()
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Any, ...]:
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if needed]
        gradients = ctx.use.differentiate(delta, ctx.saved_tensors, wanted)
        return None, None, *(gradients.get(name) for name in ctx.names)


def _full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


# Autograd's names for operations that only move numbers around: norms pass through them unchanged.
ISOMETRIES = {
    "AliasBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "UnsqueezeBackward0",
    "UnsafeViewBackward0", "ViewBackward0",
}  # fmt: skip


@dataclass
class Origin:
    """The trained parameters that a tensor is made of, and the way back to them.

    Attributes:
        tensor: what the operation uses.
        leaves: the parameters.
        isometric: whether a gradient has the same norm on both ends.
    """

    tensor: Tensor
    leaves: list[Tensor]
    isometric: bool

    @property
    def direct(self) -> bool:
        return self.leaves[0] is self.tensor

    def address(self, gradient: Tensor, expected_uses: Callable[[Tensor], int]) -> dict[int, int]:
        """Where the whole gradient of a parameter lies if nothing else contributes to it."""
        if not self.direct or gradient.is_sparse or expected_uses(self.tensor) != 1:
            return {}
        return {id(self.tensor): gradient.data_ptr()}

    def pull_back(self, gradients: PerExample) -> list[tuple[Tensor, PerExample]]:
        if self.direct:
            return [(self.leaves[0], gradients)]
        if self.isometric:
            return [(self.leaves[0], _Isometric(gradients, self))]
        pulled = self._vjp(gradients.dense(), batched=True)
        return [(leaf, Positions(gradient)) for leaf, gradient in zip(self.leaves, pulled, strict=True)]

    def pull_back_sum(self, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        if self.direct:
            return [(self.leaves[0], gradient)]
        return list(zip(self.leaves, self._vjp(gradient, batched=False), strict=True))

    def _vjp(self, gradient: Tensor, batched: bool) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(
                self.tensor,
                self.leaves,
                gradient.to(self.tensor.dtype),
                retain_graph=True,
                is_grads_batched=batched,
            )


class _Isometric(PerExample):
    """Gradients of a rearranged parameter: norms as they are, values taken back only when asked for."""

    def __init__(self, gradients: PerExample, origin: Origin) -> None:
        self._gradients, self._origin = gradients, origin
        self.examples = gradients.examples

    def __getitem__(self, examples: slice) -> _Isometric:
        return _Isometric(self._gradients[examples], self._origin)

    def squared_norms(self) -> Tensor:
        return self._gradients.squared_norms()

    def positionwise(self) -> Tensor:
        return self._gradients.positionwise()

    def dense(self) -> Tensor:
        return self._origin._vjp(self._gradients.dense(), batched=True)[0]


def origin(tensor: Tensor) -> Origin:
    """Follows autograd's graph from a tensor made of parameters alone to those parameters."""
    if tensor.is_leaf:
        return Origin(tensor, [tensor], isometric=True)
    leaves: list[Tensor] = []
    isometric = True
    pending, seen = [tensor.grad_fn], {tensor.grad_fn}
    while pending:
        node = pending.pop()
        assert node is not None
        if hasattr(node, "variable"):
            leaves.append(node.variable)
            continue
        isometric = isometric and node.name() in ISOMETRIES
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return Origin(tensor, leaves, isometric and len(leaves) == 1)
