"""A measurement held against a loop over single examples, parameter by parameter."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cabs.norms import squared_norm
from cabs.torch_internals import Dropout
from cabs.variance.inputs import ExamplesOf, of_examples, tensors_within
from cabs.variance.probing import as_before

Batch = Any
Loss = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Compared:
    """One parameter: its part of the mean over examples of ‖g_i‖², as measured and by the loop."""

    name: str
    measured: float
    expected: float
    error: float


@dataclass(frozen=True)
class Verification:
    """What came out of a comparison with single examples.

    Attributes:
        examples: how many there were.
        parameters: each trained parameter.
        tolerance: the largest relative error that counts as rounding.
    """

    examples: int
    parameters: tuple[Compared, ...]
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether all parameters agree."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Compared, ...]:
        """The parameters that do not agree, the worst first."""
        bad = [one for one in self.parameters if not one.error <= self.tolerance]
        return tuple(sorted(bad, key=lambda one: -one.error))

    def __str__(self) -> str:
        if self.exact:
            worst = max((one.error for one in self.parameters), default=0.0)
            return (
                f"exact: {self.examples} examples, {len(self.parameters)} parameters, relative errors up to {worst:.1e}"
            )
        width = max(len(one.name) for one in self.wrong)
        lines = [f"{len(self.wrong)} of {len(self.parameters)} parameters differ from single examples:"]
        lines += [
            f"  {one.name:{width}}  mean ‖g_i‖² measured {one.measured:.6g}, by single examples {one.expected:.6g}"
            for one in self.wrong
        ]
        return "\n".join(lines)


class Measures(Protocol):
    """What measures a batch, as ``GradientVariance`` does."""

    @property
    def examples(self) -> int: ...

    def sums(self) -> Tensor: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...


def verify(
    model: nn.Module,
    measures: Callable[[list[list[Tensor]]], Measures],
    loss: Loss,
    batch: Batch,
    split: Callable[[Batch, int], Batch] | None,
    dim: int,
    tolerance: float,
) -> Verification:
    """Compares a measurement, made with each parameter in a group of its own, with the loop."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with undisturbed(model):
        measured = measures([[parameter] for parameter in named.values()])
        with measured:
            loss(batch).mean().backward()
        examples = measured.examples
        squares = (measured.sums() / max(1, examples)).tolist()
        by_dim = split or (lambda batch, number: one_example(batch, number, examples, dim))
        expected = by_single_examples(model, loss, batch, examples, by_dim)
    total = sum(expected.values()) or 1.0
    compared = [
        Compared(name, ours, expected[name], abs(ours - expected[name]) / max(expected[name], 1e-6 * total))
        for name, ours in zip(named, squares, strict=True)
    ]
    return Verification(examples, tuple(compared), tolerance)


def by_single_examples(
    model: nn.Module, loss: Loss, batch: Batch, examples: int, split: Callable[[Batch, int], Batch]
) -> dict[str, float]:
    """The mean over examples of ‖g_i‖² of each trained parameter, by a loop."""
    totals = dict.fromkeys((name for name, p in model.named_parameters() if p.requires_grad), 0.0)
    for i in range(examples):
        model.zero_grad(set_to_none=True)
        value = loss(split(batch, i))
        value.mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and name in totals:
                gradient = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float64))
                totals[name] += float(squared_norm(gradient)) / examples
    return totals


def one_example(batch: Batch, number: int, examples: int, dim: int) -> Batch:
    """A batch of one: all tensors in it that have an entry for each example, cut to one entry."""
    holding = {id(tensor) for tensor in of_examples(tensors_within(batch), dim, examples)}

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.narrow(dim, number, 1) if id(value) in holding else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(cut, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(cut, value))
        if isinstance(value, Mapping):
            again = copy.copy(value)
            for key, item in value.items():
                again[key] = cut(item)  # type: ignore[index]
            return again
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(
                value, **{f.name: cut(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        return value

    return cut(batch)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """No dropout within; gradients, buffers, modes and random numbers are as before afterwards."""
    gradients = [(p, p.grad) for p in model.parameters()]
    dropouts = [module for module in model.modules() if isinstance(module, Dropout) and module.training]
    try:
        for module in dropouts:
            module.eval()
        for parameter, _ in gradients:
            parameter.grad = None
        with as_before(model), torch.enable_grad():
            yield
    finally:
        for module in dropouts:
            module.train()
        for parameter, gradient in gradients:
            parameter.grad = gradient


class Verifiable(ABC):
    """A measurement that can be held against the loop.

    Attributes:
        model: the module that is measured.
        estimator: how its variance is estimated.
    """

    model: nn.Module
    estimator: str
    _attached: bool
    _examples_of: ExamplesOf

    def __repr__(self) -> str:
        state = "measuring" if self._attached else "not measuring"
        return f"<{type(self).__name__}: {self.estimator}, {state} {type(self.model).__name__}>"

    @abstractmethod
    def attach(self) -> Any: ...

    @abstractmethod
    def detach(self) -> None: ...

    @abstractmethod
    def _apart(self, groups: list[list[Tensor]]) -> Measures:
        """Another measurement of the same kind, with other groups."""

    def verify(
        self,
        loss: Callable[[Any], Tensor],
        batch: Any,
        *,
        split: Callable[[Any, int], Any] | None = None,
        tolerance: float = 1e-4,
    ) -> Verification:
        """Compares what is measured with a loop over single examples, for one batch and loss, parameter by parameter.

        Slow, and certain: for a new model, once. Nothing is weighted, and dropout is off within; gradients, buffers and
        random numbers are as before afterwards.

        Args:
            loss: the mean loss of a batch, ``lambda batch: F.cross_entropy(model(batch[0]), batch[1])``.
            batch: what the loss takes: tensors in tuples, dictionaries or dataclasses.
            split: the batch of example i alone, where that is not one entry of each tensor along ``batch_dim``.
            tolerance: the largest relative error that counts as rounding.

        Returns:
            The comparison: ``exact``, ``wrong``, and a table when printed.
        """
        if self.estimator != "exact":
            raise ValueError(f"the estimator {self.estimator} does not give what a loop over single examples does")
        attached = self._attached
        self.detach()
        try:
            return verify(self.model, self._apart, loss, batch, split, self._examples_of.dim, tolerance)
        finally:
            if attached:
                self.attach()
