"""Gradients that belong to no example: of penalties, and of uses that are not seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from cabs.torch_internals import has_other_hooks
from cabs.variance.backward import BackwardPass
from cabs.variance.inputs import tensors_in
from cabs.variance.memory import Marks
from cabs.variance.origins import fed_with_data, origin_of
from cabs.variance.owners import SUM, Lot
from cabs.variance.replays import ADDITIONS

SUMS = {*ADDITIONS, torch.stack, torch.cat}


def is_penalty(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks) -> bool:
    """Whether parameters are added to what all examples were added up to: a penalty, which is no example's."""
    if function not in SUMS:
        return False
    owned = [found for tensor in tensors_in((args, kwargs)) if (found := marks.get(tensor)) is not None]
    return all(bool((owners.table == SUM).all()) for owners in owned)


def look_at_penalty(tensors: list[Tensor], marks: Marks) -> None:
    """A penalty is made of parameters; what layers make of other numbers is no penalty, and nobody's."""
    assert marks.lot is not None
    if all(marks.get(tensor) is None for tensor in tensors):
        return  # nothing that they could be a penalty of
    for tensor in tensors:
        if tensor.requires_grad and marks.get(tensor) is None:
            leaves, fed = origin_of(tensor).leaves, {id(leaf) for leaf in fed_with_data(tensor, marks)}
            marks.lot.penalized.update(map(id, leaves))
            marks.lot.hidden |= fed
            if marks.lot.read and not fed.issuperset(map(id, leaves)):
                warnings.warn(
                    "numbers of single examples were given to Python (item, tolist, numpy, …), and a part of the loss "
                    "is made of parameters and plain numbers alone: it is taken for a penalty, which is no example's. "
                    "If it is made of those numbers, use tensors in their place, or estimator='microbatch'",
                    stacklevel=2,
                )


def is_missed(parameter: Tensor, gradient: Tensor, lot: Lot, current: BackwardPass, sharded: bool) -> bool:
    """Whether more arrives at a parameter than its uses account for, by a way that is hidden.

    The rest has to be a penalty's, or what a hook of the user's made of the gradient. Where neither is known, it is
    noted, since it may be rounding.
    """
    total, whole = current.receive(parameter, gradient)
    key = id(parameter)
    if whole or key in lot.hidden:
        return not whole
    if total is not None and key not in lot.penalized and not sharded and not has_other_hooks(parameter):
        current.note_excess(key, gradient - total)
    return False


def note_hidden_use(tensors: list[Tensor], marks: Marks) -> None:
    """Notes the parameters of a call that would be a use if autograd were on."""
    assert marks.lot is not None
    if all(tensor.requires_grad for tensor in tensors):
        return  # parameters among themselves
    for tensor in tensors:
        if tensor.requires_grad and marks.get(tensor) is None:
            marks.lot.hidden.update(id(leaf) for leaf in origin_of(tensor).leaves)


def left_out(current: BackwardPass, received: list[tuple[int, int]], watched: Collection[int]) -> set[int]:
    """The parameters that were measured in a pass and got no gradient; of a pass that is only looked at nobody does."""
    return (current.claimed & set(watched)) - {key for _, key in received} if received else set()


def check_left_out(names: set[str]) -> None:
    """Refuses a measurement of parameters whose gradients are not stepped with."""
    if names:
        raise RuntimeError(
            f"the gradients of {', '.join(sorted(names))} were measured and did not reach them, since backward was "
            "called for some parameters only (inputs=...): freeze the others with requires_grad_(False) instead"
        )
