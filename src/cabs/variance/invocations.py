"""Operations with their arguments by name: called once forward, asked for gradients once backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from cabs.variance.adoption import OwnersOf
from cabs.variance.factors import PerExample, Positions
from cabs.variance.owners import Owners
from cabs.variance.registry import LAYERS, Formula
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


class ByFormula(Invocation):
    """An operation with a formula of its own."""

    def __init__(
        self,
        function: Callable[..., Any],
        formula: Formula,
        values: dict[str, Any],
        places: int,
        parameters: list[str],
        carriers: Mapping[str, Owners],
    ) -> None:
        self._function, self._formula, self._places = function, formula, places
        self.values = values
        self.parameters = parameters
        self.sparse = bool(values.get("sparse"))
        self.lowers_precision = formula.lowers_precision
        self.sums_cheaply = formula.sums_cheaply
        needed = {name for parameter in parameters for name in formula.needs[parameter]}
        self.kept = [name for name, value in self.values.items() if name in needed and isinstance(value, Tensor)]
        self._carriers = [name for name in carriers if name in needed]
        self._owners = carriers
        self.knows_owners = len(carriers) == 1
        self._optional = {name for names in formula.needs.values() for name in names} - needed
        if formula.differentiated is not None:
            self.differentiated = formula.differentiated
            added = [name for name in parameters if not formula.needs[name]]
            self.saved = [name for name, value in values.items() if isinstance(value, Tensor) and name not in added]

    def again(self, values: dict[str, Any]) -> ByFormula:
        """The same call of other tensors, of the same shapes and owners."""
        other = object.__new__(ByFormula)
        other.__dict__.update(self.__dict__)
        other.values = values
        return other

    def mark(self, outputs: Sequence[Tensor]) -> list[Owners]:
        """An output has rows where the one argument that holds examples has them."""
        ((name, owners),) = self._owners.items()
        output, leading = outputs[0], self._formula.leading
        rows = owners.table.shape[: leading(name, self.values[name], self.values)]
        rest = (1,) * (output.dim() - leading("delta", output, self.values))
        shape = rows + rest
        if owners.table.shape == shape:
            return [owners]
        return [owners.derived(shape, lambda: Owners(owners.table.reshape(shape), owners.why))]

    def cheap(self, delta: Tensor, rows: Rows) -> bool:
        return self._formula.cheap and rows.one_each(delta, self._formula.leading("delta", delta, {}))

    def call(self) -> Any:
        items = list(self.values.items())
        return self._function(*(value for _, value in items[: self._places]), **dict(items[self._places :]))

    def gradients(
        self, values: Mapping[Any, Any], delta: Tensor, rows: Rows, chosen: slice
    ) -> Mapping[Any, PerExample]:
        arguments = dict(values)
        arguments.update(dict.fromkeys(self._optional))
        arguments = self._formula.prepare(arguments)
        leading = self._formula.leading
        arranged = rows.arrange(delta, leading("delta", delta, values), chosen, zero=True)
        for name in self._carriers:
            value = arguments[name]
            arguments[name] = rows.arrange(value, leading(name, value, values), chosen)
        return self._formula.function(arranged, **arguments)


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


def check_layer(layer: nn.Module, output: Tensor, owners: Sequence[Owners], examples: int) -> None:
    """Refuses to measure a layer with a formula of its user's making on examples that it is not made for."""
    if any(o.varying != (0,) or o.pattern(examples) != (1, 1) for o in owners) or output.shape[0] != examples:
        raise NotImplementedError(
            f"{type(layer).__name__} has a formula registered, which takes examples along the first dimension, and "
            "is given something else"
        )
