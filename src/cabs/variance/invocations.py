"""Operations with their arguments by name: called once forward, asked for gradients once backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cabs.variance.factors import PerExample, Positions
from cabs.variance.interception import is_parameter, marked, tensors_in
from cabs.variance.layout import Layout
from cabs.variance.registry import ELEMENTWISE, INVOCATIONS, LAYERS, OPERATIONS, OperationRule


class Invocation:
    """An operation about to be called.

    Attributes:
        values: the arguments by name; the caller may replace some before ``call``.
        parameters: names of the arguments that are parameters or made of parameters.
        kept: names of the arguments that the gradients of single examples are made of.
        lowers_precision: whether autocast runs the operation in half precision.
        sums_cheaply: whether ‖Σ_i g_i‖² may be cheaper than reading the gradient of the sum.
        sums_by_examples: whether Σ_i g_i is the sum of what ``gradients`` gives, no other gradient being seen.
        in_place: whether the output is an argument written to.
        sparse: whether the gradients of its parameters are sparse tensors.
        needs_tap: whether a hook on the output will not do: there are several, or it is the parameter itself.
        mixes_examples: whether an example's output depends on others, so that g_i is its contribution only.
        differentiated: what autograd would do, ``(delta, wanted, **values)`` to gradients by name, if that can be done
            here, with ``saved`` for the names of what it takes.
    """

    values: dict[Any, Any]
    parameters: list[Any]
    kept: list[Any]
    lowers_precision = False
    sums_cheaply = False
    sums_by_examples = False
    in_place = False
    sparse = False
    needs_tap = False
    mixes_examples = False
    differentiated: Callable[..., Mapping[str, Tensor]] | None = None
    saved: Sequence[Any] = ()

    def cheap(self, delta: Any) -> bool:
        """Whether measuring all examples costs next to nothing."""
        return False

    def call(self) -> Any:
        raise NotImplementedError

    def gradients(
        self, values: Mapping[Any, Any], delta: Any, layout: Layout, chosen: slice
    ) -> Mapping[Any, PerExample]:
        """The gradients of the chosen examples by argument name, given the gradient of the output (or outputs)."""
        raise NotImplementedError


class Ruled(Invocation):
    """An operation with a rule of its own."""

    def __init__(
        self,
        function: Callable[..., Any],
        rule: OperationRule,
        values: dict[str, Any],
        places: int,
        parameters: list[str],
    ) -> None:
        self._function, self._rule, self._places = function, rule, places
        self.values = values
        self.parameters = parameters
        self.sparse = bool(values.get("sparse"))
        self.lowers_precision = rule.lowers_precision
        self.sums_cheaply = rule.sums_cheaply
        self.mixes_examples = rule.mixes_examples(self.values)
        needed = {name for parameter in parameters for name in rule.needs[parameter]}
        self.kept = [name for name, value in self.values.items() if name in needed and isinstance(value, Tensor)]
        self._carriers = [name for name in self.kept if marked(self.values[name])]
        self._optional = {name for names in rule.needs.values() for name in names} - needed
        if rule.differentiated is not None:
            self.differentiated = rule.differentiated
            added = [name for name in parameters if not rule.needs[name]]
            self.saved = [name for name, value in values.items() if isinstance(value, Tensor) and name not in added]

    def cheap(self, delta: Any) -> bool:
        return self._rule.cheap(delta)

    def call(self) -> Any:
        items = list(self.values.items())
        return self._function(*(value for _, value in items[: self._places]), **dict(items[self._places :]))

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, layout: Layout, chosen: slice
    ) -> Mapping[Any, PerExample]:
        arguments = dict(values)
        arguments.update(dict.fromkeys(self._optional))
        before = slice(None) if self.mixes_examples else chosen
        for name in self._carriers:
            arguments[name] = _some(layout.first(arguments[name], self._rule.features), before)
        gradients = self._rule.function(_some(layout.first(delta, self._rule.features), before), **arguments)
        if self.mixes_examples:
            return {name: gradient[chosen] for name, gradient in gradients.items()}
        return gradients


def _some(tensor: Tensor, examples: slice) -> Tensor:
    # Scattered examples are brought together: what follows reads them more than once.
    return tensor if examples == slice(None) else tensor[examples].clone()


class Layer(Invocation):
    """A layer with a rule of its user's making, after it has run."""

    sums_by_examples = True

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._layer = layer
        self._output: Tensor | None = output
        own = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        self.parameters = list(own)
        inputs = {index: value for index, value in enumerate(args) if isinstance(value, Tensor)}
        self.kept = list(inputs)
        self.values = {**own, **inputs}
        self._args = tuple(None if index in inputs else value for index, value in enumerate(args))

    def call(self) -> Tensor:
        output, self._output = self._output, None  # the graph owns it from here on
        assert output is not None
        return output

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, layout: Layout, chosen: slice
    ) -> Mapping[Any, PerExample]:
        inputs = tuple(
            layout.first(values[index])[chosen]
            if index in self.kept and layout.holds(values[index])
            else values.get(index, value)
            for index, value in enumerate(self._args)
        )
        gradients = LAYERS[type(self._layer)](self._layer, inputs, layout.first(delta)[chosen])
        for name in self.parameters:
            expected = (len(range(layout.examples)[chosen]), *values[name].shape)
            if name not in gradients or tuple(gradients[name].shape) != expected:
                got = tuple(gradients[name].shape) if name in gradients else "nothing"
                raise RuntimeError(
                    f"the rule of {type(self._layer).__name__} must give {name!r} a gradient for each example, "
                    f"shape {expected}, and gave {got}"
                )
        return {name: Positions(gradients[name]) for name in self.parameters}


