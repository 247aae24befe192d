"""From a tensor made of parameters alone back to those parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cabs.interrupts import gradients_on
from cabs.torch_internals import is_custom, is_isometry, leaf_of, looks_up, notes_of, saved_by, storage_of
from cabs.variance.factors import PerExample, Positions
from cabs.variance.hollow import is_hollow_node
from cabs.variance.memory import Marks
from cabs.variance.own import Own
from cabs.variance.plain import DATA, MAKER
from cabs.variance.registry import OPERATIONS
from cabs.variance.rows import Rows
from cabs.variance.taps import OwnDerivatives

USE = "cabs_use"
"""Where autograd's node of a use's output says that it is one."""


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

    def pull_back(self, gradients: PerExample, rows: Rows, chosen: slice) -> list[tuple[Tensor, PerExample]]:
        """The gradients of the parameters, given those of the tensor."""
        if self.direct:
            return [(self.leaves[0], gradients)]
        if self.isometric:
            return [(self.leaves[0], _Isometric(gradients, self))]
        made = self._through_maker(gradients, chosen)
        if made is not None:
            return made
        pulled = self._vjp(gradients.dense(), batched=True)
        return [(leaf, Positions(gradient)) for leaf, gradient in zip(self.leaves, pulled, strict=True)]

    def _through_maker(self, gradients: PerExample, chosen: slice) -> list[tuple[Tensor, PerExample]] | None:
        """By the formula of the operation that made the tensor, if all of its other arguments are plain numbers."""
        maker = getattr(self.tensor, MAKER, None)
        if maker is None:
            return None
        function, args, kwargs = maker
        formula = OPERATIONS[function]
        values: dict[str, Any] = dict(zip(formula.names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        parameters = [name for name, value in tensors.items() if value.requires_grad]
        if len(parameters) != 1 or not formula.covers(values) or parameters[0] not in formula.needs:
            return None
        parameter = tensors[parameters[0]]
        carriers = [name for name in formula.needs[parameters[0]] if name in tensors]
        if not parameter.is_leaf or len(carriers) != 1 or any(name not in formula.names for name in kwargs):
            return None
        name = carriers[0]
        leading = formula.leading("delta", self.tensor, values)
        carrier_leading = formula.leading(name, tensors[name], values)
        if isinstance(gradients, Own):
            delta = gradients.rows.arrange(gradients.gradient, leading, chosen, zero=True)
            carrier = gradients.rows.arrange(tensors[name], carrier_leading, chosen)
        else:
            dense = gradients.dense()
            delta = dense.reshape(dense.shape[0], -1, *self.tensor.shape[leading:])
            rest = tensors[name].shape[carrier_leading:]
            carrier = tensors[name].reshape(1, -1, *rest).expand(dense.shape[0], -1, *rest)
        found = formula.function(delta, **{**values, name: carrier})
        return [(parameter, found[parameters[0]])]

    def rearrange(self, weights: Tensor) -> Tensor:
        """Numbers that belong to the elements of the one parameter, where the tensor, a view of it, has these."""
        leaf, tensor = self.leaves[0], self.tensor
        assert storage_of(leaf).data_ptr() == storage_of(tensor).data_ptr(), "an isometry is a view"  # type: ignore[union-attr]
        like = torch.empty_strided(leaf.shape, leaf.stride(), dtype=weights.dtype, device=weights.device).copy_(weights)
        return like.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - leaf.storage_offset())

    def pull_back_sum(self, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        if self.direct:
            return [(self.leaves[0], gradient)]
        return list(zip(self.leaves, self._vjp(gradient, batched=False), strict=True))

    def _vjp(self, gradient: Tensor, batched: bool) -> tuple[Tensor, ...]:
        gradient = gradient.to(self.tensor.dtype)

        def vjp(gradient: Tensor, batched: bool) -> tuple[Tensor, ...]:
            options = {"retain_graph": True, "is_grads_batched": batched}
            return torch.autograd.grad(self.tensor, self.leaves, gradient, **options)

        with OwnDerivatives(), gradients_on(True):
            if not batched:
                return vjp(gradient, False)
            try:
                return vjp(gradient, True)
            except RuntimeError:  # an operation that cannot be differentiated for all examples at once
                rows = [vjp(one, False) for one in gradient]
                return tuple(torch.stack(column) for column in zip(*rows, strict=True))


class _Isometric(PerExample):
    """Gradients of a rearranged parameter: norms as they are, values taken back only when asked for."""

    def __init__(self, gradients: PerExample, origin: Origin) -> None:
        self._gradients, self._origin = gradients, origin
        self.examples = gradients.examples

    def __getitem__(self, examples: slice) -> _Isometric:
        return _Isometric(self._gradients[examples], self._origin)

    def squared_norms(self, weights: Tensor | None = None) -> Tensor:
        return self._gradients.squared_norms(None if weights is None else self._origin.rearrange(weights))

    def positionwise(self, weights: Tensor | None = None) -> Tensor:
        return self._gradients.positionwise(None if weights is None else self._origin.rearrange(weights))

    def dense(self) -> Tensor:
        return self._origin._vjp(self._gradients.dense(), batched=True)[0]


def fed_with_data(tensor: Tensor, marks: Marks) -> list[Tensor]:
    """The parameters that a tensor without owners owes to layers on plain numbers, to examples or to hidden code."""
    found: dict[int, Tensor] = {}
    pending: list[tuple[Any, bool]] = [(tensor.grad_fn, False)]
    seen = set()
    while pending:
        node, fed = pending.pop()
        if node is None or (node, fed) in seen:
            continue
        seen.add((node, fed))
        leaf = leaf_of(node)
        if leaf is not None:
            if fed:
                found[id(leaf)] = leaf
            continue
        if is_hollow_node(node):
            continue
        fed = fed or DATA in notes_of(node) or is_custom(node) or _saves_data(node, marks)
        pending += [(following, fed) for following, _ in node.next_functions]
    return list(found.values())


def _saves_data(node: Any, marks: Marks) -> bool:
    """Whether a node keeps what is an example's; where no loader marked these, rows that were looked up may be."""
    unmarked = marks.lot is None or not marks.lot.given
    return (unmarked and looks_up(node)) or any(map(marks.get, saved_by(node)))


