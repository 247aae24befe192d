"""Algorithm 1 with couplings, worked by a loop over single examples: nothing of the library but torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cabs import AdaptiveLoader, BatchSizeScheduler, rules

MU, LEAST, MOST = 0.8, 3, 14
Alpha = Callable[[dict[str, Any], dict[str, Any]], float]
Diagonal = Callable[[dict[str, Any], dict[str, Any]], Tensor | None]


def guarded(denominator: Tensor, v: Tensor) -> Tensor:
    return torch.where(v == 0, 0.0, 1 / denominator)


def adam(g: dict[str, Any], s: dict[str, Any]) -> Tensor | None:
    if not s:
        return None
    v = s["max_exp_avg_sq"] if g.get("amsgrad") else s["exp_avg_sq"]
    return guarded((v / (1 - g["betas"][1] ** s["step"].item())).sqrt() + g["eps"], v)


def radam_length(g: dict[str, Any], s: dict[str, Any]) -> tuple[float, float]:
    beta, t = g["betas"][1], s["step"].item()
    longest = 2 / (1 - beta) - 1
    return longest - 2 * t * beta**t / (1 - beta**t), longest


def radam_alpha(g: dict[str, Any], s: dict[str, Any]) -> float:
    if not s or (rho := radam_length(g, s))[0] <= 5:
        return float(g["lr"])
    rho_t, rho_inf = rho
    return g["lr"] * math.sqrt((rho_t - 4) * (rho_t - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho_t))


def radam(g: dict[str, Any], s: dict[str, Any]) -> Tensor | None:
    if not s:
        return None
    rho_t, rho_inf = radam_length(g, s)
    if rho_inf <= 5:
        return torch.ones_like(s["exp_avg_sq"])
    v, corrected = s["exp_avg_sq"], math.sqrt(1 - g["betas"][1] ** s["step"].item())
    return None if rho_t <= 5 else corrected * guarded(v.sqrt() + g["eps"], v)


def rmsprop(g: dict[str, Any], s: dict[str, Any]) -> Tensor | None:
    if not s:
        return None
    v = s["square_avg"] - s["grad_avg"] ** 2 if g["centered"] else s["square_avg"]
    return guarded(v.sqrt() + g["eps"], s["square_avg"])


def lr(g: dict[str, Any], s: dict[str, Any]) -> float:
    return float(g["lr"])


ONE: Diagonal = lambda g, s: torch.ones(())  # noqa: E731
O = torch.optim  # noqa: E741


@dataclass(frozen=True)
class Kind:
    """An optimizer with its options, and α and P written down once more."""

    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    alpha: Alpha = lr
    diagonal: Diagonal = adam
    share: float = 0.004
    """ρ: small enough for sizes that move, though the learning rate is a calm one that forgives rounding."""


KINDS = {
    "sgd": Kind(O.SGD, {"lr": 0.1}, diagonal=ONE),
    "momentum": Kind(O.SGD, {"lr": 0.02, "momentum": 0.8}, lambda g, s: g["lr"] / 0.2, ONE),
    "dampened": Kind(O.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.5}, lambda g, s: g["lr"] * 0.5 / 0.2, ONE),
    "nesterov": Kind(O.SGD, {"lr": 0.02, "momentum": 0.8, "nesterov": True}, lambda g, s: g["lr"] / 0.2, ONE),
    "adam": Kind(O.Adam, {"lr": 0.01}, share=0.015),
    "adam, amsgrad": Kind(O.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}, share=0.015),
    "adamw": Kind(O.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}, share=0.015),
    "adamw, fused": Kind(O.AdamW, {"lr": 0.01, "fused": True}, share=0.015),
    "nadam": Kind(O.NAdam, {"lr": 0.01}, share=0.015),
    "radam": Kind(O.RAdam, {"lr": 0.03}, radam_alpha, radam),
    "radam, never": Kind(O.RAdam, {"lr": 0.1, "betas": (0.9, 0.6)}, radam_alpha, radam),
    "adamax": Kind(
        O.Adamax,
        {"lr": 0.02},
        diagonal=lambda g, s: guarded(s["exp_inf"], s["exp_inf"] > g["eps"]) if s else None,
    ),
    "rmsprop": Kind(O.RMSprop, {"lr": 0.005}, diagonal=rmsprop, share=0.01),
    "rmsprop, all of it": Kind(
        O.RMSprop, {"lr": 0.001, "momentum": 0.8, "centered": True, "alpha": 0.9}, lambda g, s: g["lr"] / 0.2, rmsprop
    ),
    "adagrad": Kind(
        O.Adagrad,
        {"lr": 0.05, "lr_decay": 0.01},
        lambda g, s: g["lr"] / (1 + (max(1.0, s["step"].item()) - 1) * 0.01),
        lambda g, s: guarded(s["sum"].sqrt() + g["eps"], s["sum"]) if s["step"] > 0 else None,
        share=0.001,
    ),
}  # fmt: skip


def data(length: int = 400) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(length, 8, dtype=torch.float64, generator=generator)
    inputs[:, 3] *= torch.rand(length, generator=generator) > 0.9  # nothing for a while
    truth = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    noise = 2 * torch.randn(length, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, (inputs @ truth + noise).argmax(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def optimizer_of(model: nn.Module, kind: Kind, groups: bool) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if not groups:
        return kind.make(parameters, **kind.options)
    return kind.make(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": kind.options["lr"] / 3}], **kind.options
    )


def by_hand(kind: Kind, steps: int, groups: bool) -> list[int]:
    """The sizes of Algorithm 1: m = Σ_g α_g ξ_g / F_avg, with P of the last step made before the gradients were."""
    model, (inputs, targets) = network(), data().tensors
    optimizer = optimizer_of(model, kind, groups)
    m, position, f_avg, xi, sizes = LEAST, 0, 0.0, [0.0] * len(optimizer.param_groups), [LEAST]
    for _ in range(steps):
        indices = [(position + i) % len(inputs) for i in range(m)]
        position += m
        losses, gradients = [], []
        for i in indices:
            loss = F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])
            losses.append(loss.item())
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        by_parameter = dict(zip(model.parameters(), map(torch.stack, zip(*gradients, strict=True)), strict=True))
        traces: list[float] | None = []
        for group in optimizer.param_groups:
            trace = 0.0
            for p in group["params"]:
                g, diagonal = by_parameter[p], kind.diagonal(group, optimizer.state.get(p, {}))
                if diagonal is None:
                    traces = None
                    break
                trace += (diagonal * (g.square().mean(0) - g.mean(0).square())).sum().item()
            if traces is None:
                break
            traces.append(trace)
        for p, g in by_parameter.items():
            p.grad = g.mean(0)
        optimizer.step()
        if traces is not None:
            f_avg = MU * f_avg + (1 - MU) * sum(losses) / m
            xi = [MU * old + (1 - MU) * new for old, new in zip(xi, traces, strict=True)]
            alphas = [kind.alpha(g, optimizer.state.get(g["params"][0], {})) for g in optimizer.param_groups]
            raw = sum(a * x for a, x in zip(alphas, xi, strict=True)) / (4 * kind.share * f_avg)
            m = max(LEAST, min(MOST, int(raw + 0.5)))
        sizes.append(m)
    return sizes


@dataclass
class Run:
    """The same by the library, all objects anew where a run is resumed."""

    kind: Kind
    groups: bool = False
    microbatch_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model

    def __post_init__(self) -> None:
        self.model = network()
        whole = self.wrap(self.model)
        self.forward = whole
        self.optimizer = optimizer_of(self.model, self.kind, self.groups)
        self.loader = AdaptiveLoader(data(), batch_size=LEAST, stream=True, max_microbatch_size=self.microbatch_size)
        self.scheduler = BatchSizeScheduler(
            whole,
            self.optimizer,
            self.loader,
            rules.CABS(noise_share=self.kind.share),
            **{
                "min_batch_size": LEAST,
                "max_batch_size": MOST,
                "smoothing": MU,
                "max_examples": None,
                "measure_every": 1,
                **self.options,
            },  # type: ignore[arg-type]
        )

    def train(self, steps: int) -> list[int]:
        sizes = []
        for _, batch in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            for inputs, targets in [batch] if self.microbatch_size is None else batch:
                self.scheduler.backward(F.cross_entropy(self.forward(inputs), targets))
            self.optimizer.step()
            sizes.append(self.scheduler.step())
        return sizes

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loader": self.loader.state_dict(),
        }

    def load(self, state: dict[str, Any], order: list[str]) -> None:
        for name in order:
            getattr(self, name).load_state_dict(state[name])
