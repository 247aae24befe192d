"""A directory of one's own images as a data set: one folder per class.

``DIRECTORY/train/CLASS/*`` and ``DIRECTORY/test/CLASS/*``, or ``DIRECTORY/CLASS/*`` of which every fifth image of
a class is kept for testing.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from cabs.experiments.errors import DataError
from cabs.experiments.problems.data.images import ImageData, ImageSet

SIDE = 32
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def class_names(directory: Path) -> tuple[str, ...]:
    """The classes: the names of the folders that hold images, in alphabetical order.

    Raises:
        DataError: If there are fewer than two.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory")
    base = directory / "train" if _is_split(directory) else directory
    names = tuple(sorted(entry.name for entry in base.iterdir() if entry.is_dir() and _images(entry)))
    if len(names) < 2:
        raise DataError(
            f"{base}: expected a folder of images for each of at least two classes, "
            f"found {'only ' + names[0] if names else 'none'}; images may be {', '.join(sorted(_SUFFIXES))}"
        )
    return names


def load_folder(directory: Path) -> ImageData:
    """Read all images, cut to a square from the centre and shrunk to 32×32 pixels.

    Raises:
        DataError: If a file is not an image, or the folders for training and testing do not fit together.
    """
    classes = class_names(directory)
    if _is_split(directory):
        train, test = _labelled(directory / "train", classes), _labelled(directory / "test", classes)
        others = {entry.name for entry in (directory / "test").iterdir() if _images(entry)} - set(classes)
        if others:
            raise DataError(
                f"{directory / 'test'}: its classes {', '.join(sorted(others))} are not in the train folder"
            )
    else:
        by_class = [_labelled(directory, (name,), label) for label, name in enumerate(classes)]
        test = [image for images in by_class for image in images[4::5]]
        train = [image for images in by_class for position, image in enumerate(images) if position % 5 != 4]
    if not test:
        raise DataError(f"{directory}: no images to test with; make a test folder, or have five images in a class")
    return ImageData(_read(train), _read(test), classes)


def _is_split(directory: Path) -> bool:
    return (directory / "train").is_dir() and (directory / "test").is_dir()


def _images(folder: Path) -> list[Path]:
    """The images in a folder, in alphabetical order; hidden files and files of other kinds are left out."""
    if not folder.is_dir():
        return []
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
    )


def _labelled(base: Path, classes: tuple[str, ...], first_label: int = 0) -> list[tuple[Path, int]]:
    return [(path, label) for label, name in enumerate(classes, first_label) for path in _images(base / name)]


def _read(labelled: list[tuple[Path, int]]) -> ImageSet:
    images = np.stack([_read_image(path) for path, _ in labelled])
    labels = torch.tensor([label for _, label in labelled], dtype=torch.int64)
    return ImageSet(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels)


def _read_image(path: Path) -> npt.NDArray[np.uint8]:
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                return np.asarray(ImageOps.fit(image.convert("RGB"), (SIDE, SIDE)), dtype=np.uint8)
    # Pillow's readers meet damaged files with many exceptions (OSError, SyntaxError, struct.error, ...).
    except Exception as error:
        raise DataError(f"{path}: cannot be read as an image: {error}") from error
