"""tr Σ, the noise scale tr Σ/‖∇F‖², F and α tr(PΣ), each with an interval.

K batches of b examples are drawn independently. Each has its F, its unbiased tr Σ, ‖g_k‖², and, in a second pass over
the same batches, ⟨g_k, ḡ⟩ with ḡ the mean of all: that tells what ‖ḡ‖² would be without any one of them, so that one
can be left out at a time without keeping more than one gradient. E‖ḡ‖² = ‖∇F‖² + tr Σ / n is freed of its noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from cabs.couplings import Coupled
from cabs.norms import squared_norm, wide
from cabs.probe.intervals import Interval, inverse, jackknife, positive
from cabs.probe.restoring import Randomness
from cabs.probe.task import Task
from cabs.variance import GradientVariance

FEWEST = 8
"""With fewer batches than this, one left out says too little about the others."""
USUAL = 32
"""Batches have so many examples where there is no reason for another number."""


@dataclass
class Gradients:
    """What K batches of b examples showed of their gradients, in some metric: plain, or weighed by P.

    Attributes:
        size: b.
        within: tr Σ of each batch from its single examples, without bias; empty where these cannot be seen.
        squares: ‖g_k‖² of each batch.
        dots: ⟨g_k, ḡ⟩ of each batch.
        square: ‖ḡ‖².
    """

    size: int
    within: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    dots: list[float] = field(default_factory=list)
    square: float = 0.0

    def trace(self, left_out: int | None = None) -> float:
        """tr Σ, without a batch: the mean of that within batches, or from how batches differ among each other."""
        if self.within:
            return mean_without(self.within, left_out)
        count = len(self.squares) - (left_out is not None)
        between = mean_without(self.squares, left_out) - self.mean_square(left_out)
        return max(0.0, self.size * count / (count - 1) * between)

    def mean_square(self, left_out: int | None = None) -> float:
        """‖ḡ‖², without a batch."""
        if left_out is None:
            return self.square
        count = len(self.squares)
        rest = count**2 * self.square - 2 * count * self.dots[left_out] + self.squares[left_out]
        return rest / (count - 1) ** 2

    def signal(self, left_out: int | None = None) -> float:
        """‖∇F‖², which may come out negative where noise dominates."""
        count = len(self.squares) - (left_out is not None)
        return self.mean_square(left_out) - self.trace(left_out) / (count * self.size)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What was found.

    Attributes:
        examples: how many examples it was measured on.
        batches: in how many batches.
        loss: F.
        trace: tr Σ.
        noise_scale: tr Σ/‖∇F‖²; without an upper end where the gradient cannot be told from noise.
        coupled: Σ α tr(PΣ) over the parameter groups; None where there is no P.
        size: m = Σ α tr(PΣ)/(F − F_*), what CABS would choose; None where there is none.
        penalized: whether the loss had a penalty in it, which is in F then.
    """

    examples: int
    batches: int
    loss: Interval
    trace: Interval
    noise_scale: Interval
    coupled: Interval | None
    size: Interval | None
    penalized: bool


def measure(
    task: Task,
    coupled: Coupled,
    groups: Sequence[Sequence[Tensor]],
    *,
    examples: int,
    size: int,
    estimator: str,
    loss_floor: float,
    weighed: bool,
) -> Noise:
    """Measures a task's gradients at its present weights.

    Args:
        task: what is probed.
        coupled: α and P.
        groups: the optimizer's parameters.
        examples: about how many examples to measure.
        size: how many of them at a time.
        estimator: ``"exact"``, from single examples, or ``"microbatch"``, from how batches differ.
        loss_floor: F_*.
        weighed: whether there is a P for α tr(PΣ).
    """
    count = max(FEWEST, math.ceil(examples / size))
    start = Randomness()
    first = Passes(task, groups, size, estimator)
    plain, losses, means = first.measure(count)
    start.again()
    second = Passes(task, groups, size, estimator, coupled if coupled.diagonal and weighed else None)
    weighted = second.compare(count, plain, means)
    weighed = weighed and not second.unweighed
    return conclude(
        plain, weighted if weighed else None, losses, coupled.alphas(), loss_floor=loss_floor, penalized=first.penalized
    )


def conclude(
    plain: Sequence[Gradients],
    weighted: Sequence[Gradients] | None,
    losses: Sequence[float],
    alphas: Sequence[float],
    *,
    loss_floor: float = 0.0,
    penalized: bool = False,
) -> Noise:
    """From what the batches showed to the numbers and their intervals.

    Args:
        plain: of each parameter group.
        weighted: the same weighed by P; None if there is none.
        losses: F of each batch.
        alphas: α of each group.
        loss_floor: F_*.
        penalized: whether the loss had a penalty in it.
    """
    count = len(losses)

    def trace(left_out: int | None) -> float:
        return sum(one.trace(left_out) for one in plain)

    def signal(left_out: int | None) -> float:
        return sum(one.signal(left_out) for one in plain)

    def noise(left_out: int | None) -> float:
        return sum(alpha * one.trace(left_out) for alpha, one in zip(alphas, weighted or (), strict=True))

    def loss(left_out: int | None) -> float:
        return mean_without(losses, left_out)

    sized = weighted is not None and min(loss(k) for k in (None, *range(count))) > loss_floor
    still = trace(None) == 0  # every example has the same gradient
    return Noise(
        examples=count * plain[0].size,
        batches=count,
        loss=jackknife(loss, count),
        trace=positive(trace, count),
        noise_scale=Interval(0, 0, 0) if still else inverse(jackknife(lambda k: signal(k) / trace(k), count)),
        coupled=None if weighted is None else positive(noise, count),
        size=positive(lambda k: noise(k) / (loss(k) - loss_floor), count) if sized else None,
        penalized=penalized,
    )


