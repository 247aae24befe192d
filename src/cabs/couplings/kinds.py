"""The couplings of torch.optim; docs/theory.md derives each of them.

Whatever way an optimizer computes its step (``foreach``, ``fused``, ``capturable``), it keeps the same numbers.
``maximize`` turns the gradient around, which no square sees. Weight decay is no example's gradient.

An element that never had a gradient has no v yet, as all have none before the first step. It is left out, with P = 0:
1/ε, which the formulas say, is no step that the optimizer is ever going to make.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cabs.couplings.base import Coupling, Group, State
from cabs.couplings.registry import register_coupling
from cabs.norms import wide


class AssumedSGD(Coupling):
    """α = lr, P = 1, whatever the optimizer does."""

    diagonal = False


@register_coupling(torch.optim.SGD)
class SGD(Coupling):
    """α = lr, P = 1. With momentum β and dampening d, Nesterov's or not, α = lr (1 − d)/(1 − β)."""

    diagonal = False

    def alpha(self, group: Group, state: State) -> float:
        momentum = group["momentum"]
        if not momentum:  # and then nothing is dampened either
            return float(group["lr"])
        return float(group["lr"]) * (1 - float(group["dampening"])) / (1 - forgets("momentum", momentum))


@register_coupling(torch.optim.Adam, torch.optim.AdamW)
class Adam(Coupling):
    """α = lr, for its average of gradients has unit gain. P = 1/(√v̂ + ε); with amsgrad v is the largest so far."""

    def alpha(self, group: Group, state: State) -> float:
        forgets("betas[0]", group["betas"][0])
        return float(group["lr"])

    def weights(self, group: Group, state: State) -> Tensor | None:
        if not started(state):
            return None
        v = wide(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])
        return inverse(v.sqrt().div_(corrected(group, state)).add_(group["eps"]), where=v)


@register_coupling(torch.optim.NAdam)
class NAdam(Adam):
    """As Adam: (1 − μ) g + μ m has unit gain too, whatever μ is, but for the first few steps."""


@register_coupling(torch.optim.RAdam)
class RAdam(Adam):
    """When it rectifies, by r: α = lr r, P = √(1 − β₂ᵗ)/(√v + ε). Where β₂ is too small for it to ever do, P = 1."""

    def alpha(self, group: Group, state: State) -> float:
        rate = super().alpha(group, state)
        return rate * (self._rectification(group, state) or 1.0) if started(state) else rate

    def weights(self, group: Group, state: State) -> Tensor | None:
        if not started(state):
            return None
        if self._longest(group) <= 5:
            return torch.ones_like(wide(state["exp_avg_sq"]))
        if self._rectification(group, state) is None:
            return None
        v = wide(state["exp_avg_sq"])
        return inverse(v.sqrt().add_(group["eps"]), where=v).mul_(corrected(group, state))

    @staticmethod
    def _longest(group: Group) -> float:
        return 2 / (1 - forgets("betas[1]", group["betas"][1])) - 1

    def _rectification(self, group: Group, state: State) -> float | None:
        t, longest, beta = float(state["step"]), self._longest(group), float(group["betas"][1])
        length = longest - 2 * t * beta**t / (1 - beta**t)
        if length <= 5:
            return None
        return math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))


@register_coupling(torch.optim.Adamax)
class Adamax(Adam):
    """As Adam, with the infinity norm, which has ε in it, for √v̂ + ε."""

    def weights(self, group: Group, state: State) -> Tensor | None:
        forgets("betas[1]", group["betas"][1])
        return inverse(wide(state["exp_inf"]).clone(), where=state["exp_inf"] > group["eps"]) if state else None


@register_coupling(torch.optim.RMSprop)
class RMSprop(Coupling):
    """α = lr, or lr/(1 − β) with momentum β. P = 1/(√v + ε); if centered, v is that about the mean."""

    def alpha(self, group: Group, state: State) -> float:
        return float(group["lr"]) / (1 - forgets("momentum", group["momentum"]))

    def weights(self, group: Group, state: State) -> Tensor | None:
        forgets("alpha", group["alpha"])
        if not started(state):
            return None
        squares = v = wide(state["square_avg"])
        if group["centered"]:
            v = torch.addcmul(v, wide(state["grad_avg"]), wide(state["grad_avg"]), value=-1).clamp_(min=0)
        return inverse(v.sqrt().add_(group["eps"]), where=squares)


@register_coupling(torch.optim.Adagrad)
class Adagrad(Coupling):
    """α = lr/(1 + (t − 1) lr_decay), P = 1/(√sum + ε)."""

    def alpha(self, group: Group, state: State) -> float:
        t = float(state["step"]) if started(state) else 1.0
        return float(group["lr"]) / (1 + (t - 1) * float(group["lr_decay"]))

    def weights(self, group: Group, state: State) -> Tensor | None:
        if not started(state):
            return None
        return inverse(wide(state["sum"]).sqrt().add_(group["eps"]), where=state["sum"])


def started(state: State) -> bool:
    """Whether a parameter has been stepped. Adagrad has its state before that."""
    # Where a device keeps the number of steps (fused, capturable), nobody waits for it: state is made at the first.
    step = state.get("step", 0)
    return step.device.type != "cpu" or bool(step > 0) if isinstance(step, Tensor) else step > 0


def forgets(name: str, beta: Any) -> float:
    """The part of an average that is kept at every step, which must leave some room for what is new."""
    if not 0 <= float(beta) < 1:
        raise ValueError(
            f"the optimizer's {name} is {float(beta):g}: an average that keeps all of the past never follows the "
            "gradient, and a step has no α then; it must be at least 0 and below 1"
        )
    return float(beta)


def corrected(group: Group, state: State) -> Any:
    """√(1 − β₂ᵗ): a number, or a tensor where a device keeps t."""
    beta, t = forgets("betas[1]", group["betas"][1]), state["step"]
    if isinstance(t, Tensor) and t.device.type != "cpu":
        return (1 - beta**t).sqrt()
    return math.sqrt(1 - beta ** float(t))


def inverse(denominator: Tensor, where: Tensor) -> Tensor:
    """1 over what a step is divided by, in its place; 0 where there is none yet."""
    found = denominator.reciprocal_()
    local = where.device.type == "cpu" and not where.is_complex() and not hasattr(where, "to_local")
    if local and where.numel() and bool(where.amin() > 0):
        return found  # which is the rule, and sooner known than masked; elsewhere it would have to be waited for
    return found.mul_(where != 0)
