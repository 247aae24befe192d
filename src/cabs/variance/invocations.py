"""Operations with their arguments by name: called once forward, asked for gradients once backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from cabs.interrupts import gradients_on
from cabs.torch_internals import tree_flatten, tree_leaves, tree_unflatten
from cabs.variance.adoption import ADOPTIONS, OwnersOf
from cabs.variance.factors import PerExample, Positions
from cabs.variance.moves.elementwise import is_elementwise
from cabs.variance.owners import Owners, join
from cabs.variance.registry import INVOCATIONS, LAYERS, OPERATIONS, OperationRule
from cabs.variance.rows import Rows


class Invocation:
    """An operation about to be called.

    Attributes:
        values: the arguments by name; the caller may replace some before ``call``.
        parameters: names of the arguments that are parameters or made of parameters.
        adopted: those of them of which every element meets the elements of one example only, with whose they are.
        kept: names of the arguments that the gradients of single examples are made of.
        lowers_precision: whether autocast runs the operation in half precision.
        sums_cheaply: whether ‖Σ_i g_i‖² may be cheaper than reading the gradient of the sum.
        sums_by_examples: whether Σ_i g_i is the sum of what ``gradients`` gives, no other gradient being seen.
        knows_owners: whether ``mark`` says whose the outputs are; else the operation is followed.
        sparse: whether the gradients of its parameters are sparse tensors.
        needs_tap: whether a hook on the output will not do: there are several.
        differentiated: what autograd would do, ``(delta, wanted, **values)`` to gradients by name, if that can be done
            here, with ``saved`` for the names of what it takes.
    """

    values: dict[Any, Any]
    parameters: list[Any]
    kept: list[Any]
    adopted: Mapping[Any, Owners] = {}
    lowers_precision = False
    sums_cheaply = False
    sums_by_examples = False
    knows_owners = False
    sparse = False
    needs_tap = False
    differentiated: Callable[..., Mapping[str, Tensor]] | None = None
    saved: Sequence[Any] = ()

    def cheap(self, delta: Any, rows: Rows) -> bool:
        """Whether measuring all examples costs next to nothing."""
        return False

    def call(self) -> Any:
        raise NotImplementedError

    def mark(self, outputs: Sequence[Tensor]) -> list[Owners]:
        """Whose the outputs are, for operations with ``knows_owners``."""
        raise NotImplementedError

    def gradients(self, values: Mapping[Any, Any], delta: Any, rows: Rows, chosen: slice) -> Mapping[Any, PerExample]:
        """The gradients of the chosen examples by argument name, given the gradient of the output (or outputs)."""
        raise NotImplementedError


class Ruled(Invocation):
    """An operation with a formula of its own."""

    def __init__(
        self,
        function: Callable[..., Any],
        rule: OperationRule,
        values: dict[str, Any],
        places: int,
        parameters: list[str],
        carriers: Mapping[str, Owners],
    ) -> None:
        self._function, self._rule, self._places = function, rule, places
        self.values = values
        self.parameters = parameters
        self.sparse = bool(values.get("sparse"))
        self.lowers_precision = rule.lowers_precision
        self.sums_cheaply = rule.sums_cheaply
        needed = {name for parameter in parameters for name in rule.needs[parameter]}
        self.kept = [name for name, value in self.values.items() if name in needed and isinstance(value, Tensor)]
        self._carriers = [name for name in carriers if name in needed]
        self._owners = carriers
        self.knows_owners = len(carriers) == 1
        self._optional = {name for names in rule.needs.values() for name in names} - needed
        if rule.differentiated is not None:
            self.differentiated = rule.differentiated
            added = [name for name in parameters if not rule.needs[name]]
            self.saved = [name for name, value in values.items() if isinstance(value, Tensor) and name not in added]

    def mark(self, outputs: Sequence[Tensor]) -> list[Owners]:
        """An output has rows where the one argument that holds examples has them."""
        ((name, owners),) = self._owners.items()
        output, leading = outputs[0], self._rule.leading
        rows = owners.table.shape[: leading(name, self.values[name], self.values)]
        rest = (1,) * (output.dim() - leading("delta", output, self.values))
        shape = rows + rest
        if owners.table.shape == shape:
            return [owners]
        return [owners.derived(shape, lambda: Owners(owners.table.reshape(shape), owners.why))]

    def cheap(self, delta: Tensor, rows: Rows) -> bool:
        return self._rule.cheap and rows.one_each(delta, self._rule.leading("delta", delta, {}))

    def call(self) -> Any:
        items = list(self.values.items())
        return self._function(*(value for _, value in items[: self._places]), **dict(items[self._places :]))

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, rows: Rows, chosen: slice
    ) -> Mapping[Any, PerExample]:
        arguments = dict(values)
        arguments.update(dict.fromkeys(self._optional))
        arguments = self._rule.prepare(arguments)
        leading = self._rule.leading
        arranged = rows.arrange(delta, leading("delta", delta, values), chosen, zero=True)
        for name in self._carriers:
            value = arguments[name]
            arguments[name] = rows.arrange(value, leading(name, value, values), chosen)
        return self._rule.function(arranged, **arguments)


class Layer(Invocation):
    """A layer with a formula of its user's making, after it has run."""

    sums_by_examples = True

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor, owners: OwnersOf) -> None:
        self._layer = layer
        self._output: Tensor | None = output
        own = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        self.parameters = list(own)
        inputs = {index: value for index, value in enumerate(args) if isinstance(value, Tensor)}
        self.kept = list(inputs)
        self.values = {**own, **inputs}
        self._owned = {index for index, value in inputs.items() if owners(value) is not None}
        self._args = tuple(None if index in inputs else value for index, value in enumerate(args))

    def call(self) -> Tensor:
        output, self._output = self._output, None  # the graph owns it from here on
        assert output is not None
        return output

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, rows: Rows, chosen: slice
    ) -> Mapping[Any, PerExample]:
        inputs = tuple(
            values[index][chosen] if index in self._owned else values.get(index, value)
            for index, value in enumerate(self._args)
        )
        gradients = LAYERS[type(self._layer)](self._layer, inputs, delta[chosen])
        for name in self.parameters:
            expected = (len(rows.chosen(chosen)), *values[name].shape)
            if name not in gradients or tuple(gradients[name].shape) != expected:
                got = tuple(gradients[name].shape) if name in gradients else "nothing"
                raise RuntimeError(
                    f"the formula of {type(self._layer).__name__} must give {name!r} a gradient for each example, "
                    f"shape {expected}, and gave {got}"
                )
        return {name: Positions(gradients[name]) for name in self.parameters}


