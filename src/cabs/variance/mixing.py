"""Warns, once, of what makes examples depend on one another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cabs.variance.following import NOT_KNOWN, place
from cabs.variance.memory import Marks
from cabs.variance.moves.reductions import batch_norm_mixes
from cabs.variance.registry import OPERATIONS


class Mixing:
    """Warns where the gradient of a single example is not defined.

    Args:
        marks: the owners of tensors.
        where: the name of the module that has some parameters.
    """

    def __init__(self, marks: Marks, where: Callable[[list[Tensor]], str]) -> None:
        self._marks, self._where = marks, where
        self._warned: set[str] = set()
        self.noted: list[str] | None = None
        """Where to note what would be warned about, instead of doing so."""

    def look_at_statistics(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = dict(zip(OPERATIONS[function].names, args, strict=False)) | kwargs
        names = [p for p in values.values() if isinstance(p, Tensor) and p.requires_grad and self._marks.get(p) is None]
        where = self._where([p for p in names if p.is_leaf]) if any(p.is_leaf for p in names) else f"{place()}:"
        if values.get("training"):
            owners = self._marks.get(values["input"])
            if batch_norm_mixes(None if owners is None else owners.table):
                self.warn(f"{where} mixes the examples of a batch (BatchNorm in training mode)")
        if values.get("scale_grad_by_freq"):
            self.warn(f"{where} divides gradients by how often all examples look a row up (scale_grad_by_freq)")

    def mixed(self, outputs: list[Tensor], places: list[str]) -> None:
        """Where gradients come back through a mixture, no gradient is a single example's."""
        if self.noted is not None:
            self.noted += [f"one example depends on others ({place})" for place in places if outputs]
            return
        depends = "may depend" if places[0].endswith(NOT_KNOWN) else "depends"
        for output in outputs:
            output.register_hook(lambda _: self.warn(f"the loss of one example {depends} on others ({places[0]})"))

    def look_at_loss(self, roots: list[Tensor]) -> None:
        """A mean over some of the examples: how large the share of one is depends on how many others are left out."""
        lot = self._marks.lot
        if lot is None or lot.parts > 1 or (lot.given and len(lot.seen) < lot.examples):
            return  # a part of the batch, of which all have to come: otherwise it is refused
        for owners in map(self._marks.get, roots):
            if owners is not None and owners.share is not None and owners.share.of is not None:
                self.warn(f"the loss is a mean over some of the examples and leaves others out ({owners.why})")

    def warn(self, what: str) -> None:
        if self.noted is not None:
            self.noted.append(what)
        elif what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"{what}, so that the gradient of a single example is not defined: measuring each example's "
                "contribution to the batch gradient instead. estimator='microbatch' does without.",
                stacklevel=2,
            )
