"""Operations without a formula: made again for every example, or, where they only add or broadcast, in one go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from cabs.interrupts import gradients_on
from cabs.torch_internals import tree_flatten, tree_unflatten
from cabs.variance.factors import PerExample, Positions
from cabs.variance.invocations import Invocation
from cabs.variance.owners import Owners
from cabs.variance.rows import Rows


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
