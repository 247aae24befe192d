"""What a step showed: F, tr Σ and ‖g‖² of one batch, however many pieces and workers it was spread over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cabs.checks import HasBatchSize
from cabs.distributed import Team
from cabs.loader import AdaptiveLoader
from cabs.loader.sharing import Delivery
from cabs.variance import GradientVariance


@dataclass(frozen=True)
class Observation:
    """One step's F, tr Σ_g and ‖g_g‖², g being the parameter groups."""

    examples: int
    loss: float
    variances: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    @classmethod
    def of_list(cls, numbers: list[float] | None) -> Observation | None:
        """What a state has of a measurement that is held: its examples, variances and norms."""
        if numbers is None:
            return None
        examples, *rest = numbers
        groups = len(rest) // 2
        return cls(int(examples), math.nan, tuple(rest[:groups]), tuple(rest[groups:]))

    def to_list(self) -> list[float]:
        """The inverse of ``of_list``."""
        return [self.examples, *self.variances, *self.norms]

    @property
    def true_norms(self) -> tuple[float, ...]:
        # E‖g‖² = ‖∇F‖² + tr Σ / m, and the biased trace is short by a factor (m − 1) / m.
        return tuple(n - v / (self.examples - 1) for n, v in zip(self.norms, self.variances, strict=True))


