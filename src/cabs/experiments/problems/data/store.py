"""Find the files of a data set on this machine, and read them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from importlib.resources import as_file, files
from pathlib import Path

import torch

from cabs.experiments.errors import DataError
from cabs.experiments.problems.data.formats import read_cifar, read_idx_images, read_svhn
from cabs.experiments.problems.data.images import ImageData, ImageSet
from cabs.experiments.problems.data.sources import CIFAR10, CIFAR100, MNIST, SOURCES, SVHN, Source

_DIGITS = tuple("0123456789")
_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def data_root(data: Path | None = None) -> Path:
    """The directory that holds the data sets: ``data``, else ``$CABS_DATA``, else a cache directory."""
    if data is not None:
        return data
    if os.environ.get("CABS_DATA"):
        return Path(os.environ["CABS_DATA"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cabs" / "data"


def locate(source: Source, data: Path | None = None) -> list[Path]:
    """The files of a data set, in the order of `Source.files`.

    They may lie in the root itself, in a directory of the data set's name, or where its archive unpacks to. The only
    file of a data set may also be what ``data`` names.

    Raises:
        DataError: If there is no directory with all of them; the message says how to get them.
    """
    root = data_root(data)
    if len(source.files) == 1 and root.is_file():
        return [root]
    candidates = [root, root / source.name, root / source.folder, root / source.name / source.folder]
    best: list[Path] = []
    for directory in dict.fromkeys(candidates):
        found = [path for name in source.files if (path := _variant(directory / name))]
        if len(found) == len(source.files):
            return found
        best = max(best, found, key=len)
    raise DataError(_how_to_get(source, root, {_stem(path.name) for path in best}, best))


def _variant(path: Path) -> Path | None:
    """The file under the names it commonly has: compressed or not."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return next((candidate for candidate in (path, plain) if candidate.is_file()), None)


def _stem(name: str) -> str:
    return name.removesuffix(".gz")


def _how_to_get(source: Source, root: Path, present: set[str], found: list[Path]) -> str:
    missing = [name for name in source.files if _stem(name) not in present]
    if found:
        trouble = f"{source.title} is incomplete: {found[0].parent} lacks {', '.join(missing)}."
    else:
        trouble = f"{source.title} is not in {root}."
    return (
        f"{trouble}\n"
        f"  With a network:  cabs data fetch {source.name}    ({source.size / 1e6:.0f} MB, from {source.homepage})\n"
        f"  Without one:     copy {', '.join(source.files)} from elsewhere and pass --data DIRECTORY "
        "(or set CABS_DATA).\n"
        "  Or start with the problem that needs no download:  cabs train digits"
    )


def warn_if_other(source: Source, paths: Iterable[Path], digests: Iterable[str]) -> None:
    """Warn of files whose contents are not the official ones; they are used all the same."""
    official = list(source.files.values())
    others = [path for path, digest, expected in zip(paths, digests, official, strict=True) if digest != expected]
    if others:
        warnings.warn(
            f"{source.title}: files in {others[0].parent} have other contents (SHA-256) than the official ones; "
            f"they are used as they are: {', '.join(path.name for path in others)}",
            stacklevel=3,
        )


def _concatenate(sets: list[ImageSet]) -> ImageSet:
    return ImageSet(torch.cat([part.images for part in sets]), torch.cat([part.labels for part in sets]))


def load_digits(data: Path | None = None) -> ImageData:
    """The 8×8 digits that come with this package; every fifth image is for testing."""
    here = files("cabs.experiments.problems.data")
    with (
        as_file(here / "digits-images-idx3-ubyte.gz") as images,
        as_file(here / "digits-labels-idx1-ubyte.gz") as labels,
    ):
        everything, _ = read_idx_images(images, labels, classes=10)
    for_testing = torch.arange(len(everything)) % 5 == 4
    return ImageData(everything.take(~for_testing), everything.take(for_testing), _DIGITS)


def load_mnist(data: Path | None = None) -> ImageData:
    """MNIST from its four idx files."""
    paths = locate(MNIST, data)
    train, train_digests = read_idx_images(paths[0], paths[1], classes=10)
    test, test_digests = read_idx_images(paths[2], paths[3], classes=10)
    if train.images.shape[1:] != (1, 28, 28) or test.images.shape[1:] != (1, 28, 28):
        shape = tuple(train.images.shape[2:])
        raise DataError(f"{paths[0]}: images of {shape} pixels, expected MNIST's (28, 28); the wrong data set?")
    warn_if_other(MNIST, paths, [*train_digests, *test_digests])
    return ImageData(train, test, _DIGITS)


def load_svhn(data: Path | None = None) -> ImageData:
    """SVHN's cropped digits, training and test part (the "extra" part is not used)."""
    paths = locate(SVHN, data)
    (train, train_digest), (test, test_digest) = (read_svhn(path) for path in paths)
    warn_if_other(SVHN, paths, [train_digest, test_digest])
    return ImageData(train, test, _DIGITS)


def _load_cifar(source: Source, label_bytes: int, classes: int, data: Path | None) -> tuple[ImageSet, ImageSet]:
    paths = locate(source, data)
    parts = [read_cifar(path, label_bytes, classes) for path in paths]
    warn_if_other(source, paths, [digest for _, digest in parts])
    sets = [part for part, _ in parts]
    return _concatenate(sets[: len(source.train)]), _concatenate(sets[len(source.train) :])


def load_cifar10(data: Path | None = None) -> ImageData:
    """CIFAR-10 from the six files of its binary version."""
    train, test = _load_cifar(CIFAR10, label_bytes=1, classes=10, data=data)
    return ImageData(train, test, _CIFAR10_CLASSES)


def load_cifar100(data: Path | None = None) -> ImageData:
    """CIFAR-100, with its hundred fine labels, from the two files of its binary version."""
    train, test = _load_cifar(CIFAR100, label_bytes=2, classes=100, data=data)
    return ImageData(train, test, tuple(f"class {label}" for label in range(100)))


__all__ = [
    "SOURCES",
    "data_root",
    "load_cifar10",
    "load_cifar100",
    "load_digits",
    "load_mnist",
    "load_svhn",
    "locate",
    "warn_if_other",
]