class Replayed(Invocation):
    """Any operation at all, its arguments known by their place: called again, and differentiated for every example.

    Exact, and slow. What is adopted needs none of that.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: list[int],
        adopted: Mapping[int, Owners],
    ) -> None:
        self._function = function
        leaves, self._structure = tree_flatten((args, kwargs))
        self.values = dict(enumerate(leaves))
        self.parameters = parameters
        self.adopted = adopted
        self._chance = torch.get_rng_state()
        self.kept = [
            name for name, value in self.values.items() if isinstance(value, Tensor) and name not in parameters
        ]
        if not self._replayed:
            self.kept = []

    @property
    def _replayed(self) -> list[int]:
        return [name for name in self.parameters if name not in self.adopted]

    def call(self) -> Any:
        return self._apply(self.values)

    def _apply(self, values: Mapping[Any, Any]) -> Any:
        args, kwargs = tree_unflatten(list(values.values()), self._structure)
        return self._function(*args, **kwargs)

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, rows: Rows, chosen: slice
    ) -> Mapping[Any, PerExample]:
        with gradients_on(True), torch.random.fork_rng():
            torch.set_rng_state(self._chance)  # dropout within the operation drops the same again
            again = {name: values[name].detach().requires_grad_() for name in self._replayed}
            output = self._apply({**values, **again})
        found: list[tuple[Tensor, ...]] = []
        for example in rows.chosen(chosen):
            mine = delta.masked_fill(~rows.mask(example, delta.device), 0)
            found.append(
                torch.autograd.grad(
                    output,
                    list(again.values()),
                    mine,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        return {
            name: Positions(torch.stack(column)) for name, column in zip(again, zip(*found, strict=True), strict=True)
        }


class Adopted(Invocation):
    """A parameter that is written to where examples are, or laid beside them."""

    def __init__(self, value: Tensor, owners: Owners) -> None:
        self.values = {"value": value}
        self.parameters = ["value"]
        self.kept = []
        self.adopted = {"value": owners}

    def call(self) -> Tensor:
        return cast(Tensor, self.values["value"])


class Elementwise(Replayed):
    """An operation that broadcasts parameters over the examples: each example gets its own copy of them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _, args, kwargs, *_ = arguments
        self._adds = self._function in ADDITIONS and len(args) == 2 and set(kwargs) <= {"alpha"}
        if self._adds:
            self.kept = []  # autograd keeps no summand, so neither may this

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, rows: Rows, chosen: slice
    ) -> Mapping[Any, PerExample]:
        count = delta.dim()
        shapes = {name: values[name].shape for name in self._replayed}

        def first(value: Tensor) -> Tensor:
            return rows.first(value.reshape((1,) * (count - value.dim()) + value.shape), chosen)

        mine = rows.first(delta, chosen, zero=True)
        if self._adds:
            return {name: self._summand(name, values, mine, first(values[name])) for name in self._replayed}
        values = {name: first(v) if isinstance(v, Tensor) else v for name, v in values.items()}
        copies = {
            name: values[name].detach().expand(mine.shape[0], *values[name].shape[1:]).requires_grad_()
            for name in self._replayed
        }
        with gradients_on(True):
            output = self._apply({**values, **copies})
        found = torch.autograd.grad(output, list(copies.values()), mine, allow_unused=True, materialize_grads=True)
        return {name: Positions(g, (), shapes[name]) for name, g in zip(copies, found, strict=True)}

    def _summand(self, name: int, values: Mapping[Any, Any], delta: Tensor, value: Tensor) -> PerExample:
        """The gradients of something added to the examples, or taken from them."""
        alpha = next((v for v in list(values.values())[2:] if not isinstance(v, Tensor) and v is not None), 1)
        factor = ADDITIONS[self._function] * alpha if name == 1 else 1
        over = [d for d in range(1, delta.dim()) if value.shape[d] == 1 and delta.shape[d] != 1]
        return Positions(delta if factor == 1 else factor * delta, over, values[name].shape)


