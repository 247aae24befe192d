"""Comparison with the loop over single examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cabs import GradientVariance
from cabs.variance.reference import Reference, reference
from cases import losses


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def by_loop(
    model: nn.Module,
    inputs: Tensor,
    dim: int = 0,
    groups: list[list[Tensor]] | None = None,
    weights: dict[Tensor, Tensor] | None = None,
) -> Reference:
    def loss_of(example: int) -> Tensor:
        return losses(model(inputs.narrow(dim, example, 1)), dim).sum()

    return reference(loss_of, groups or [trained(model)], inputs.shape[dim], weights)


def assert_equal(variance: GradientVariance, expected: Reference, rtol: float = 1e-10) -> None:
    scale = float(expected.squared_norms.mean())
    close = {"rtol": rtol, "atol": rtol * scale}
    torch.testing.assert_close(variance.squared_norms(), expected.squared_norms, **close)
    torch.testing.assert_close(variance.mean_squared_norm, expected.mean_squared_norm, **close)
    torch.testing.assert_close(variance.trace(), expected.trace, **close)
    torch.testing.assert_close(variance.traces(), expected.traces, **close)


def measure(model: nn.Module, inputs: Tensor, dim: int = 0, **options: object) -> GradientVariance:
    """Measures a batch, as the second of its kind: what is kept of the first must not spoil it."""
    with GradientVariance(model, batch_dim=dim, **options) as variance:  # type: ignore[arg-type]
        for batch in (inputs.flip(dim), inputs):
            variance.reset()
            model.zero_grad()
            losses(model(batch), dim).mean().backward()
    return variance


__all__ = ["assert_equal", "by_loop", "measure", "pytest", "trained"]
