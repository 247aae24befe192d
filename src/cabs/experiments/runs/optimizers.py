"""The optimizers that runs can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from cabs.experiments.errors import named


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """An optimizer.

    Attributes:
        name: The name used on the command line and in a run's configuration.
        label: The name used in tables and pictures.
        make: Makes it, given groups of parameters and a learning rate.
        scaling: Whose learning rate its own goes with as batches grow: SGD's, by m, or Adam's, by its root.
        lr: The learning rate of a run that names none, where the optimizer is not the problem's own.
        lrs: The learning rates of a grid that names none.
    """

    name: str
    label: str
    make: Callable[..., torch.optim.Optimizer]
    scaling: Literal["sgd", "adam"] = "sgd"
    lr: float
    lrs: tuple[float, ...]

    def optimizer(self, network: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """The optimizer of a network's parameters."""
        return self.make(parameter_groups(network, weight_decay), lr=lr)


_KINDS = (
    OptimizerKind(name="sgd", label="SGD", make=torch.optim.SGD, lr=0.1, lrs=(0.3, 0.1, 0.06, 0.03, 0.01, 0.006)),
    OptimizerKind(
        name="momentum",
        label="SGD with momentum 0.9",
        make=partial(torch.optim.SGD, momentum=0.9),
        lr=0.01,
        lrs=(0.03, 0.01, 0.006, 0.003, 0.001, 0.0006),
    ),
    OptimizerKind(
        name="adamw",
        label="AdamW",
        # Nothing decays that is not asked to; torch's own default is 0.01 on everything.
        make=partial(torch.optim.AdamW, weight_decay=0.0),
        scaling="adam",
        lr=0.001,
        lrs=(0.01, 0.003, 0.001, 0.0006, 0.0003, 0.0001),
    ),
)

OPTIMIZERS = {kind.name: kind for kind in _KINDS}
"""The optimizers by name."""


def optimizer_kind(name: str) -> OptimizerKind:
    """The optimizer of this name.

    Raises:
        UsageError: If there is none.
    """
    return named(name, OPTIMIZERS, "optimizer")


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights, which decay, and biases, which do not; one group when nothing decays."""
    if weight_decay == 0:
        return [{"params": list(network.parameters())}]
    weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in network.parameters() if parameter.ndim <= 1]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": biases}]
