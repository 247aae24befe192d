"""The examples that passes are about: who says how many there are, and marks the tensors that hold them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cabs.torch_internals import base_of, tree_map
from cabs.variance.inputs import ExamplesOf, of_examples, tensors_within
from cabs.variance.memory import Marks, covers_its_memory_once
from cabs.variance.origins import made_of_parameters_alone
from cabs.variance.owners import UNKNOWN, Lot, Owners


class Examples:
    """Opens a lot of examples when a loader hands them out, or else when the model is called with them.

    Args:
        marks: where owners are kept.
        examples_of: finds the examples among the model's inputs.
        is_parameter: whether a tensor is a parameter of the model.
    """

    def __init__(self, marks: Marks, examples_of: ExamplesOf, is_parameter: Callable[[Tensor], bool]) -> None:
        self._marks, self._is_parameter = marks, is_parameter
        self._examples_of = examples_of
        self._warned = False
        self._others = set[tuple[int, int]]()
        """Where in a batch of so many tensors there are some that do not have a row for each example."""

    def expect(self, batch: Any, examples: int, rows: bool) -> None:
        """Told what a loader handed out: the examples of the next forward passes; ``rows`` if all tensors hold them."""
        self._marks.lot = Lot(examples, given=True)
        tensors = tensors_within(batch)
        said = self._examples_of.owners(batch, tensors)
        if said is not None:
            self._mark_rows(tensors, said[1])
            return
        if rows:
            found = [tensor for tensor in tensors if tensor.dim() and len(tensor) == examples]
        else:
            found = self._seen_to_vary(of_examples(tensors, 0, examples), tensors)
            self._marks.lot.doubtful = doubtful(found, 0, examples)
        for tensor in found:
            if covers_its_memory_once(tensor):
                self._mark(tensor, 0, range(examples))

    def _seen_to_vary(self, found: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """Those of a batch that have as many rows as there are examples, and had as many in all batches before.

        One that had another number of rows beside others that had the right one is shared by all examples, say.
        """
        places = {id(tensor): (len(tensors), place) for place, tensor in enumerate(tensors)}
        if found:
            rows = len(found[0])
            self._others.update(places[id(t)] for t in tensors if t.dim() and len(t) != rows)
        return [tensor for tensor in found if places[id(tensor)] not in self._others] or found

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Finds the examples among the arguments of a model that is called; the arguments to go on with."""
        tensors = tensors_within((args, kwargs))
        lot = self._marks.lot
        if lot is not None and not lot.closed:
            found = [owners for tensor in tensors if (owners := self._marks.get(tensor)) is not None]
            marked = [owners for owners in found if owners.highest >= 0]
            if marked:
                lot.see(marked)
                return args, kwargs
        among = [tensor for tensor in tensors if self._may_hold_examples(tensor)]
        if tensors and not among:
            return args, kwargs
        said = self._examples_of.owners((args, kwargs), tensors)
        if said is not None:
            if lot is None or lot.closed or lot.examples != said[0]:
                self._marks.lot = Lot(said[0])
            self._mark_rows(among, said[1])
            return args, kwargs
        if lot is not None and lot.given and not lot.closed:
            return self._mark_inputs(args, kwargs, among, range(lot.examples))
        examples = self._examples_of.count(tensors, among)
        self._warn_of_flattened(among, examples)
        if lot is not None and not lot.closed and any(map(self._marks.beside, tensors)):
            # Another part of the same memory: a batch that goes through the model in parts.
            ids = range(lot.examples, lot.examples + examples)
            lot.examples += examples
            lot.parts += 1
            return self._mark_inputs(args, kwargs, among, ids)
        if lot is None or lot.closed or examples != lot.examples:
            self._marks.lot = Lot(examples)
        return self._mark_inputs(args, kwargs, among, range(examples))

    def _may_hold_examples(self, tensor: Tensor) -> bool:
        """Not if it is made of parameters alone, nor if it is the part of examples at hand that there is nothing of."""
        lot = self._marks.lot
        if not tensor.numel() and lot is not None and not lot.closed:
            return False
        return not tensor.requires_grad or not made_of_parameters_alone(tensor, self._is_parameter)

    def _warn_of_flattened(self, tensors: list[Tensor], examples: int) -> None:
        """Says what is taken for an example where a model, or a part of it, is called with rows that were flattened."""
        if self._warned or self._examples_of.dim:
            return
        rows = [t for t in tensors if t.dim() and t.shape[0] == examples]
        shapes = [shape for shape in map(flattened_from, rows) if shape is not None]
        if shapes:
            self._warned = True
            warnings.warn(
                f"the model was called with {examples} rows, which are parts of a tensor of shape {tuple(shapes[0])}: "
                "each row is taken for an example. If an example has several of them, say whose each row is with "
                "owners of GradientVariance, or take batches from an AdaptiveLoader",
                stacklevel=2,
            )

    def count(self, args: Any, kwargs: Any) -> int:
        """How many examples a model is called with, where nothing is marked; 0 if its arguments do not tell."""
        tensors = tensors_within((args, kwargs))
        try:
            found = self._examples_of.owners((args, kwargs), tensors)
            return self._examples_of.count(tensors) if found is None else found[0]
        except ValueError:
            return 0

    def _mark_inputs(self, args: Any, kwargs: Any, tensors: list[Tensor], ids: range) -> tuple[Any, Any]:
        examples, dim = len(ids), self._examples_of.dim
        found = of_examples(tensors, dim, examples)
        if not found and tensors:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise RuntimeError(
                f"there are {examples} examples, and the model was called with inputs of shapes {shapes}: none has "
                f"{examples} entries along dimension {dim}; call the model with the loader's batch, or say whose each "
                "row is with owners of GradientVariance"
            )
        apart = {id(t): t.clone() for t in found if not covers_its_memory_once(t)}
        if apart:  # examples that share memory (windows, expanded rows) cannot be told apart there
            args, kwargs = tree_map(lambda v: apart.get(id(v), v), (args, kwargs))
        assert self._marks.lot is not None
        self._marks.lot.seen.update(ids)
        self._marks.lot.doubtful += doubtful(found, dim, examples)
        for tensor in found:
            one = apart.get(id(tensor), tensor)
            self._mark(one, dim if one.dim() > dim else 0, ids)
        return args, kwargs

    def _mark_rows(self, tensors: list[Tensor], ids: Tensor) -> None:
        dim = self._examples_of.dim
        for tensor in tensors:
            if tensor.dim() > dim and tensor.shape[dim] == len(ids) and covers_its_memory_once(tensor):
                self._mark(tensor, dim, ids)

    def mark_output(self, tensor: Tensor, examples: int) -> None:
        """Says that a tensor has one row for each example."""
        self._mark(tensor, 0, range(examples))

    def _mark(self, tensor: Tensor, dim: int, ids: range | Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            return
        dims = tensor.dim()
        owners = Owners.along(dim, dims, ids) if isinstance(ids, Tensor) else in_turn(dim, dims, ids)
        self._marks.set(tensor, owners, rest=UNKNOWN)  # more data, beside a part of some


def doubtful(found: list[Tensor], dim: int, examples: int) -> list[tuple[int, ...]]:
    """The shapes of those that another tensor is as long as along a further dimension, which may be why they are."""
    further = {id(t): examples in (n for d, n in enumerate(t.shape) if d != dim) for t in found}
    return [tuple(t.shape) for t in found if any(further[id(o)] and o.dim() >= t.dim() for o in found if o is not t)]


def flattened_from(rows: Tensor) -> torch.Size | None:
    """The shape of what this is a view of, if its first dimension runs over the first two of that."""
    base = base_of(rows)
    if base is None or base.dim() != rows.dim() + 1 or base.shape[2:] != rows.shape[1:]:
        return None
    several = rows.shape[0] > base.shape[1] > 1 and rows.shape[0] % base.shape[1] == 0
    return base.shape if several and rows.stride(0) == base.stride(1) else None


@functools.lru_cache(maxsize=256)
def in_turn(dim: int, dims: int, ids: range) -> Owners:
    """Examples one after the other along a dimension: the same owners at every step, with all that is kept of them."""
    return Owners.along(dim, dims, torch.tensor(ids))


def check_same(lot: Lot, other: Lot, where: Callable[[], str]) -> None:
    """Refuses a backward pass through forward passes of different examples."""
    if lot is not other:
        raise RuntimeError(
            f"{where()}: a backward pass through two forward passes, one of {lot.examples} examples and one "
            f"of {other.examples}: all parts of a loss must be of the same examples; call backward for each"
        )


def check_missed(missed: set[str]) -> None:
    """Refuses to go on without parameters whose gradients came by a way that cannot be seen."""
    if missed:
        names = ", ".join(sorted(missed))
        raise RuntimeError(
            f"gradients reached {names} by a way that cannot be seen (a custom autograd.Function, scripted "
            "code, a transform such as torch.vmap, or inputs that are not known to be the examples'): register a "
            "formula for the layer with cabs.variance.register_layer, or use estimator='microbatch'"
        )


def check_whole(lot: Lot | None) -> None:
    """Refuses a backward pass that was about a part of the examples only."""
    if lot is None:
        return
    if len(lot.fired) < lot.parts:
        raise RuntimeError(
            "the model was called with parts of one tensor, and gradients came back for some of them only: call "
            "backward for all of a batch at once, or put a forward pass that is not trained with under no_grad()"
        )
    if lot.given and len(lot.seen) != lot.examples:
        raise RuntimeError(
            f"the loader handed out {lot.examples} examples and the model was called with {len(lot.seen)} of them: "
            "call the model with all of a batch before backward"
        )
