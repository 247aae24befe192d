"""Which processes train a model together."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cabs.parallel.replicas import Replicas
from cabs.parallel.shards import shards_of
from cabs.parallel.team import Groups, Team


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
    return shards_of(model, groups)
