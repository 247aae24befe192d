"""Which form of a call measures it most cheaply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from cabs.torch_internals import tree_leaves
from cabs.variance.adoption import ADOPTIONS, OwnersOf
from cabs.variance.invocations import ByFormula, Invocation
from cabs.variance.moves.elementwise import is_elementwise
from cabs.variance.owners import Owners, join
from cabs.variance.registry import INVOCATIONS, OPERATIONS
from cabs.variance.replays import Elementwise, Replayed


def invocation(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owners: OwnersOf
) -> Invocation:
    """The call in the form that measures it most cheaply, or replayed where nothing else fits."""

    def is_parameter(value: Any) -> bool:
        return isinstance(value, Tensor) and value.requires_grad and value.numel() > 0 and owners(value) is None

    if function in INVOCATIONS:
        return cast(Invocation, INVOCATIONS[function](function, args, kwargs, owners))
    formula = OPERATIONS.get(function)
    if formula is not None:
        values = dict(zip(formula.names, args, strict=False)) | kwargs
        parameters = [name for name, value in values.items() if is_parameter(value)]
        known = all(name in formula.needs for name in parameters) and all(name in formula.names for name in kwargs)
        complex = any(isinstance(value, Tensor) and value.is_complex() for value in values.values())
        if known and not complex and formula.covers(values):
            found = {name: owners(value) for name, value in values.items() if isinstance(value, Tensor)}
            carriers = {name: owner for name, owner in found.items() if owner is not None}
            rows = (_rows_only(owner, formula.leading(name, values[name], values)) for name, owner in carriers.items())
            if all(rows) and not any(name in formula.needs for name in carriers):  # weights have no rows of examples
                return ByFormula(function, formula, values, len(args), parameters, carriers)
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