class Passes:
    """The two passes over the batches.

    Args:
        task: what is probed.
        groups: the optimizer's parameters.
        size: b.
        estimator: of tr Σ.
        coupled: what weighs, in the second pass.
    """

    def __init__(
        self, task: Task, groups: Sequence[Sequence[Tensor]], size: int, estimator: str, coupled: Coupled | None = None
    ) -> None:
        self._task, self._size, self._coupled = task, size, coupled
        self._groups = [[p for p in group if p.requires_grad] for group in groups]
        self._variance: GradientVariance | None = None
        self.unweighed = False
        """Whether there were gradients without a P."""
        self.penalized = False
        """Whether the loss had a part that is not the examples'."""
        if estimator == "exact":
            self._variance = GradientVariance(task.model, groups=self._groups, check_owners=coupled is None)
            if coupled is not None:
                self._variance.weigh(coupled.weights, trusted=coupled.built_in)

    def measure(self, count: int) -> tuple[list[Gradients], list[float], dict[Tensor, Tensor]]:
        """Makes the batches' gradients; returns what they show, the losses, and ḡ."""
        found = [Gradients(self._size) for _ in self._groups]
        losses: list[float] = []
        means: dict[Tensor, Tensor] = {}
        with self._variance or nullcontext():
            for _ in range(count):
                losses.append(self._backward(found))
                for number, group in enumerate(self._groups):
                    square = 0.0
                    for p in group:
                        if p.grad is not None:
                            gradient = dense(p.grad)
                            square += float(squared_norm(gradient))
                            mean = gradient / count
                            means[p] = means[p].add_(mean) if p in means else mean
                    found[number].squares.append(square)
        for one, group in zip(found, self._groups, strict=True):
            one.square = finite(sum(float(squared_norm(means[p])) for p in group if p in means))
        return found, losses, means

    def compare(self, count: int, plain: list[Gradients], means: dict[Tensor, Tensor]) -> list[Gradients]:
        """Goes over the same batches again for ⟨g_k, ḡ⟩; returns the same weighed by P, or ``plain`` without one."""
        weighs = self._coupled is not None
        weighted = [Gradients(self._size) for _ in self._groups] if weighs else plain
        between = weighs and self._variance is None
        with (self._variance if weighs else None) or nullcontext():
            for _ in range(count):
                self._backward(weighted if weighs else [])
                for number, group in enumerate(self._groups):
                    gradients = {p: dense(p.grad) for p in group if p.grad is not None}
                    plain[number].dots.append(sum(dot(g, means[p]) for p, g in gradients.items() if p in means))
                    if between:
                        weighted[number].squares.append(sum(dot(g, g * self._p(p)) for p, g in gradients.items()))
                        weighted[number].dots.append(
                            sum(dot(g, means[p] * self._p(p)) for p, g in gradients.items() if p in means)
                        )
        if between:
            for one, group in zip(weighted, self._groups, strict=True):
                one.square = sum(dot(means[p], means[p] * self._p(p)) for p in group if p in means)
        return weighted

    def _p(self, parameter: Tensor) -> Tensor:
        assert self._coupled is not None
        weights = self._coupled.weights(parameter)
        self.unweighed |= weights is None
        return torch.zeros_like(parameter) if weights is None else weights.to(parameter.device)

    def _backward(self, into: list[Gradients]) -> float:
        """One batch; its tr Σ from single examples goes into the measurements, if these are seen."""
        task, variance, size = self._task, self._variance, self._size
        if variance is None or not into:
            return task.backward(size)
        variance.reset()
        batch = task.batch(size)
        task.clear()
        variance.expect(batch, size)
        loss = task.mean_loss(batch, size)
        loss.backward()
        self.penalized |= variance.penalized
        if variance.unweighed:
            self.unweighed = True
            return loss.item()
        for one, trace in zip(into, variance.traces().tolist(), strict=True):
            one.within.append(finite(trace) * size / (size - 1))
        return loss.item()


def mean_without(numbers: Sequence[float], left_out: int | None) -> float:
    """The mean of all but one."""
    if left_out is None:
        return fmean(numbers)
    return (math.fsum(numbers) - numbers[left_out]) / (len(numbers) - 1)


def finite(number: float) -> float:
    """A number that cannot be negative but for rounding."""
    if not math.isfinite(number):
        raise ValueError("the gradients are not finite, so nothing can be measured: look at the data and the weights")
    return max(0.0, number)


def dense(gradient: Tensor) -> Tensor:
    return wide(gradient.to_dense() if gradient.is_sparse else gradient.detach())


def dot(left: Tensor, right: Tensor) -> float:
    return float((left.flatten().conj() @ right.flatten()).real)
