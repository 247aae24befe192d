"""The processes that share every batch.

With shares of n_r examples out of m, the batch's gradient is g = Σ_r (n_r / m) g_r. Two kinds of teams make it so:
replicas of the whole model (``DistributedDataParallel``), and shards of it (``fully_shard``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cabs.parallel.sums import start_all_reduce

Groups = Sequence[Sequence[Tensor]]


class Team(ABC):
    """The processes that share every batch.

    Attributes:
        rank: this process's number.
        size: how many there are, the world size.
        share: n_r / m of the step at hand, equal shares unless told otherwise.
        weights: what the squares of a parameter's gradient are multiplied by, if by anything.
    """

    def __init__(self, group: dist.ProcessGroup | None, groups: Groups) -> None:
        self._group = group
        self._groups = groups
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.share = 1 / self.size
        self.weights: Callable[[Tensor], Tensor | None] | None = None
        on_cpu = dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if on_cpu else next(p.device for group in groups for p in group)

    def start_sum(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Begins to add up a few numbers of all ranks; the function returned waits for the sums."""
        return start_all_reduce(numbers.detach().to(self._device, torch.float64), group=self._group)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sums of a few numbers over all ranks, equal on all of them to the last bit."""
        return self.start_sum(numbers)()

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        message = torch.tensor([number], dtype=torch.float64, device=self._device)
        return start_all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)().item()

    def least(self, numbers: Tensor) -> Tensor:
        """The least of the ranks' numbers, one by one."""
        message = numbers.detach().to(self._device, torch.float64)
        return start_all_reduce(message, op=dist.ReduceOp.MIN, group=self._group)()

    def of_first(self, number: int) -> int:
        """The first rank's number."""
        message = torch.tensor([number if self.rank == 0 else 0], device=self._device)
        return int(start_all_reduce(message, group=self._group)().item())

    @abstractmethod
    def loss_weight(self) -> float:
        """What a rank multiplies the mean loss of its share by."""

    @abstractmethod
    def begin_microbatch(self, last: bool) -> None:
        """Told before the forward pass of every microbatch; gradients are exchanged with the last."""

    @abstractmethod
    def read(self, reading: bool) -> None:
        """Told whether ``squares`` of the next batch will be asked for."""

    @abstractmethod
    def end_batch(self) -> None:
        """Told after the backward pass of the last microbatch, where the scheduler makes it."""

    @abstractmethod
    def squares(self) -> Tensor:
        """What adds up to ‖g‖², weighted if need be, of each parameter group over the ranks."""

    @abstractmethod
    def close(self) -> None:
        """Restores the model."""
