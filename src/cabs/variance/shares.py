"""Which part of a loss is whose: what a sum over examples has of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cabs.variance.moves import Call
from cabs.variance.owners import SUM, Lot, Owners

SUMS = {"sum", "nansum"}
CLASSES = {"nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"}
LOSSES = CLASSES | {
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
    "binary_cross_entropy_with_logits",
}  # fmt: skip
"""Losses that may put examples together: reduction 1 is a mean, 2 a sum."""


@dataclass(frozen=True)
class Share:
    """What a sum over examples has of each.

    Attributes:
        of: the examples that it is a mean over; None if these are all, or if it is no mean.
        entries: how many entries of each example were added up, if of one there are more than of another.
        reads: whether that took a look at numbers.
    """

    of: frozenset[int] | None = None
    entries: Tensor | None = None
    reads: bool = False


WHOLE = Share()


def share_of(name: str, call: Call, owned: Sequence[Owners], examples: int) -> Share:
    """What an operation's outcome, a sum over examples, has of each of m."""
    before = [owners.share or WHOLE for owners in owned if owners.highest == SUM]
    if before:
        parts = [share.of for share in before if share.of is not None]
        of = frozenset[int]().union(*parts) if len(parts) == len(before) else None
        entries = [share.entries for share in before if share.entries is not None]
        added = torch.stack(entries).sum(0) if len(entries) == len(before) else None
        return Share(None if of is None or len(of) == examples else of, None if _even(added) else added)
    numbers = call.values.get("self")
    table = call.table(numbers)
    if numbers is None or table is None or int(table.min()) < 0 or int(table.max()) >= SUM:
        return WHOLE
    if name == "mean" or (name in LOSSES and call.get("reduction", 1) == 1):
        of = frozenset(table.flatten().tolist())
        return WHOLE if len(of) == examples else Share(of)
    if name in LOSSES - CLASSES and call.get("reduction") == 2:
        return _entries(table, torch.ones(numbers.shape, dtype=torch.bool), examples, reads=False)
    if name in CLASSES and call.get("reduction") == 2 and table.dim() > 1 and table.shape[1] == 1:
        counted = call["target"].detach().cpu() != call.get("ignore_index", -100)
        return _entries(table.squeeze(1), counted, examples, reads=True)
    if name not in SUMS or numbers.is_complex():
        return WHOLE
    several = numbers.numel() > len(table.unique())
    counted = (numbers.detach() != 0).cpu() if several else torch.ones(numbers.shape, dtype=torch.bool)
    return _entries(table, counted, examples, reads=several)


def _entries(table: Tensor, counted: Tensor, examples: int, reads: bool) -> Share:
    entries = torch.bincount(table.expand(counted.shape)[counted], minlength=examples)
    return Share(entries=None if _even(entries) else entries, reads=reads)


def _even(entries: Tensor | None) -> bool:
    return entries is None or bool((entries == entries[0]).all())


def divides_by_entries(name: str, owned: Sequence[Owners], divisor: Any) -> bool:
    """Whether a sum of unequally many entries of each example is divided by how many all of them have.

    The number is a plain one here, counted from a mask or told by somebody: one that has owners is seen as what it is.
    It may have a little more, against a division by 0, or be that of the rows which the entries are in. Then a multiple
    of the number of examples is not taken for it, though it may be it: sums are divided by that too.
    """
    found = [owners.share.entries for owners in owned if owners.share and owners.share.entries is not None]
    number = _number(divisor) if name == "div" and len(owned) == 1 and found else None
    if number is None:
        return False
    entries, count = found[0], round(number)
    if count < 1 or abs(number - count) > ROUNDING * count or count == len(entries):
        return False
    width, rest = divmod(int(entries.sum()), count)
    if rest or not width or (width > 1 and count % len(entries) == 0):
        return False
    return bool((entries % width == 0).all())


def is_count(name: str, number: Any, lot: Lot, uneven: bool) -> bool:
    """Whether a sum is divided by a number that Python code was given of several examples: of their tokens, say.

    Sums are divided by multiples of m too, so that these are taken for it only where the sum is ``uneven``.
    """
    value = _number(number)
    if value is None or value == 0:
        return False
    divisor = value if name == "div" else 1 / value
    counts = (count for count in lot.counts if count and (uneven or count % lot.examples))
    return any(abs(divisor - count) <= ROUNDING * abs(count) for count in counts)


ROUNDING = 1e-5


def _number(value: Any) -> float | None:
    """A plain number, if it is one."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None