class Observer:
    """Follows the losses and gradients of a batch, piece by piece, and adds them up over workers.

    Args:
        loader: where the batches come from.
        variance: what measures gradients; None if nothing does.
        team: the workers that share the batches, if there are several.
        grad_scaler: the scaler of losses, if one is in use.
    """

    def __init__(
        self,
        loader: HasBatchSize | None,
        variance: GradientVariance | None,
        team: Team | None,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._loader = loader if isinstance(loader, AdaptiveLoader) else None
        self._variance = variance
        self._team = team
        self._grad_scaler = grad_scaler
        self._measures = variance is not None
        self._losses: Tensor | float = 0.0
        self._backwarded = 0
        self._exchange: Callable[[], Tensor] | None = None
        if self._loader is None:
            return
        self._loader.on_piece = self._begin_piece
        # One process has nothing but pieces to compare.
        compares = variance is not None and variance.estimator == "microbatch" and team is None
        self._loader.least_pieces = 2 if compares else 1
        if team is not None:
            order = self._loader.state_dict()["seed"]
            self._loader.share(team.rank, team.size, seed=team.of_first(order))
            team.delivery = self._delivery

    def measure(self, measures: bool) -> None:
        """Whether the variance of the next batch is to be measured."""
        self._measures = measures
        if self._variance is not None:
            self._variance.pause(not measures)
        if self._team is not None:
            self._team.read(measures)

    def backward(self, loss: Tensor) -> None:
        """Calls ``backward`` on the loss of a piece, weighed so that the pieces make up the batch's mean."""
        delivery = self._delivery()
        if delivery is None or not delivery.examples:
            raise RuntimeError(
                "scheduler.backward(loss) weighs the loss of what cabs.AdaptiveLoader handed out last, and there is "
                "nothing: take batches from the loader that the scheduler was made with"
            )
        if loss.dim() == 1 and len(loss) != max(1, delivery.piece):
            raise ValueError(f"the loss has {len(loss)} entries for a piece of {delivery.piece} examples")
        mean = mean_loss(loss)
        last = delivery.pieces_left == 0
        if delivery.piece:
            self._losses = self._losses + delivery.piece * mean.detach().double()
        self._backwarded += delivery.piece
        weight = delivery.piece / delivery.share if delivery.share else 0.0
        if self._team is not None:
            weight *= self._team.loss_weight()
            if self._variance is not None and delivery.share:
                self._variance.loss_weight = self._team.loss_weight()
            if last and not self._measures:
                # On its way while the backward pass runs.
                self._exchange = self._team.start_sum(_numbers(delivery.share, self._losses))
        weighed = mean * weight
        (weighed if self._grad_scaler is None else self._grad_scaler.scale(weighed)).backward()
        if self._variance is not None and delivery.share and not delivery.piece:
            self._variance.drop_last_pass()  # which only kept the others company
        if last and self._team is not None:
            self._team.end_batch()

    def observe(self, loss: Tensor | float | None, held: Observation | None) -> Observation | None:
        """The step's numbers; None if there is nothing to learn from.

        Args:
            loss: the loss of the batch, or None if its pieces went through ``backward``.
            held: the last measurement, which stands in where nothing was measured.
        """
        try:
            mean = self._mean_of_share(loss)
            observed = self._alone(mean, held) if self._team is None else self._together(mean, held)
        finally:
            self.forget()
        if observed is not None and not all(map(math.isfinite, observed.variances + observed.norms)):
            if self._grad_scaler is not None:
                return None  # the scaler found the same and skips the step
            raise ValueError(
                "the gradients are not finite: the step has diverged or overflowed; lower the learning rate, and with "
                "mixed precision pass grad_scaler so that skipped steps are skipped here too"
            )
        return observed

    def forget(self) -> None:
        """Begins a new batch."""
        self._losses, self._backwarded, self._exchange = 0.0, 0, None
        if self._loader is not None:
            self._loader.delivery = Delivery()
        if self._variance is not None:
            self._variance.reset()

    def close(self) -> None:
        """Lets go of the loader and the team."""
        if self._loader is not None:
            self._loader.on_piece, self._loader.least_pieces = None, 1
        if self._team is not None:
            self._team.close()

    def _begin_piece(self, piece: Any, last: bool) -> None:
        delivery = self._delivery()
        assert delivery is not None
        if self._variance is not None:
            self._variance.batch_share = delivery.fraction
            self._variance.expect(piece, max(1, delivery.piece))
        if self._team is not None:
            self._team.begin_piece(last)

    def _delivery(self) -> Delivery | None:
        return None if self._loader is None else self._loader.delivery

    def _mean_of_share(self, loss: Tensor | float | None) -> Tensor | float:
        """F of this worker's examples."""
        delivery = self._delivery()
        if loss is None:
            if delivery is None or not delivery.examples or (delivery.share and not self._backwarded):
                raise RuntimeError("step() without a loss goes with scheduler.backward(loss) for every piece before it")
            if self._backwarded != delivery.share:
                raise RuntimeError(
                    f"{self._backwarded} of the batch's {delivery.share} examples went through scheduler.backward: "
                    "call it once for each piece of the batch, then step()"
                )
            return self._losses / max(1, self._backwarded)
        if self._backwarded:
            raise RuntimeError("the losses of the batch went through scheduler.backward: call step() without one")
        if self._loader is not None and self._loader.max_microbatch_size is not None and delivery != Delivery():
            raise RuntimeError(
                "batches come in pieces (max_microbatch_size): call scheduler.backward(loss) for each of them in the "
                "place of loss.backward(), then scheduler.step() without a loss"
            )
        examples = 0 if self._variance is None else self._variance.examples
        if isinstance(loss, Tensor) and loss.dim() == 1 and examples and len(loss) != examples:
            raise ValueError(f"the loss has {len(loss)} entries for a batch of {examples} examples")
        return mean_loss(loss.detach()) if isinstance(loss, Tensor) else float(loss)

    def _alone(self, mean: Tensor | float, held: Observation | None) -> Observation | None:
        """In one transfer from the device."""
        if self._variance is None:
            return Observation(0, float(mean))
        if not self._measures:
            assert held is not None
            return replace(held, loss=float(mean))
        examples = self._examples(self._variance)
        if examples == 1:
            return None  # the last example of an epoch, alone, has no variance
        traces, norms = self._variance.traces(), self._variance.mean_squared_norms()
        numbers = torch.cat([torch.as_tensor(mean).reshape(1).to(traces), traces, norms]).tolist()
        groups = len(traces)
        return Observation(examples, numbers[0], tuple(numbers[1 : 1 + groups]), tuple(numbers[1 + groups :]))

    def _together(self, mean: Tensor | float, held: Observation | None) -> Observation | None:
        """In one sum over the workers."""
        assert self._team is not None
        delivery = self._delivery()
        if not self._measures:
            if self._exchange is None:
                share = 1 if delivery is None or not delivery.examples else delivery.share
                self._exchange = self._team.start_sum(_numbers(share, share * mean if share else 0.0))
            examples, loss = self._exchange().tolist()
            loss /= examples
            return Observation(0, loss) if held is None else replace(held, loss=loss)
        variance = self._variance
        assert variance is not None
        seen = self._examples(variance)
        share = seen if delivery is None or not delivery.examples else delivery.share
        if share and share != seen:
            raise RuntimeError(
                f"the model saw {seen} examples where the loader handed out {share} to this worker: with several "
                "workers all of them must go through the model, along its inputs' first dimension"
            )
        sums, squares = variance.sums(), variance.unscaled(self._team.squares())
        parts = [
            _numbers(share, share * mean if share else 0.0, variance.penalized),
            squares.cpu(),
            sums.cpu() if share else torch.zeros(len(sums)),
        ]
        total = self._team.sum(torch.cat([part.double() for part in parts])).cpu()
        examples, loss, penalized = total[:3].tolist()
        if penalized:
            raise RuntimeError(
                "a penalty in the loss cannot be told apart from the examples' gradients once workers have added them "
                "up: use the optimizer's weight_decay"
            )
        if examples == 1:
            return None
        norms, sums = total[3:].split([len(squares), len(sums)])
        traces = variance.traces_of(sums, norms, int(examples))
        return Observation(int(examples), loss / examples, tuple(traces.tolist()), tuple(norms.tolist()))

    def _examples(self, variance: GradientVariance) -> int:
        if variance.examples == 0:
            raise RuntimeError(
                "no backward pass of the model since the last step: call scheduler.step(loss) after loss.backward()"
            )
        return variance.examples


def mean_loss(loss: Tensor) -> Tensor:
    """F of a batch or a piece of one, from its mean or the losses of its examples."""
    if loss.dim() > 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}: pass the scalar mean, or a vector with one loss per example"
        )
    return loss.mean()


def _numbers(*numbers: Tensor | float) -> Tensor:
    return torch.stack([torch.as_tensor(number, dtype=torch.float64).detach().reshape(()) for number in numbers])
