"""Several processes that train one model together: how their gradients become one, and what they tell one another.

With shares of n_w examples out of m, the batch's gradient is g = Σ_w (n_w / m) g_w. Two kinds of teams make it so:
replicas of the whole model (``DistributedDataParallel``), and shards of it (``fully_shard``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cabs.exchange import Futures, all_reduce_then, start_all_reduce
from cabs.loader.sharing import Delivery
from cabs.variance.factors import squared_norm

Groups = Sequence[Sequence[Tensor]]
_SLOT = "_cabs_addition"


class Team(ABC):
    """The processes that share every batch.

    Attributes:
        rank: this process's number.
        size: how many there are.
        delivery: what the loader has handed out for the step at hand; None if shares are taken to be equal.
    """

    def __init__(self, group: dist.ProcessGroup | None, groups: Groups) -> None:
        self._group = group
        self._groups = groups
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.delivery: Callable[[], Delivery | None] = lambda: None
        on_cpu = dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if on_cpu else next(p.device for group in groups for p in group)

    def start_sum(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Begins to add up a few numbers of all workers; the function returned waits for the sums."""
        return start_all_reduce(numbers.detach().to(self._device, torch.float64), group=self._group)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sums of a few numbers over all workers, the same everywhere to the last bit."""
        return self.start_sum(numbers)()

    def largest(self, number: float) -> float:
        """The largest of the workers' numbers."""
        message = torch.tensor([number], dtype=torch.float64, device=self._device)
        return start_all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)().item()

    def of_first(self, number: int) -> int:
        """The first worker's number."""
        message = torch.tensor([number if self.rank == 0 else 0], device=self._device)
        return int(start_all_reduce(message, group=self._group)().item())

    def share(self) -> float:
        """n_w / m."""
        delivery = self.delivery()
        return 1 / self.size if delivery is None or not delivery.examples else delivery.share / delivery.examples

    @abstractmethod
    def loss_weight(self) -> float:
        """What a worker multiplies the mean loss of its share by."""

    @abstractmethod
    def begin_piece(self, last: bool) -> None:
        """Told before the forward pass of every piece; gradients are exchanged with the last."""

    @abstractmethod
    def read(self, reading: bool) -> None:
        """Told whether ``squares`` of the next batch will be asked for."""

    @abstractmethod
    def end_batch(self) -> None:
        """Told after the backward pass of the last piece, where the scheduler makes it."""

    @abstractmethod
    def squares(self) -> Tensor:
        """What adds up to ‖g‖² of each parameter group over the workers."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the model as it was found."""


class Replicas(Team):
    """Every process has the whole model; gradients are weighed where they are added up."""

    def __init__(self, model: DistributedDataParallel, groups: Groups) -> None:
        super().__init__(model.process_group, groups)
        self._model = model
        self._addition = _addition_in(model)
        self._addition.share = self.share
        self._addition.groups = {id(p): number for number, group in enumerate(groups) for p in group}

    def loss_weight(self) -> float:
        return 1.0

    def begin_piece(self, last: bool) -> None:
        self._model.require_backward_grad_sync = last

    def read(self, reading: bool) -> None:
        self._addition.squares.clear()
        self._addition.reading = reading

    def end_batch(self) -> None:
        pass  # the hook has read what there is

    def squares(self) -> Tensor:
        if not self._addition.squares:
            raise RuntimeError(
                "no gradients were added up over the workers since the last step: call backward on a loss of the "
                "DistributedDataParallel model, outside of no_sync() for the last piece of a batch"
            )
        total = torch.zeros(len(self._groups), dtype=torch.float64)
        for squares in self._addition.squares.values():
            for number, square in squares:
                total[number] += square.cpu()
        self._addition.squares.clear()
        return total / self.size  # everybody has all of it

    def close(self) -> None:
        self._model.require_backward_grad_sync = True
        self._addition.reading = False
        self._addition.share = lambda: 1 / self.size


