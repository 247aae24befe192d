"""Follows the examples through PyTorch's operations: whatever is computed of them is marked with whose it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from cabs.torch_internals import TorchDispatchMode, schema_of, storage_of
from cabs.variance.given import Given
from cabs.variance.hollow import noting_hollow
from cabs.variance.inputs import tensors_in
from cabs.variance.memory import Marks
from cabs.variance.moves import MOVES, READS, Call
from cabs.variance.moves.elementwise import (
    KEEPS_SUMS,
    counts_everything,
    elementwise,
    is_elementwise,
    loss_of_classes,
)
from cabs.variance.moves.registry import Move, each_tensor
from cabs.variance.owners import NOBODY, SEVERAL, SUM, UNKNOWN, Owners
from cabs.variance.shares import divides_by_entries, is_count, share_of

RESHAPES = {
    "as_strided_", "squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_", "requires_grad_",
}  # fmt: skip
"""What changes a tensor's shape in place, and none of its numbers."""

COMPUTES = {"add", "sub", "rsub", "mul", "div", "pow", "reciprocal", "_to_copy"}
"""What computes with whole numbers, if the outcome is none."""
NOT_KNOWN = ", which is not known to keep them apart"
LOOKS_UP = {"index", "index_select", "gather"}


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
        self._by_shape = True
        """Whether all that was seen since this was last set would be the same for any numbers in the same shapes."""
        self._counts_everything = False
        """Whether the call at hand is a loss that weighs all targets alike."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> Any:
        """Makes a call and marks what comes of it.

        One step's calls are the last one's: what a call makes of owners is kept. Only calls that are new, or whose
        outcome depends on numbers, are seen operation by operation, which takes time.
        """
        if given.hollow:
            return noting_hollow(partial(self._call, function, args, kwargs, given), given.tensors)
        return self._call(function, args, kwargs, given)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> Any:
        self._counts_everything = whole = counts_everything(function, args, kwargs)
        if not given.owned:
            return self._watch(function, args, kwargs)
        key, first = given.key(function, whole), given.owned[0]
        try:
            known = first.recall(key)
        except TypeError:  # an argument that cannot be hashed
            return self._watch(function, args, kwargs)
        if known is not None:
            output = function(*args, **kwargs)
            self._mark_again(output, given.tensors, known[0])
            return output
        self._by_shape = True
        output = self._watch(function, args, kwargs)
        if self._by_shape:
            outcome = [(_is_new(out, given.tensors), self._marks.get(out)) for out in tensors_in(output)]
            first.keep(key, (outcome, given.owned))
        return output

    def _watch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self:
            return function(*args, **kwargs)

    def _mark_again(self, output: Any, inputs: list[Tensor], outcome: list[tuple[bool, Owners | None]]) -> None:
        outputs = [output] if isinstance(output, Tensor) else tensors_in(output)
        alike = len(outputs) == len(outcome)
        for number, out in enumerate(outputs):
            if not alike or outcome[number][0] != _is_new(out, inputs):
                self._marks.set(out, Owners(torch.full((1,) * out.dim(), UNKNOWN), f"a call at {place()}"))
            elif outcome[number][0]:
                owners = outcome[number][1]
                if owners is not None and owners.highest == SUM:
                    owners = Owners(owners.table, f"the sum over examples at {place()}", owners.share)
                self._marks.set(out, owners)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if isinstance(output, (Tensor, tuple, list)):
            self._follow(func, args, kwargs, output)
        else:
            self._by_shape = False  # a number, on which it may depend how the call goes on
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
            self._by_shape &= alias is None or not alias.is_write
            if alias is not None and (not alias.is_write or name in RESHAPES):
                continue  # a view: what it is a view of knows
            if alias is None and any(storage_of(out) is memory for memory in memories):
                continue
            if call is None:
                call = Call(func, args, kwargs, partial(self._owners, self._counting(name, inputs, out)))
            self._marks.set(out, self._moved(name, call, out, owned))

    def _stays(self, name: str, owned: list[Owners], out: Tensor, inputs: list[Tensor]) -> bool:
        """The common case: element by element, from tensors with the same owners, to a new one."""
        first = owned[0]
        if name[-1] == "_" or not is_elementwise(name) or any(owners is not first for owners in owned[1:]):
            return False
        if first.highest >= SUM or first.table.dim() != out.dim() or any(tensor is out for tensor in inputs):
            return False
        self._marks.set(out, first)
        return True

    def _owners(self, counting: Sequence[Tensor], tensor: Tensor) -> Owners | None:
        """What an operation may know of its arguments: whole numbers made of several examples are plain numbers.

        They are places, mostly, or say yes or no. Where they count something, they are what they are.
        """
        owners = self._marks.get(tensor)
        if owners is None or not self._is_plain(tensor, owners) or any(tensor is one for one in counting):
            return owners
        return None

    def _is_plain(self, tensor: Tensor, owners: Owners) -> bool:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        return whole and owners.highest >= (SUM if tensor.dtype == torch.bool else SEVERAL)

    def _counting(self, name: str, inputs: list[Tensor], out: Tensor) -> Sequence[Tensor]:
        """The whole numbers made of several examples that an operation takes as numbers, rather than as places.

        They are computed with, or looked up to be, or nothing else comes in: how often each class is there, say.
        """
        whole = not (out.is_floating_point() or out.is_complex() or out.dtype == torch.bool)
        if name.removesuffix("_") in COMPUTES and not whole:
            return [tensor for tensor in inputs if tensor.dtype != torch.bool]
        if not whole:
            return ()
        owned = [(tensor, owners) for tensor in inputs if (owners := self._marks.get(tensor)) is not None]
        alone = all(self._is_plain(tensor, owners) for tensor, owners in owned)
        return inputs if alone else inputs[:1] if name in LOOKS_UP else ()

    def _has_gradient(self, call: Call) -> bool:
        """Whether examples' gradients run through a call, so that no part of its outcome may pass for parameters."""
        inputs = each_tensor(list(call.values.values()))
        return any(tensor.requires_grad and self._marks.get(tensor) is not None for tensor in inputs)

    def _moved(self, name: str, call: Call, out: Tensor, owned: list[Owners]) -> Owners | None:
        move = MOVES.get(name) or MOVES.get(name.removesuffix("_"))
        if move is None and is_elementwise(name):
            move = elementwise
        reads = move is None or (move in READS and READS[move](call, out))
        # Whether a loss leaves targets out has to be found out each time, and was, if the call is one of such a loss.
        self._by_shape &= not reads and (self._counts_everything or move is not loss_of_classes)
        if not call.tables():
            return None
        if move is None:
            return Owners(torch.full((1,) * out.dim(), UNKNOWN), f"{name} at {place()}{NOT_KNOWN}")
        make = partial(_owners_moved, move, call, out, owned)
        moved = make() if reads else call.by_shape(out, make)
        if moved is None or (moved.highest == NOBODY and not (out.is_floating_point() and self._has_gradient(call))):
            return None
        if moved.highest < SUM:
            return moved
        # A sum over examples, or a mixture of them. Where in the user's code it was made is to be told each time.
        table, why = moved.table, next((owners.why for owners in owned if owners.highest > SUM and owners.why), None)
        whole = not (out.is_floating_point() or out.is_complex())
        linear = name.removesuffix("_") in KEEPS_SUMS or whole  # a count stays one when clamped
        if not linear and any(owners.highest == SUM for owners in owned):
            table = torch.where(table == SUM, SEVERAL, table)
        share = share_of(name, call, owned, self._marks.examples) if int(table.max()) == SUM else None
        if share is not None and (share.reads or share.entries is not None):
            self._by_shape = False
            if divides_by_entries(name, owned, call.values.get("other")):
                table = torch.where(table == SUM, SEVERAL, table)
        lot = self._marks.lot
        if lot is not None and lot.counts and name in ("div", "mul"):
            self._by_shape = False
            if is_count(name, call.values.get("other"), lot, uneven=share is not None and share.entries is not None):
                table = torch.where(table == SUM, SEVERAL, table)
        mixed = moved.highest > SUM or table is not moved.table
        self._by_shape &= not mixed
        if why is None and mixed:
            why = f"{name} at {place()}"
            if not whole:
                self.mixtures.append(why)
        return Owners(table, why or f"the sum over examples at {place()}", share)


def _owners_moved(move: Move, call: Call, out: Tensor, owned: Sequence[Owners]) -> Owners | None:
    table = move(call, out)
    assert table is None or table.dim() == out.dim(), f"{call.name}: {table} is no table for {out.dim()} dimensions"
    if table is None:
        return None
    # The same owners, with all that is known of them; what is said of sums is of one tensor.
    same = (owners for owners in owned if owners.table is table and owners.highest < SUM)
    return next(same, None) or Owners(table)


def _is_new(output: Tensor, inputs: list[Tensor]) -> bool:
    """Whether a tensor has memory of its own."""
    memory = storage_of(output)
    return all(storage_of(tensor) is not memory for tensor in inputs)


@cache
def _described(func: Any) -> tuple[str, Any]:
    """An operation's name in ATen, and what it returns."""
    schema = schema_of(func)
    return schema.name.removeprefix("aten::"), schema.returns


def place() -> str:
    """The line of the user's code that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" not in path and "/cabs/" not in path and not path.startswith("<"):
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
