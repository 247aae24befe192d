"""The problems, one declaration each: four of the paper, the embedded digits, Shakespeare, and one's own images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from cabs.experiments.errors import UsageError
from cabs.experiments.problems.augment import Scaled, Standardised, Tokens
from cabs.experiments.problems.data import folder, store, text
from cabs.experiments.problems.networks import MNIST_INITIAL, ConvNet, Initial, cifar_initial
from cabs.experiments.problems.problem import ACCURACY, PERPLEXITY, Metric, Problem
from cabs.experiments.problems.transformer import GPT

FOLDER_PREFIX = "imagefolder:"

DIGITS = Problem(
    name="digits",
    title="Digits",
    summary="8×8 digits, in the package",
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
    summary="handwritten digits",
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
    summary="house numbers",
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

_CIFAR10_NET = ConvNet(
    input_shape=(3, 24, 24),
    filters=(64, 64),
    hidden=(384, 192),
    classes=10,
    initial=cifar_initial(last_hidden=192),
)

CIFAR10 = Problem(
    name="cifar10",
    title="CIFAR-10",
    summary="small pictures, 10 classes",
    load=store.load_cifar10,
    net=_CIFAR10_NET,
    inputs=Standardised(crop=24, distort=True),
    examples=10_000_000,
)

CIFAR100 = Problem(
    name="cifar100",
    title="CIFAR-100",
    summary="small pictures, 100 classes",
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

SHAKESPEARE = Problem(
    name="shakespeare",
    title="Shakespeare",
    summary="the next character of a text",
    load=text.load_shakespeare,
    net=GPT(layers=3, width=96, heads=4, context=text.CONTEXT, classes=len(text.CHARACTERS)),
    inputs=Tokens(),
    metric=PERPLEXITY,
    examples=100_000,
    optimizer="adamw",
    lr=1e-3,
    min_batch_size=4,
    evaluations=20,
    train_sample=1_000,
    threads=1,
)

PROBLEMS = {problem.name: problem for problem in (DIGITS, MNIST, SVHN, CIFAR10, CIFAR100, SHAKESPEARE)}
NAMES = (*PROBLEMS, f"{FOLDER_PREFIX}DIRECTORY")
"""What a problem may be called."""


@dataclass(frozen=True)
class FolderNet:
    """CIFAR-10's network with an output for each class of a directory, which is not looked at before it is needed."""

    directory: Path
    input_shape: tuple[int, ...] = _CIFAR10_NET.input_shape

    @property
    def classes(self) -> int:
        return len(folder.class_names(self.directory))

    def build(self, seed: int = 0) -> nn.Module:
        return replace(_CIFAR10_NET, classes=self.classes).build(seed)


def image_folder(directory: Path) -> Problem:
    """CIFAR-10's network and augmentation on the images in a directory, shrunk to 32×32 pixels."""
    return Problem(
        name=f"{FOLDER_PREFIX}{directory.absolute()}",  # a run may be resumed from elsewhere
        title=directory.name or str(directory),
        summary="your own images",
        load=lambda _: folder.load_folder(directory),
        net=FolderNet(directory),
        inputs=Standardised(crop=24, distort=True),
        examples=200_000,
    )


def declared(name: str) -> Problem | None:
    """The problem of this name, whether or not its data is here; None if there is no such problem."""
    if name.startswith(FOLDER_PREFIX):
        return image_folder(Path(name.removeprefix(FOLDER_PREFIX)))
    return PROBLEMS.get(name)


def problem(name: str) -> Problem:
    """The problem of this name.

    Args:
        name: A key of `PROBLEMS`, or ``imagefolder:DIRECTORY``.

    Raises:
        UsageError: If there is no such problem.
        DataError: If the directory does not hold images of several classes.
    """
    found = declared(name)
    if found is None:
        raise UsageError(f"no problem is called {name!r}; there are {', '.join(NAMES)}")
    if isinstance(found.net, FolderNet):
        folder.class_names(found.net.directory)
    return found


def full_name(name: str) -> str:
    """A problem's name as runs record it; that of an image folder has an absolute path in it.

    Raises:
        UsageError: If there is no such problem.
    """
    found = declared(name)
    return problem(name).name if found is None else found.name


def title_of(name: str) -> str:
    """A problem's title, also of one that this version does not know."""
    found = declared(name)
    return found.title if found else name


def metric_of(name: str) -> Metric:
    """What runs of a problem are ranked by."""
    found = declared(name)
    return found.metric if found else ACCURACY


def optimizer_of(name: str) -> str:
    """The optimizer of runs that name none."""
    found = declared(name)
    return found.optimizer if found else "sgd"
