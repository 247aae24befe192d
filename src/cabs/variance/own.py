"""Gradients of parameters of which every example has elements of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from cabs.norms import wide
from cabs.variance.factors import PerExample, row_norms
from cabs.variance.rows import Rows


class Own(PerExample):
    """Gradients of a tensor of which every example has elements of its own: each gets what arrived at those.

    Args:
        gradient: what arrived at the whole tensor, Σ_i g_i.
        rows: whose its elements are.
        chosen: which examples.
    """

    def __init__(self, gradient: Tensor, rows: Rows, chosen: slice) -> None:
        self.gradient, self.rows = gradient, rows
        self._ids = list(rows.chosen(chosen))
        self._chosen = chosen
        self.examples = len(self._ids)

    def __getitem__(self, examples: slice) -> Own:
        part = Own(self.gradient, self.rows, self._chosen)
        part._ids = self._ids[examples]
        part.examples = len(part._ids)
        return part

    def dense(self) -> Tensor:
        gradient, table = wide(self.gradient), self.rows.owners.table.to(self.gradient.device)
        ids = torch.tensor(self._ids, device=gradient.device).reshape(-1, *(1,) * gradient.dim())
        return torch.where(table == ids, gradient, 0)

    def squared_norms(self, weights: Tensor | None = None) -> Tensor:
        gradient = self.gradient if weights is None else wide(self.gradient) * weights.to(self.gradient.device).sqrt()
        norms = row_norms(self.rows.first(gradient, self._chosen, zero=True))
        return norms if len(self._ids) == len(norms) else row_norms(self.dense(), weights=weights)

    positionwise = squared_norms
