"""The problems: four of the paper, the embedded digits, and a folder of one's own images. One declaration each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from cabs.experiments.augment import Inputs, Scaled, Standardised
from cabs.experiments.data import ImageData, folder, store
from cabs.experiments.errors import UsageError
from cabs.experiments.networks import MNIST_INITIAL, ConvNet, Initial, cifar_initial

FOLDER_PREFIX = "imagefolder:"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained, and on what.

    Attributes:
        name: The name used on the command line.
        title: The name used in pictures.
        load: Reads the data, given the directory with data sets (or None for the usual places).
        net: The network.
        inputs: How images become inputs.
        examples: The budget of a run, in training examples accessed.
        lr: The learning rate of a run that names none.
        weight_decay: The strength of L2-regularisation; it applies to weights, not to biases.
        evaluations: How often a run is evaluated.
        threads: The most threads that are of use; more would only wait for each other on tiny images.
    """

    name: str
    title: str
    load: Callable[[Path | None], ImageData]
    net: ConvNet
    inputs: Inputs
    examples: int
    lr: float = 0.1
    weight_decay: float = 0.0
    evaluations: int = 25
    threads: int | None = None

    def network(self, seed: int = 0) -> nn.Sequential:
        """A new network with the initial weights that belong to the seed."""
        return self.net.build(seed)


DIGITS = Problem(
    name="digits",
    title="Digits",
    load=store.load_digits,
    net=ConvNet(
        input_shape=(1, 8, 8),
        filters=(32, 64),
        kernel=3,
        overlapping_pool=False,
        hidden=(128,),
        classes=10,
        initial=Initial(
            conv_std=0.15, conv_bias=(0.0,), dense_std=0.1, dense_bias=0.0, output_std=0.05, output_bias=0.0
        ),
    ),
    inputs=Scaled(16, shift=1),
    examples=80_000,
    lr=0.1,
    evaluations=50,
    threads=1,
)

MNIST = Problem(
    name="mnist",
    title="MNIST",
    load=store.load_mnist,
    net=ConvNet(
        input_shape=(1, 28, 28),
        filters=(32, 64),
        overlapping_pool=False,
        hidden=(1024,),
        classes=10,
        initial=MNIST_INITIAL,
    ),
    inputs=Scaled(255),
    examples=300_000,
)

SVHN = Problem(
    name="svhn",
    title="SVHN",
    load=store.load_svhn,
    net=ConvNet(
        input_shape=(3, 24, 24),
        filters=(64, 64),
        hidden=(256, 128),
        classes=10,
        initial=cifar_initial(last_hidden=128),
    ),
    inputs=Standardised(crop=24, distort=True),
    examples=5_000_000,
    weight_decay=5e-4,
)

CIFAR10 = Problem(
    name="cifar10",
    title="CIFAR-10",
    load=store.load_cifar10,
    net=ConvNet(
        input_shape=(3, 24, 24),
        filters=(64, 64),
        hidden=(384, 192),
        classes=10,
        initial=cifar_initial(last_hidden=192),
    ),
    inputs=Standardised(crop=24, distort=True),
    examples=10_000_000,
)

CIFAR100 = Problem(
    name="cifar100",
    title="CIFAR-100",
    load=store.load_cifar100,
    net=ConvNet(
        input_shape=(3, 32, 32),
        filters=(64, 64, 64),
        hidden=(512, 256),
        classes=100,
        initial=cifar_initial(last_hidden=256),
    ),
    inputs=Standardised(),
    examples=8_000_000,
    weight_decay=5e-4,
)

PROBLEMS = {problem.name: problem for problem in (DIGITS, MNIST, SVHN, CIFAR10, CIFAR100)}


def image_folder(directory: Path) -> Problem:
    """CIFAR-10's network and augmentation on the images in a directory, shrunk to 32×32 pixels."""
    return Problem(
        name=f"{FOLDER_PREFIX}{directory.absolute()}",  # a run may be resumed from elsewhere
        title=directory.resolve().name,
        load=lambda _: folder.load_folder(directory),
        net=ConvNet(
            input_shape=(3, 24, 24),
            filters=(64, 64),
            hidden=(384, 192),
            classes=len(folder.class_names(directory)),
            initial=cifar_initial(last_hidden=192),
        ),
        inputs=Standardised(crop=24, distort=True),
        examples=200_000,
    )


def problem(name: str) -> Problem:
    """The problem of this name.

    Args:
        name: A key of `PROBLEMS`, or ``imagefolder:DIRECTORY``.

    Raises:
        UsageError: If there is no such problem.
        DataError: If the directory does not hold images of several classes.
    """
    if name.startswith(FOLDER_PREFIX):
        return image_folder(Path(name.removeprefix(FOLDER_PREFIX)))
    if name not in PROBLEMS:
        raise UsageError(f"no problem is called {name!r}; there are {', '.join(PROBLEMS)} and {FOLDER_PREFIX}DIRECTORY")
    return PROBLEMS[name]
