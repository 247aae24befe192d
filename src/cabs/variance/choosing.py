"""Which form of a call measures it most cheaply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from cabs.torch_internals import tree_leaves
from cabs.variance.adoption import ADOPTIONS, OwnersOf
from cabs.variance.given import Given
from cabs.variance.hollow import leads_to_parameters
from cabs.variance.invocations import ByFormula, Invocation
from cabs.variance.moves.elementwise import is_elementwise
from cabs.variance.owners import Owners, join
from cabs.variance.registry import INVOCATIONS, OPERATIONS, Formula
from cabs.variance.replays import Elementwise, Replayed


def invocation(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Given, owners: OwnersOf
) -> Invocation:
    """The call in the form that measures it most cheaply, or replayed where nothing else fits."""
    if function in INVOCATIONS:
        return cast(Invocation, INVOCATIONS[function](function, args, kwargs, owners))
    formula = OPERATIONS.get(function)
    if formula is not None:
        values = dict(zip(formula.names, args, strict=False)) | kwargs
        first = given.owned[0]
        key: Any = given.key("formula", function)
        try:  # One step's calls are the last one's.
            known, _ = first.recall(key) or (None, None)
        except TypeError:  # an argument that cannot be hashed
            known = key = None
        if known is not None:
            return cast(ByFormula, known).again(values)
        found = _by_formula(function, formula, values, len(args), owners)
        if found is not None:
            if key is not None:
                first.keep(key, (found.again({}), given.owned))
            return found
    leaves = tree_leaves((args, kwargs))
    numbers = [number for number, value in enumerate(leaves) if _is_parameter(value, owners)]
    if works_elementwise(function):
        return _elementwise(function, args, kwargs, leaves, numbers, owners)
    adopted = {}
    if function in ADOPTIONS:
        tables = ADOPTIONS[function](leaves, args, kwargs, owners)
        adopted = {number: Owners(tables[number]) for number in numbers if number in tables}
    return Replayed(function, args, kwargs, numbers, adopted)


def _is_parameter(value: Any, owners: OwnersOf) -> bool:
    return isinstance(value, Tensor) and leads_to_parameters(value) and owners(value) is None


def _by_formula(
    function: Callable[..., Any], formula: Formula, values: dict[str, Any], places: int, owners: OwnersOf
) -> ByFormula | None:
    """The call as one that the formula holds for, if it does; goes by shapes and owners alone."""
    parameters = [name for name, value in values.items() if _is_parameter(value, owners)]
    known = all(name in formula.needs for name in parameters) and all(name in formula.names for name in values)
    complex = any(isinstance(value, Tensor) and value.is_complex() for value in values.values())
    if not known or complex or not formula.covers(values):
        return None
    found = {name: owners(value) for name, value in values.items() if isinstance(value, Tensor)}
    carriers = {name: owner for name, owner in found.items() if owner is not None}
    rows = (_rows_only(owner, formula.leading(name, values[name], values)) for name, owner in carriers.items())
    if not all(rows) or any(name in formula.needs for name in carriers):  # weights have no rows of examples
        return None
    return ByFormula(function, formula, values, places, parameters, carriers)


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
