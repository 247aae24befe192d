"""What a model of the zoo is: a module, and batches for it that can be taken apart into single examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Any]
"""The arguments of a call, by name."""


@dataclass
class Batch:
    """The same examples twice: all in one call, and each in a call of its own."""

    whole: Inputs
    singles: Sequence[Inputs]
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``GradientVariance``."""

    @property
    def examples(self) -> int:
        return len(self.singles)


@dataclass
class Case:
    model: nn.Module
    batch: Callable[[int, int], Batch]
    """A batch of so many examples of such a length (where examples have a length)."""
    labelled: Callable[[int, int], Batch | None] = lambda m, length: None
    """The same with labels, for models that have a loss of their own; None where they have none."""
    padded: Callable[[int, int], Batch | None] = lambda m, length: None
    """The same with a mask that leaves out the ends of examples; None for models without one."""
    dtype: torch.dtype = torch.float64
    """float32 only where an operation of the model takes nothing else."""


def split(inputs: Inputs, examples: int) -> list[Inputs]:
    """Each example alone, of inputs whose tensors all have the examples in the first dimension."""

    def one(value: Any, i: int) -> Any:
        return value[i : i + 1] if isinstance(value, Tensor) and value.dim() and len(value) == examples else value

    return [{name: one(value, i) for name, value in inputs.items()} for i in range(examples)]


def ordinary(inputs: Inputs, examples: int) -> Batch:
    return Batch(inputs, split(inputs, examples))


def simple(model: nn.Module, **makers: Callable[[int, int], Any]) -> Case:
    """A model whose inputs, by name, are made from the number of examples and their length."""

    def batch(examples: int, length: int) -> Batch:
        return ordinary({name: make(examples, length) for name, make in makers.items()}, examples)

    return Case(model, batch)


def ids(examples: int, length: int) -> Tensor:
    """Tokens, none of them special but the last, which ends the text."""
    tokens = torch.randint(10, 60, (examples, length))
    tokens[:, -1] = 2
    return tokens


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


def of(module: str, name: str, **arguments: Any) -> nn.Module:
    """A module of a package that need not be there before."""
    return getattr(import_module(module), name)(**arguments)


def tokens(model: nn.Module, name: str = "x", factor: int = 1) -> Case:
    return simple(model, **{name: lambda m, length: ids(m, factor * length)})


def vectors(model: nn.Module, name: str = "x", width: int = 16) -> Case:
    return simple(model, **{name: lambda m, length: noise(m, length, width)})


def pictures(model: nn.Module, name: str = "x", channels: int = 3, size: int = 16) -> Case:
    return simple(model, **{name: lambda m, length: noise(m, channels, size, size)})


def of_installed(packages: Mapping[str, Mapping[str, Callable[[], Case]]]) -> dict[str, Callable[[], Case]]:
    """The cases of those packages that are installed, by names like ``package/Model``."""
    found: dict[str, Callable[[], Case]] = {}
    for package, makers in packages.items():
        if find_spec(package) is not None:
            found |= {f"{package}/{name}": maker for name, maker in makers.items()}
    return found