class _Flat(Invocation):
    """An operation whose arguments are known by their place in the flattened call."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self.values = dict(enumerate(leaves))
        self.parameters = [name for name, value in self.values.items() if is_parameter(value)]
        tensors = [name for name, value in self.values.items() if isinstance(value, Tensor)]
        self.kept = [name for name in tensors if name not in self.parameters]

    def call(self) -> Any:
        return self._apply(self.values)

    def _apply(self, values: Mapping[Any, Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(list(values.values()), self._structure)
        return self._function(*args, **kwargs)


class Replayed(_Flat):
    """Any operation at all: called again, and differentiated once for every example. Exact, and slow."""

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, layout: Layout, chosen: slice
    ) -> Mapping[Any, PerExample]:
        with torch.enable_grad():
            again = {name: values[name].detach().requires_grad_() for name in self.parameters}
            output = self._apply({**values, **again})
        rows: list[tuple[Tensor, ...]] = []
        for example in range(layout.examples)[chosen]:
            one = torch.zeros_like(delta)
            layout.first(one)[example] = layout.first(delta)[example]
            rows.append(
                torch.autograd.grad(
                    output,
                    list(again.values()),
                    one,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        return {
            name: Positions(torch.stack(column)) for name, column in zip(again, zip(*rows, strict=True), strict=True)
        }


class Elementwise(_Flat):
    """An operation that broadcasts its parameters over the examples: give each example its own copy."""

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, layout: Layout, chosen: slice
    ) -> Mapping[Any, PerExample]:
        count = delta.dim()
        delta = layout.first(delta)[chosen]

        def aligned(value: Tensor) -> Tensor:
            full = value.reshape((1,) * (count - value.dim()) + value.shape).movedim(layout.dim, 0)
            return full[chosen] if full.shape[0] == layout.examples else full

        shapes = {name: values[name].shape for name in self.parameters}
        values = {name: aligned(v) if isinstance(v, Tensor) else v for name, v in values.items()}
        copies = {
            name: values[name].detach().expand(delta.shape[0], *values[name].shape[1:]).requires_grad_()
            for name in self.parameters
        }
        with torch.enable_grad():
            output = self._apply({**values, **copies})
        found = torch.autograd.grad(output, list(copies.values()), delta, allow_unused=True, materialize_grads=True)
        return {name: Positions(g, (), shapes[name]) for name, g in zip(copies, found, strict=True)}


class Expanded(Invocation):
    """A parameter already expanded to one row an example (a class token, say): its rows are the examples'."""

    needs_tap = True

    def __init__(self, rows: Tensor) -> None:
        self.values = {"rows": rows}
        self.parameters = ["rows"]
        self.kept = []

    def call(self) -> Tensor:
        return cast(Tensor, self.values["rows"])

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, layout: Layout, chosen: slice
    ) -> Mapping[Any, PerExample]:
        examples = torch.arange(layout.examples, device=delta.device)[chosen]
        gradients = delta.new_zeros(len(examples), *delta.shape)
        by_example = gradients.movedim(1 + layout.dim, 1)
        by_example[torch.arange(len(examples), device=delta.device), examples] = layout.first(delta)[chosen]
        return {"rows": Positions(gradients)}


def invocation(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout
) -> Invocation:
    """The call in the form that measures it most cheaply, or replayed where nothing else fits."""
    if function in INVOCATIONS:
        return cast(Invocation, INVOCATIONS[function](function, args, kwargs))
    rule = OPERATIONS.get(function)
    if rule is not None:
        values = dict(zip(rule.names, args, strict=False)) | kwargs
        parameters = [name for name, value in values.items() if is_parameter(value)]
        known = all(name in rule.needs for name in parameters) and all(name in rule.names for name in kwargs)
        if known and rule.covers(values, layout):
            return Ruled(function, rule, values, len(args), parameters)
    if function in ELEMENTWISE and not any(
        is_parameter(value) and layout.holds(value) for value in tensors_in((args, kwargs))
    ):
        return Elementwise(function, args, kwargs)
    return Replayed(function, args, kwargs)
