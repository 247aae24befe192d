"""What a problem is: any task that a network can be trained on, images and text being two kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cabs.experiments.problems.augment import Inputs


class Examples(Protocol):
    """A set of examples, each of an input and a target."""

    def __len__(self) -> int: ...

    def dataset(self) -> TensorDataset:
        """The same examples as a PyTorch data set of inputs and targets."""

    def sample(self, count: int, seed: int = 0) -> Self:
        """A fixed random choice of ``count`` examples; all of them when there are no more."""


class Data(Protocol):
    """A training set and a test set."""

    @property
    def train(self) -> Examples: ...

    @property
    def test(self) -> Examples: ...

    def summary(self) -> list[str]:
        """What is in it, in a few lines for people."""


class Net(Protocol):
    """The shape of a network.

    Attributes:
        input_shape: The shape of one input.
        classes: How many classes its outputs tell apart.
    """

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def classes(self) -> int: ...

    def build(self, seed: int = 0) -> nn.Module:
        """The network with its initial weights, which depend on the seed alone."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What the test set says of a network, and by what methods are ranked.

    Attributes:
        name: Its name in sentences and options: ``accuracy``.
        key: Its name in evaluation rows: ``test_accuracy``.
        format: How it is written for people.
        spread: How a deviation of it is written.
        tick: How it is written on the page, in the words of its script.
        higher_is_better: Whether more of it is better.
        worst: What a run that diverged is given.
        of: Its value, from the mean loss of the test set and the share of right answers.
    """

    name: str
    key: str
    format: str
    spread: str
    tick: str
    higher_is_better: bool
    worst: float
    of: Callable[[float, float], float]

    @property
    def title(self) -> str:
        """Its name over a panel."""
        return f"Test {self.name}"

    def goodness(self, value: float) -> float:
        """A number that is the greater the better the value is."""
        return value if self.higher_is_better else -value

    def show(self, value: float) -> str:
        """A value for people."""
        return format(value, self.format)

    def reached(self, target: float) -> Callable[[float], bool]:
        """Tells of a value whether it is as good as the target."""
        return lambda value: self.goodness(value) >= self.goodness(target)


ACCURACY = Metric(
    name="accuracy",
    key="test_accuracy",
    format=".2%",
    spread=".2%",
    tick=".4~p",
    higher_is_better=True,
    worst=0.0,
    of=lambda loss, accuracy: accuracy,
)
PERPLEXITY = Metric(
    name="perplexity",
    key="test_perplexity",
    format="#.4g",
    spread=".2g",
    tick=".4~g",
    higher_is_better=False,
    worst=math.inf,
    of=lambda loss, accuracy: math.exp(min(loss, 700.0)),
)


def cross_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The cross-entropy of classes: one for each image, or one for each position of a text."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten().long(), reduction=reduction)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained, and on what.

    Attributes:
        name: The name used on the command line.
        title: The name used in pictures.
        summary: What it is, in a few words, for the command's help.
        load: Reads the data, given the directory with data sets (or None for the usual places).
        net: The network.
        inputs: How examples become inputs.
        loss: The mean loss of a batch, or with ``reduction="sum"`` the sum over its targets.
        metric: What runs are ranked by. Accuracy is measured in any case.
        examples: The budget of a run, in training examples accessed.
        optimizer: The optimizer of a run that names none.
        lr: The learning rate of a run that names none.
        weight_decay: The strength of L2-regularisation; it applies to weights, not to biases.
        min_batch_size: The least size of an adaptive rule, and its first, of a run that names none.
        evaluations: How often a run is evaluated.
        train_sample: The training loss is measured on this many training examples, the same in every run.
        threads: The most threads that are of use; more would only wait for each other on tiny inputs.
    """

    name: str
    title: str
    summary: str
    load: Callable[[Path | None], Data]
    net: Net
    inputs: Inputs
    loss: Callable[..., Tensor] = cross_entropy
    metric: Metric = ACCURACY
    examples: int
    optimizer: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    min_batch_size: int = 16
    evaluations: int = 25
    train_sample: int = 5_000
    threads: int | None = None

    def network(self, seed: int = 0) -> nn.Module:
        """A new network with the initial weights that belong to the seed."""
        return self.net.build(seed)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All that is measured on the test set."""
        return (ACCURACY,) if self.metric is ACCURACY else (ACCURACY, self.metric)