ADDITIONS = dict.fromkeys([torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__], 1) | dict.fromkeys(
    [torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract], -1
)
"""Sums and differences, with the sign of what comes second."""


def invocation(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owners: OwnersOf
) -> Invocation:
    """The call in the form that measures it most cheaply, or replayed where nothing else fits."""

    def is_parameter(value: Any) -> bool:
        return isinstance(value, Tensor) and value.requires_grad and value.numel() > 0 and owners(value) is None

    if function in INVOCATIONS:
        return cast(Invocation, INVOCATIONS[function](function, args, kwargs, owners))
    rule = OPERATIONS.get(function)
    if rule is not None:
        values = dict(zip(rule.names, args, strict=False)) | kwargs
        parameters = [name for name, value in values.items() if is_parameter(value)]
        known = all(name in rule.needs for name in parameters) and all(name in rule.names for name in kwargs)
        complex = any(isinstance(value, Tensor) and value.is_complex() for value in values.values())
        if known and not complex and rule.covers(values):
            found = {name: owners(value) for name, value in values.items() if isinstance(value, Tensor)}
            carriers = {name: owner for name, owner in found.items() if owner is not None}
            if all(_rows_only(owner, rule.leading(name, values[name], values)) for name, owner in carriers.items()):
                return Ruled(function, rule, values, len(args), parameters, carriers)
    leaves = tree_leaves((args, kwargs))
    numbers = [number for number, value in enumerate(leaves) if is_parameter(value)]
    if works_elementwise(function):
        return _elementwise(function, args, kwargs, leaves, numbers, owners)
    adopted = {}
    if function in ADOPTIONS:
        tables = ADOPTIONS[function](leaves, args, kwargs, owners)
        adopted = {number: Owners(tables[number]) for number in numbers if number in tables}
    return Replayed(function, args, kwargs, numbers, adopted)


def _rows_only(owners: Owners, leading: int) -> bool:
    return all(d < leading for d in owners.varying)


def works_elementwise(function: Callable[..., Any]) -> bool:
    """Whether PyTorch says of a function that it works element by element."""
    name = getattr(function, "__name__", "").strip("_")
    return is_elementwise({"truediv": "div", "radd": "add", "rmul": "mul"}.get(name, name))


def _elementwise(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    numbers: list[int],
    owners: OwnersOf,
) -> Invocation:
    """Parameters that are broadcast over examples, and those of which every example has elements of its own."""
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    dims = max(value.dim() for value in tensors)
    found = [owner for value in tensors if (owner := owners(value)) is not None]
    table = join((owner.table for owner in found), dims)
    varying = [d for d, n in enumerate(table.shape) if n > 1]
    adopted: dict[int, Owners] = {}
    for number in numbers:
        shape = (1,) * (dims - leaves[number].dim()) + tuple(leaves[number].shape)
        if varying and all(shape[d] == table.shape[d] for d in varying):
            adopted[number] = Owners(table.reshape(table.shape[dims - leaves[number].dim() :]))
        elif any(shape[d] != 1 for d in varying):
            return Replayed(function, args, kwargs, numbers, {})
    return Elementwise(function, args, kwargs, numbers, adopted)
