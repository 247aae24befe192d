"""Shards of the model: ``fully_shard``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cabs.norms import squared_norm
from cabs.parallel.team import Groups, Team


class Shards(Team):
    """Every process has a part of each parameter; losses are weighed, not gradients."""

    def __init__(self, roots: Sequence[Any], mesh: Any, groups: Groups) -> None:
        super().__init__(mesh.get_group(), groups)
        self._roots = roots
        self._reading = True
        self._squares: Tensor | None = None

    def loss_weight(self) -> float:
        return self.share * self.size  # of the mean over ranks that fully_shard makes

    def begin_microbatch(self, last: bool) -> None:
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
                total += self._weighed(parameter, parameter.grad).to(total)
        return total

    def _weighed(self, parameter: Tensor, gradient: Any) -> Tensor:
        if self.weights is None:
            return squared_norm(gradient.to_local())
        weights: Any = self.weights(parameter)  # in shards, as the parameter is
        return torch.zeros(()) if weights is None else squared_norm(gradient.to_local(), weights.to_local())

    def squares(self) -> Tensor:
        if self._squares is None:
            raise RuntimeError(
                "with fully_shard the loss has to be weighed by the examples of the rank: call "
                "scheduler.backward(loss) instead of loss.backward(), then scheduler.step()"
            )
        squares, self._squares = self._squares, None
        return squares

    def close(self) -> None:
        self.begin_microbatch(last=True)


def shards_of(model: nn.Module, groups: Groups) -> Team | None:
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
