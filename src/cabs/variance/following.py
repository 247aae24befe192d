"""Follows the examples through PyTorch's operations: whatever is computed of them is marked with whose it is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cabs.variance.memory import Marks, storage_of
from cabs.variance.moves import MOVES, Call
from cabs.variance.moves.elementwise import KEEPS_SUMS, elementwise, is_elementwise
from cabs.variance.moves.registry import each_tensor
from cabs.variance.owners import NOBODY, SEVERAL, SUM, UNKNOWN, Owners

RESHAPES = {
    "as_strided_", "squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_", "requires_grad_",
}  # fmt: skip
"""What changes a tensor's shape in place, and none of its numbers."""


class Following(TorchDispatchMode):
    """While active, sees every operation below autograd, and marks what comes out.

    Args:
        marks: where owners are kept.
    """

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks
        self.mixtures: list[str] = []
        """Where, since the list was last emptied, several examples were made into something else than a sum."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if isinstance(output, (Tensor, tuple, list)):
            self._follow(func, args, kwargs, output)
        return output

    def _follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        inputs = [*each_tensor(args), *each_tensor(list(kwargs.values()))]
        owned = [owners for tensor in inputs if (owners := self._marks.get(tensor)) is not None]
        if not owned:
            return
        name, returns = _described(func)
        if isinstance(output, Tensor) and self._stays(name, owned, output, inputs):
            return
        memories = [storage_of(tensor) for tensor in inputs]
        call: Call | None = None
        outputs = [output] if isinstance(output, Tensor) else list(output)
        for number, out in enumerate(outputs):
            if not isinstance(out, Tensor):
                continue
            alias = returns[min(number, len(returns) - 1)].alias_info
            if alias is not None and (not alias.is_write or name in RESHAPES):
                continue  # a view: what it is a view of knows
            if alias is None and any(storage_of(out) is memory for memory in memories):
                continue
            if call is None:
                call = Call(func, args, kwargs, self._owners)
            self._marks.set(out, self._moved(name, func, call, out, owned))

    def _stays(self, name: str, owned: list[Owners], out: Tensor, inputs: list[Tensor]) -> bool:
        """The common case: element by element, from tensors with the same owners, to a new one."""
        first = owned[0]
        if name[-1] == "_" or not is_elementwise(name) or any(owners is not first for owners in owned[1:]):
            return False
        if first.highest >= SUM or first.table.dim() != out.dim() or any(tensor is out for tensor in inputs):
            return False
        self._marks.set(out, first)
        return True

    def _owners(self, tensor: Tensor) -> Owners | None:
        """What an operation may know of its arguments: whole numbers made of several examples are plain numbers."""
        owners = self._marks.get(tensor)
        if owners is None or tensor.is_floating_point() or tensor.is_complex():
            return owners
        plain = owners.highest >= SEVERAL or (owners.highest == SUM and tensor.dtype == torch.bool)
        return None if plain else owners

    def _moved(self, name: str, func: Any, call: Call, out: Tensor, owned: list[Owners]) -> Owners | None:
        if not call.tables():
            return None
        move = MOVES.get(name) or MOVES.get(name.removesuffix("_"))
        if move is None and is_elementwise(name):
            move = elementwise
        if move is None:
            return Owners(
                torch.full((1,) * out.dim(), UNKNOWN), f"{name} at {place()}, which is not known to keep them apart"
            )
        table = move(call, out)
        if table is None:
            return None
        linear = (
            name.removesuffix("_") in KEEPS_SUMS or not out.is_floating_point()
        )  # a count stays one when it is clamped
        if not linear and any(owners.highest == SUM for owners in owned):
            table = torch.where(table == SUM, SEVERAL, table)
        if table.dim() != out.dim():
            raise AssertionError(f"{name} gave a table of {table.dim()} dimensions for {out.dim()}")
        owners = Owners(table)
        if owners.highest >= SUM:
            owners.why = next((o.why for o in owned if o.highest > SUM and o.why), None)
            if owners.highest > SUM and owners.why is None:
                owners.why = f"{name} at {place()}"
                if out.is_floating_point():
                    self.mixtures.append(owners.why)
            elif owners.why is None:
                owners.why = f"the sum over examples at {place()}"
        elif owners.highest == NOBODY:
            return None
        return owners


@cache
def _described(func: Any) -> tuple[str, Any]:
    """An operation's name in ATen, and what it returns."""
    return func._schema.name.removeprefix("aten::"), func._schema.returns


def place() -> str:
    """The line of the user's code that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" not in path and "/cabs/" not in path and not path.startswith("<"):
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