def made_of_parameters_alone(tensor: Tensor, is_parameter: Callable[[Tensor], bool]) -> bool:
    """Whether a tensor certainly holds nothing but what was made of some parameters, without any other numbers."""
    if tensor.is_leaf:
        return is_parameter(tensor)
    pending: list[Any] = [tensor.grad_fn]
    seen = {tensor.grad_fn}
    for node in pending:  # which grows on the way
        leaf = leaf_of(node)
        if is_custom(node) or {USE, DATA} & notes_of(node).keys() or not (leaf is None or is_parameter(leaf)):
            return False
        if leaf is None and any(not saved.requires_grad and saved.numel() > 1 for saved in saved_by(node)):
            return False
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return True


def origin_of(tensor: Tensor) -> Origin:
    """Follows autograd's graph from a tensor made of parameters alone to those parameters."""
    if tensor.is_leaf:
        return Origin(tensor, [tensor], isometric=True)
    leaves: list[Tensor] = []
    isometric = True
    pending, seen = [tensor.grad_fn], {tensor.grad_fn}
    while pending:
        node = pending.pop()
        assert node is not None
        leaf = leaf_of(node)
        if leaf is not None:
            leaves.append(leaf)
            continue
        if is_hollow_node(node):
            continue
        if USE in notes_of(node):
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} depends on the examples, but came out of code that cannot be "
                "followed (a derivative made with create_graph, scripted code, an extension): keep it out, or "
                "use estimator='microbatch'"
            )
        isometric = isometric and is_isometry(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return Origin(tensor, leaves, isometric and len(leaves) == 1)
