"""What a step showed: F, tr Σ and ‖g‖² of one batch, however many microbatches and processes it was spread over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cabs.loader.deliveries import Delivery
from cabs.parallel import Team
from cabs.scheduler.costs import Stopwatch
from cabs.scheduler.record import OpenStep
from cabs.scheduler.requirements import scalar_loss
from cabs.scheduler.step import Measurement
from cabs.variance import GradientVariance

Observed = tuple[int, float, Measurement | None]
"""The examples of a step, its loss, and its gradients if they were measured."""


class Observer:
    """Gathers what a step shows into one record, and adds it up over processes.

    Args:
        variance: what measures gradients; None if nothing does.
        team: the processes that share the batches, if there are several.
        grad_scaler: the scaler of losses, if one is in use.
        accumulation: how many batches of the loader make a step.
    """

    def __init__(
        self,
        variance: GradientVariance | None,
        team: Team | None,
        grad_scaler: torch.amp.GradScaler | None,
        accumulation: int,
    ) -> None:
        self._variance, self._team, self._grad_scaler = variance, team, grad_scaler
        self._accumulation, self._only_watches = accumulation, False
        self.measures = variance is not None
        """Whether the current step is measured."""
        self.record = OpenStep()
        self.stopwatch = Stopwatch(team)

    def measure(self, measures: bool) -> None:
        """Whether the variance of the next step is to be measured, if anything is."""
        self.measures = measures and self._variance is not None
        if self._variance is not None:
            self._variance.pause(not measures)
        if self._team is not None:
            self._team.read(measures)

    def only_watch(self) -> None:
        """Leaves the gradients of processes as they are, neither weighed nor exchanged at another time."""
        self._only_watches = True

    def deliver(self, microbatch: Any, delivery: Delivery) -> None:
        """Notes what the loader hands out. If the step already has all its batches, it is discarded."""
        before = self.record.batches[:1]
        if self.record.take(delivery, self._passes(), self._accumulation):
            self.give_up()
            self.record.take(delivery, self._passes(), self._accumulation)
        if self.record.batches[:1] != before:
            self.stopwatch.begin()
        if self._team is not None and not self._only_watches:
            self._team.share = delivery.share / delivery.examples
            self._team.begin_microbatch(last=delivery.left == 0)
        if self._variance is not None:
            weight = None
            if self._team is not None:
                weight = self._team.loss_weight() / max(1, delivery.share)
            elif self._accumulation > 1:
                weight = 1 / (self._accumulation * delivery.size)
            told: dict[str, Any] = {"share": delivery.fraction, "weight": weight, "rows": delivery.rows}
            self._variance.expect(microbatch, max(1, delivery.size), **told)

    def backward(self, loss: Tensor) -> None:
        """Calls ``backward`` on the loss of a microbatch, weighed so that all of them make up the step's mean."""
        record, delivery = self.record, self.record.delivery
        if delivery is None:
            raise RuntimeError(
                "scheduler.backward(loss) weighs the loss of the last batch of cabs.AdaptiveLoader, and there is "
                "none: take batches from the loader that the scheduler was made with"
            )
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss is {loss!r}: scheduler.backward takes a tensor that has a graph")
        if loss.dim() == 1 and len(loss) != max(1, delivery.size):
            raise ValueError(f"the loss has {len(loss)} entries for a microbatch of {delivery.size} examples")
        mean, last = mean_loss(loss), delivery.left == 0
        if delivery.size:
            record.losses = record.losses + delivery.size * mean.detach().double()
        record.backwarded += delivery.size
        weight = delivery.size / delivery.share / self._accumulation if delivery.share else 0.0
        if self._team is not None:
            weight *= self._team.loss_weight()
            if last and not self.measures:
                # Runs during the backward pass.
                record.exchange = self._team.start_sum(_numbers(delivery.share, record.losses))
        weighed = mean * weight
        (weighed if self._grad_scaler is None else self._grad_scaler.scale(weighed)).backward()
        if self._variance is not None and delivery.share and not delivery.size:
            self._variance.discard_last_pass()  # it was that of a placeholder
        if last and self._team is not None:
            self._team.end_batch()

    def observe(self, loss: Any, step: int) -> Observed:
        """The step's numbers.

        Args:
            loss: the loss of the batch, or None if it went through ``backward``.
            step: the number of the step.
        """
        passes = self._passes()
        if passes is not None:
            self.record.note_passes(passes)
            self.record.batches = self.record.used() or self.record.batches
        mean = self._mean_of_share(loss)
        if passes is not None:
            self._check_passes()
        return self._alone(mean, step) if self._team is None else self._together(mean, step)

    def note_step(self) -> None:
        """The optimizer made its step."""
        self.record.optimizer_stepped = True

    def give_up(self) -> None:
        """Discards the current step."""
        self.record = OpenStep()
        self.stopwatch.give_up()
        if self._variance is not None:
            self._variance.give_up()

    def begin(self) -> None:
        """Begins the next step."""
        self.record = OpenStep()
        if self._variance is not None:
            self._variance.reset()

    def _passes(self) -> set[int] | None:
        return None if self._variance is None else self._variance.tasks()

    def _check_passes(self) -> None:
        """Examples given and examples seen must be the same."""
        variance, batches = self._variance, self.record.batches
        assert variance is not None
        if variance.passes == 0:
            variance.check()
            raise RuntimeError(
                "no backward pass of the model since the last step: call scheduler.step(loss) after loss.backward()"
            )
        given = self.record.share()
        if variance.leftover:
            raise RuntimeError(
                f"the gradients of {variance.leftover} more backward passes, of batches taken earlier, are in this "
                f"step, for which {given} examples count. If several batches make a step, say accumulation="
                f"{variance.leftover + 1}, or let the loader make microbatches (max_microbatch_size). If a batch was "
                "dropped, clear its gradients with optimizer.zero_grad()"
            )
        seen = variance.examples
        if self.measures and batches and given and seen != given:
            raise RuntimeError(
                f"the loader handed out {given} examples for this step, and gradients of {seen} went into it. If a "
                "batch went through backward twice, clear the gradients of the first pass with optimizer.zero_grad(), "
                "or make it under `with scheduler.variance.paused():`. If several batches make a step, say "
                "accumulation=K. If the model was called with other data, take all of it from the loader"
            )

    def _mean_of_share(self, loss: Any) -> Tensor | float:
        """F of this process's examples."""
        record, delivery = self.record, self.record.delivery
        if loss is None:
            if delivery is None or (record.share() and not record.backwarded):
                raise RuntimeError(
                    "step() without a loss goes with scheduler.backward(loss) for every microbatch before it"
                )
            if record.backwarded != record.share():
                raise RuntimeError(
                    f"{record.backwarded} of the batch's {record.share()} examples went through scheduler.backward: "
                    "call it once for each microbatch of the batch, then step()"
                )
            return record.losses / max(1, record.backwarded)
        if record.backwarded:
            raise RuntimeError("the losses of the batch went through scheduler.backward: call step() without one")
        if delivery is not None and (delivery.left or delivery.size != delivery.share):
            raise RuntimeError(
                "batches come in microbatches (max_microbatch_size): call scheduler.backward(loss) for each of them "
                "instead of loss.backward(), then scheduler.step() without a loss"
            )
        loss = scalar_loss(loss)
        if not isinstance(loss, Tensor):
            return loss
        examples = record.share() or (0 if self._variance is None else self._variance.examples)
        if loss.dim() == 1 and examples and len(loss) != examples:
            raise ValueError(f"the loss has {len(loss)} entries for a batch of {examples} examples")
        mean = mean_loss(loss)
        self._check_accumulated(mean)
        return mean

    def _check_accumulated(self, loss: Tensor) -> None:
        """The loss of the last of several batches is not that of the step."""
        if self._accumulation == 1 or self._variance is None or not self.measures:
            return
        roots = self._variance.losses()
        if len(roots) > 1 and torch.equal(loss.to(roots[-1]), roots[-1]):
            raise ValueError(
                f"the loss of the last of {len(roots)} backward passes was passed to step(), and it is not that of the "
                "step: add the losses up as they go into backward (each divided by accumulation), and pass the sum"
            )

    def _alone(self, mean: Tensor | float, step: int) -> Observed:
        """In one transfer from the device."""
        variance = self._variance
        if variance is None or not self.measures:
            examples = self.record.examples() or (0 if variance is None else variance.examples)
            return examples, float(mean), None
        examples = variance.examples
        if examples == 1 or variance.unweighed:
            return examples, float(mean), None  # one example alone has no variance, and without P there is no tr(PΣ)
        traces, norms = variance.traces(), variance.mean_squared_norms()
        loss, *numbers = torch.cat([torch.as_tensor(mean).reshape(1).to(traces), traces, norms]).tolist()
        measured = self._measurement(step, examples, numbers[: len(traces)], numbers[len(traces) :])
        return examples, loss, self._with_dots(measured, lambda numbers: numbers)

    def _together(self, mean: Tensor | float, step: int) -> Observed:
        """In one sum over the processes."""
        team, record = self._team, self.record
        assert team is not None
        delivery = record.delivery
        if not self.measures:
            if record.exchange is None:
                share = 1 if delivery is None else delivery.share
                record.exchange = team.start_sum(_numbers(share, share * mean if share else 0.0))
            total, loss = record.exchange().tolist()
            examples = int(total) if delivery is not None else self._seen_together(team)
            return examples, loss / total, None
        variance = self._variance
        assert variance is not None
        share = variance.examples if delivery is None else delivery.share
        unweighed = variance.unweighed
        squares = variance.unscaled(team.squares())
        sums = torch.zeros(variance.sums_count) if unweighed else variance.sums()
        parts = [
            _numbers(share, share * mean if share else 0.0, variance.penalized, unweighed),
            squares.cpu(),
            sums.cpu() if share else torch.zeros(len(sums)),
        ]
        total_of_all = team.sum(torch.cat([part.double() for part in parts])).cpu()
        count, loss, penalized, unweighed = total_of_all[:4].tolist()
        if penalized:
            raise RuntimeError(
                "a penalty in the loss cannot be told apart from the examples' gradients once processes have added "
                "them up: use the optimizer's weight_decay"
            )
        examples = int(count)
        if examples == 1 or unweighed:
            return examples, loss / examples, None
        norms, sums = total_of_all[4:].split([len(squares), len(sums)])
        traces = variance.traces_of(sums, norms, examples)
        measured = self._measurement(step, examples, traces.tolist(), norms.tolist())
        return examples, loss / examples, self._with_dots(measured, lambda numbers: team.sum(numbers).cpu())

    def _with_dots(self, measured: Measurement, total: Callable[[Tensor], Tensor]) -> Measurement:
        """With Var_i⟨g_i, g⟩ too, if it is asked for."""
        if self._variance is None or not self._variance.measures_dots:
            return measured
        squares, count = total(self._variance.dot_sums(total)).tolist()
        return replace(measured, dots=(squares / count,))

    def _seen_together(self, team: Team) -> int:
        return int(team.sum(_numbers(0 if self._variance is None else self._variance.examples)).item())

    def _measurement(self, step: int, examples: int, traces: list[float], norms: list[float]) -> Measurement:
        if not all(map(math.isfinite, traces + norms)):
            raise NotFinite(
                "the gradients are not finite: the step has diverged or overflowed; lower the learning rate, and with "
                "mixed precision pass grad_scaler so that skipped steps are skipped here too"
            )
        biased = self._variance is None or self._variance.estimator != "microbatch"
        return Measurement(step=step, examples=examples, variances=tuple(traces), norms=tuple(norms), biased=biased)


class NotFinite(ValueError):
    """The gradients of a step are not finite."""


def mean_loss(loss: Tensor) -> Tensor:
    """F of a batch or a microbatch, from its mean or the losses of its examples."""
    if loss.dim() > 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}: pass the scalar mean, or a vector with one loss per example"
        )
    return loss.mean() if loss.dim() else loss


def _numbers(*numbers: Tensor | float) -> Tensor:
    return torch.stack([torch.as_tensor(number, dtype=torch.float64).detach().reshape(()) for number in numbers])
