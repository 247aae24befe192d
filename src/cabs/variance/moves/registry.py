"""Which function says how an operation moves ownership, and what such a function is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from cabs.torch_internals import schema_of
from cabs.variance.given import Given
from cabs.variance.owners import NOBODY, Owners, join

T = TypeVar("T")

Move = Callable[["Call", Tensor], Tensor | None]
"""(the call, an output) to the output's table of owners; None if it is nobody's."""

MOVES: dict[str, Move] = {}
"""By the operation's name in ATen, without the underscore of forms that write in place."""

Reads = Callable[["Call", Tensor], bool]

READS: dict[Move, Reads] = {}
"""Those that look at the numbers in tensors; all others go by shapes and owners, so that outcomes can be kept."""


def always(call: Call, output: Tensor) -> bool:
    return True


def moves(*names: str, reads: Reads | None = None) -> Callable[[Move], Move]:
    """Declares how operations move ownership: ``@moves("flip")``.

    Args:
        names: of the operations.
        reads: whether the outcome of a call depends on the numbers in tensors, such as indices; never by default.
    """

    def register(move: Move) -> Move:
        for name in names:
            MOVES[name] = move
        if reads is not None:
            READS[move] = reads
        return move

    return register


class Call:
    """A call of an ATen operation, with the owners of its arguments.

    Args:
        function: the operation.
        args: its arguments; those left out are what the operation's schema says.
        kwargs: its arguments by name.
        owners: the owners of a tensor, None for nobody's.
    """

    def __init__(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        owners: Callable[[Tensor], Owners | None],
    ) -> None:
        self.name = schema_of(function).name.removeprefix("aten::").removesuffix("_")
        names, defaults = arguments_of(function)
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        self.values: dict[str, Any] = {
            name: given.get(name, defaults.get(name)) for name in names if name in given or name in defaults
        }
        self._owners = owners

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def by_shape(self, output: Tensor, make: Callable[[], T]) -> T:
        """What follows from owners and shapes alone, kept for the next time."""
        given = Given(list(self.values.values()), self._owners)
        key = given.key(self.name, output.shape, output.dtype)
        made, _ = given.owned[0].derived(key, lambda: (make(), given.owned))
        return made

    def table(self, tensor: Tensor | None) -> Tensor | None:
        """The table of owners of an argument."""
        owners = self._owners(tensor) if isinstance(tensor, Tensor) else None
        return None if owners is None else owners.table

    def tables(self, *names: str) -> list[Tensor]:
        """The tables of some arguments that have owners, or of all."""
        chosen = [self.values.get(name) for name in names] if names else list(self.values.values())
        found = (self.table(tensor) for value in chosen for tensor in each_tensor(value))
        return [table for table in found if table is not None]

    def of(self, name: str) -> Tensor:
        """The table of one argument, of nobody if it has no owners."""
        table = self.table(self[name])
        return nobodys(self[name].dim()) if table is None else table


def each_tensor(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from each_tensor(item)


def nobodys(dims: int) -> Tensor:
    return torch.full((1,) * dims, NOBODY)


@cache
def arguments_of(function: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An operation's arguments by name, and what those are that a call leaves out, as dispatched calls do."""
    arguments = schema_of(function).arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return tuple(argument.name for argument in arguments), defaults


def dims_of(value: Any, dims: int) -> list[int]:
    """Dimensions as ATen's operations take them, counted from the front; all of them if there are none."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return list(range(dims))
    return [d % max(1, dims) for d in (value if isinstance(value, (list, tuple)) else [value])]


def joined(call: Call, dims: int, *names: str) -> Tensor | None:
    """The owners of what some arguments, or all, are put together to, elementwise."""
    tables = call.tables(*names)
    return join(tables, dims) if tables else None
