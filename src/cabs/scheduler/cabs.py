"""The paper's scheduler: m = α tr Σ / F at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cabs import rules
from cabs.couplings import Coupling
from cabs.scheduler.requirements import HasBatchSize
from cabs.scheduler.scheduler import BatchSizeScheduler


class CABS(BatchSizeScheduler):
    """Couples the batch size to the learning rate: m = α tr Σ / F at every step.

    Takes what ``BatchSizeScheduler`` takes but for the rule.

    Args:
        model: the module that is trained.
        optimizer: SGD, with momentum or not, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, or one whose
            coupling is known (``cabs.couplings``). α is read at every step, so schedules may move learning rates.
        loader: what has the ``batch_size`` to move, an ``AdaptiveLoader``.
        loss_floor: F_*, a lower bound of the loss that training cannot get below.
        noise_share: ρ, the share of the loss that may be gradient noise, m = α tr Σ / 4ρF. A quarter, as in the paper,
            if you do not say; half with ``cost="measured"``.
        budget: the examples that training will see, all of them: then ρ moves, more noise for most of the way and
            less at the end, and the last batch ends just there. A run without an end has none.
        cost: what a step costs: ``"examples"``, as in the paper; ``"measured"``, seconds while training, by examples
            until they can be told; or (c₀, c₁) for c₀ + c₁m in any unit.
        small_data: correct for batches drawn without replacement, where the loader knows how many examples there are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: HasBatchSize | None,
        *,
        loss_floor: float = 0.0,
        noise_share: float | None = None,
        budget: int | None = None,
        cost: Literal["examples", "measured"] | tuple[float, float] = "examples",
        small_data: bool = False,
        min_batch_size: int = 16,
        max_batch_size: int = 2048,
        smoothing: float = 0.95,
        estimator: str = "exact",
        max_examples: int | Literal["auto"] | None = "auto",
        measure_every: int | Literal["auto"] = "auto",
        accumulation: int = 1,
        monitor_only: bool = False,
        assume_sgd: bool = False,
        coupling: Coupling | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        multiple_of: int = 1,
        trial: Callable[[Any], Tensor] | None = None,
        check_owners: bool = True,
        keep_half_lives: int | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            loader,
            rules.CABS(loss_floor, noise_share=noise_share, budget=budget, cost=cost, small_data=small_data),
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            smoothing=smoothing,
            estimator=estimator,
            max_examples=max_examples,
            measure_every=measure_every,
            accumulation=accumulation,
            monitor_only=monitor_only,
            assume_sgd=assume_sgd,
            coupling=coupling,
            grad_scaler=grad_scaler,
            multiple_of=multiple_of,
            trial=trial,
            check_owners=check_owners,
            keep_half_lives=keep_half_lives,
        )
