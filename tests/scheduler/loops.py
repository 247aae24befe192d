"""A small problem whose batch sizes can be computed by hand: Algorithm 1 with a loop over single examples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader
from cabs.rules import round_and_clip
from cabs.variance.reference import per_example_gradients

LEAST, MOST, MU, ALPHA = 4, 64, 0.7, 2.0


def data(length: int = 200) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(length, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (length,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class ByHand:
    """Algorithm 1 to the letter, on the examples that really went into each step."""

    def __init__(self) -> None:
        self.xi = self.loss = 0.0
        self.examples_total = 0

    def size(self, model: nn.Module, inputs: Tensor, targets: Tensor, multiple_of: int = 1) -> int:
        """The next size, from the examples of a step, before the optimizer moves the weights."""
        m = len(inputs)

        def loss_of(i: int) -> Tensor:
            return F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])

        gradients = per_example_gradients(loss_of, model.parameters(), m)
        flat = torch.cat([g.reshape(m, -1) for g in gradients], 1)
        variance = float(flat.square().sum(1).mean() - flat.mean(0).square().sum())
        with torch.no_grad():
            loss = float(F.cross_entropy(model(inputs), targets))
        self.xi = MU * self.xi + (1 - MU) * variance
        self.loss = MU * self.loss + (1 - MU) * loss
        self.examples_total += m
        return round_and_clip(ALPHA * self.xi / self.loss, LEAST, MOST, multiple_of)


class Loop:
    """Model, optimizer, loader and scheduler, everything measured at every step unless told otherwise."""

    def __init__(self, length: int = 200, loader: dict[str, Any] | None = None, **options: Any) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=ALPHA)
        self.loader = AdaptiveLoader(
            data(length), batch_size=8, shuffle=True, seed=2, **{"stream": True, **(loader or {})}
        )
        settings = {"min_batch_size": LEAST, "max_batch_size": MOST, "smoothing": MU, "measure_every": 1}
        self.scheduler = CABS(self.model, self.optimizer, self.loader, **{**settings, **options})
        self.batches = iter(self.loader)

    def next(self) -> tuple[Tensor, Tensor]:
        inputs, targets = next(self.batches)
        return inputs, targets

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs), targets)

    def by_hand(self, hand: ByHand, inputs: Tensor, targets: Tensor, multiple_of: int = 1) -> int:
        assert self.scheduler.variance is not None
        with self.scheduler.variance.paused():
            return hand.size(self.model, inputs, targets, multiple_of)

    def gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        found = torch.autograd.grad(self.losses(inputs, targets), list(self.model.parameters()))
        return torch.cat([g.flatten() for g in found])
