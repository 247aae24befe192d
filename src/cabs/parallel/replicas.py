"""Replicas of the whole model: ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cabs.norms import squared_norm
from cabs.parallel.sums import Futures, all_reduce_then
from cabs.parallel.team import Groups, Team
from cabs.torch_internals import exchange_gradients, has_communication_hook

_SLOT = "_cabs_addition"


class Replicas(Team):
    """Every process has the whole model; gradients are weighed when they are summed."""

    def __init__(self, model: DistributedDataParallel, groups: Groups) -> None:
        super().__init__(model.process_group, groups)
        self._model = model
        self._addition = _addition_in(model)
        self._addition.share = lambda: self.share
        self._addition.groups = {id(p): number for number, group in enumerate(groups) for p in group}
        self._addition.weights = lambda: self.weights

    def loss_weight(self) -> float:
        return 1.0

    def begin_microbatch(self, last: bool) -> None:
        exchange_gradients(self._model, last)

    def read(self, reading: bool) -> None:
        self._addition.squares.clear()
        self._addition.reading = reading

    def end_batch(self) -> None:
        pass  # the hook has read what there is

    def squares(self) -> Tensor:
        if not self._addition.squares:
            raise RuntimeError(
                "no gradients were added up over the ranks since the last step: call backward on a loss of the "
                "DistributedDataParallel model, outside of no_sync() for the last microbatch of a batch"
            )
        total = torch.zeros(len(self._groups), dtype=torch.float64)
        for squares in self._addition.squares.values():
            for number, square in squares:
                total[number] += square.cpu()
        self._addition.squares.clear()
        return total / self.size  # everybody has all of it

    def close(self) -> None:
        exchange_gradients(self._model, True)
        self._addition.reading = False
        self._addition.share = lambda: 1 / self.size
        self._addition.weights = lambda: None


class _Addition:
    """The hook of a ``DistributedDataParallel`` model; a model takes one hook, which cannot be removed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.share: Callable[[], float] = lambda: 1 / dist.get_world_size(group)
        self.groups: Mapping[int, int] = {}
        self.weights: Callable[[], Callable[[Tensor], Tensor | None] | None] = lambda: None
        self.reading = True
        self.squares: dict[int, list[tuple[int, Tensor]]] = {}
        """‖g‖² by bucket: parameter groups and their parts."""
        self.held: dict[int, Futures] = {}
        """The last sums, by bucket."""


def _addition_in(model: DistributedDataParallel) -> _Addition:
    addition: _Addition | None = getattr(model, _SLOT, None)
    if addition is None:
        if has_communication_hook(model):
            raise ValueError(
                "the DistributedDataParallel model has a communication hook of its own, and cabs needs that place "
                "to weigh gradients by their examples: make the scheduler with a model that has none"
            )
        addition = _Addition(model.process_group)
        # Types that are strings, as in this module, do not pass torch's check of hooks; none at all do.
        model.register_comm_hook(addition, lambda state, bucket: _add_up(state, bucket))
        setattr(model, _SLOT, addition)
    return addition


def _add_up(addition: _Addition, bucket: Any) -> torch.futures.Future[Tensor]:
    """g = Σ_r (n_r / m) g_r instead of the mean over processes."""
    buffer = bucket.buffer().mul_(addition.share())
    number, parameters, gradients = bucket.index(), bucket.parameters(), bucket.gradients()

    def received(summed: Tensor) -> Tensor:
        if addition.reading:
            groups = [addition.groups.get(id(parameter)) for parameter in parameters]
            weigh = addition.weights()
            if weigh is not None:
                weighed = zip(groups, gradients, map(weigh, parameters), strict=True)
                addition.squares[number] = [
                    (group, squared_norm(gradient, weights.detach().to(gradient.device)))
                    for group, gradient, weights in weighed
                    if group is not None and weights is not None  # else the pass is of no use, and says so
                ]
            elif len(set(groups)) == 1 and groups[0] is not None:
                addition.squares[number] = [(groups[0], squared_norm(summed))]
            else:
                addition.squares[number] = [
                    (group, squared_norm(gradient))
                    for group, gradient in zip(groups, gradients, strict=True)
                    if group is not None
                ]
        return summed

    addition.held[number] = all_reduce_then(buffer, addition.group, received)
    return addition.held[number][-1]