class _Addition:
    """What the hook of a ``DistributedDataParallel`` model does; a model takes one hook, for good."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.share: Callable[[], float] = lambda: 1 / dist.get_world_size(group)
        self.groups: Mapping[int, int] = {}
        self.reading = True
        self.squares: dict[int, list[tuple[int, Tensor]]] = {}
        """‖g‖² by bucket: parameter groups and their parts."""
        self.held: dict[int, Futures] = {}
        """The last sums, by bucket."""


def _addition_in(model: DistributedDataParallel) -> _Addition:
    addition: _Addition | None = getattr(model, _SLOT, None)
    if addition is None:
        if model._comm_hooks:
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
    """g = Σ_w (n_w / m) g_w, in the place of the mean over workers."""
    buffer = bucket.buffer().mul_(addition.share())
    number, parameters, gradients = bucket.index(), bucket.parameters(), bucket.gradients()

    def received(summed: Tensor) -> Tensor:
        if addition.reading:
            groups = [addition.groups.get(id(parameter)) for parameter in parameters]
            if len(set(groups)) == 1 and groups[0] is not None:
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


class Shards(Team):
    """Every process has a part of each parameter; the shares' weights are in the losses."""

    def __init__(self, roots: Sequence[Any], mesh: Any, groups: Groups) -> None:
        super().__init__(mesh.get_group(), groups)
        self._roots = roots
        self._reading = True
        self._squares: Tensor | None = None

    def loss_weight(self) -> float:
        return self.share() * self.size  # of the mean over workers that fully_shard makes

    def begin_piece(self, last: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)

    def read(self, reading: bool) -> None:
        self._reading = reading

    def end_batch(self) -> None:
        # Here and now, for gradients may be clipped before the scheduler's step.
        self._squares = torch.stack([self._square(group) for group in self._groups]) if self._reading else None

    def _square(self, group: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in group:
            if parameter.grad is not None:
                total += squared_norm(parameter.grad.to_local()).to(total)  # type: ignore[attr-defined]
        return total

    def squares(self) -> Tensor:
        if self._squares is None:
            raise RuntimeError(
                "with fully_shard the weights of the workers' shares belong into the loss: call "
                "scheduler.backward(loss) in the place of loss.backward(), and scheduler.step()"
            )
        squares, self._squares = self._squares, None
        return squares

    def close(self) -> None:
        self.begin_piece(last=True)


def team_of(model: nn.Module, groups: Groups) -> Team | None:
    """The team that trains a model, if one does.

    Args:
        model: the module that is trained.
        groups: its parameters, in the optimizer's groups.

    Raises:
        NotImplementedError: the model is spread over processes in a way that cannot be measured.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise NotImplementedError(
            "FullyShardedDataParallel flattens parameters, whose examples cannot be told apart then: use "
            "torch.distributed.fsdp.fully_shard"
        )
    if len(replicas) > 1:
        raise NotImplementedError("the model has several DistributedDataParallel parts: wrap the whole of it, once")
    if replicas:
        return Replicas(replicas[0], groups) if dist.get_world_size(replicas[0].process_group) > 1 else None
    return _shards_of(model, groups)


def _shards_of(model: nn.Module, groups: Groups) -> Team | None:
    meshes = {getattr(parameter, "device_mesh", None) for parameter in model.parameters()}
    if meshes == {None} or not meshes:
        return None
    if len(meshes) > 1 or any(mesh is not None and mesh.ndim > 1 for mesh in meshes):
        raise NotImplementedError(
            "the model's parameters are spread over several process groups (hybrid sharding, tensor parallelism, or "
            "only a part of it is sharded): call fully_shard on the whole model with a one-dimensional mesh"
        )
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise NotImplementedError("parameters are DTensors, but not fully_shard's: this cannot be measured")
    inner = {id(part) for module in sharded for part in module.modules() if part is not module}
    return Shards([module for module in sharded if id(module) not in inner], next(iter(meshes)), groups)
