"""Readers of the official files: MNIST's idx, CIFAR's binary records and SVHN's .mat.

Each reader returns the arrays and the SHA-256 of the content, and raises a `DataError` that names the file and
says what was expected when the content is not what the format prescribes.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cabs.experiments.errors import DataError
from cabs.experiments.problems.data.images import ImageSet

Array = npt.NDArray[Any]

CIFAR_PIXELS = 3 * 32 * 32
_IDX_UBYTE = 0x08
# No data set here is near it; a header that claims more is damaged, and must not make us read on and on.
_IDX_LIMIT = 2**31


def read_idx(path: Path, dimensions: int) -> tuple[Array, str]:
    """Read an idx file of unsigned bytes, compressed (``.gz``) or not.

    Args:
        path: The file.
        dimensions: How many dimensions its array must have: 3 for images, 1 for labels.

    Returns:
        The array, and the SHA-256 of the uncompressed content.

    Raises:
        DataError: If the file cannot be read or is not such an idx file.
    """
    header_size = 4 + 4 * dimensions
    content = _read(path, header_size)
    if len(content) < header_size:
        raise DataError(f"{path}: too short for an idx file: {len(content)} bytes, its header alone has {header_size}")
    expected_magic = bytes([0, 0, _IDX_UBYTE, dimensions])
    if content[:4] != expected_magic:
        raise DataError(
            f"{path}: not an idx file of {dimensions}-dimensional unsigned bytes: "
            f"starts with {content[:4].hex(' ')}, expected {expected_magic.hex(' ')}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:])
    size = math.prod(shape)
    if not 0 < size < _IDX_LIMIT:
        raise DataError(f"{path}: its header claims the impossible shape {shape}")
    content = _read(path, header_size + size + 1)
    if len(content) != header_size + size:
        more = "more than " if len(content) > header_size + size else ""
        raise DataError(
            f"{path}: its header announces {shape}, {size:,} bytes, but {more}"
            f"{min(len(content) - header_size, size):,} follow; the file is truncated or damaged"
        )
    array = np.frombuffer(content, dtype=np.uint8, offset=header_size).reshape(shape)
    return array, hashlib.sha256(content).hexdigest()


def _read(path: Path, limit: int) -> bytes:
    """The first ``limit`` bytes of the content."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            return file.read(limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or truncated, expected a complete gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_idx_images(images_path: Path, labels_path: Path, classes: int) -> tuple[ImageSet, list[str]]:
    """Read a pair of idx files: images and their labels."""
    images, images_sha256 = read_idx(images_path, 3)
    labels, labels_sha256 = read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: {len(labels):,} labels, but {images_path.name} has {len(images):,} images")
    _check_labels(labels, classes, labels_path)
    return _image_set(images[:, None], labels), [images_sha256, labels_sha256]


def read_cifar(path: Path, label_bytes: int, classes: int) -> tuple[ImageSet, str]:
    """Read one file of CIFAR's *binary* version.

    Args:
        path: The file.
        label_bytes: 1 for CIFAR-10; 2 for CIFAR-100, whose second byte is the fine label.
        classes: The number of (fine) classes.

    Returns:
        The examples, and the SHA-256 of the content.

    Raises:
        DataError: If the file cannot be read or is not made of such records.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    record = label_bytes + CIFAR_PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{path}: {len(content):,} bytes are not a whole number of {record:,}-byte records; the file is "
            "truncated, or not of CIFAR's binary version (the Python and Matlab versions cannot be read)"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1]
    _check_labels(labels, classes, path)
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return _image_set(images, labels), hashlib.sha256(content).hexdigest()


def read_svhn(path: Path) -> tuple[ImageSet, str]:
    """Read one file of SVHN's format 2, the cropped digits (``train_32x32.mat``).

    Returns:
        The examples, with the label 10 of the file as digit 0, and the SHA-256 of the file.

    Raises:
        DataError: If the file cannot be read or does not hold such arrays.
    """
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        variables = loadmat(path, variable_names=["X", "y"])
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    # scipy meets a damaged file with whatever its parser stumbles over: zlib.error, TypeError, ValueError, ...
    except Exception as error:
        raise DataError(f"{path}: damaged, truncated, or not a Matlab 5 file: {error}") from error
    pixels, labels = variables.get("X"), variables.get("y")
    if pixels is None or labels is None:
        raise DataError(f"{path}: expected the variables X (images) and y (labels) of SVHN's cropped digits")
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise DataError(
            f"{path}: X is {pixels.dtype} of shape {pixels.shape}, expected uint8 of shape (32, 32, 3, examples)"
        )
    digits = labels.reshape(-1)
    if len(digits) != pixels.shape[3]:
        raise DataError(f"{path}: {len(digits):,} labels for {pixels.shape[3]:,} images")
    if digits.size and not (digits.min() >= 1 and digits.max() <= 10):
        raise DataError(f"{path}: labels from {digits.min()} to {digits.max()}, expected 1 to 10 (10 is digit 0)")
    return _image_set(pixels.transpose(3, 2, 0, 1), digits % 10), digest


def _check_labels(labels: Array, classes: int, path: Path) -> None:
    largest = int(labels.max())
    if largest >= classes:
        raise DataError(
            f"{path}: has a label {largest}, expected labels from 0 to {classes - 1}; a damaged or wrong file"
        )


def _image_set(images: Array, labels: Array) -> ImageSet:
    # A copy: arrays over a file's bytes are read-only, which tensors cannot be.
    return ImageSet(
        torch.from_numpy(np.array(images, dtype=np.uint8, order="C")),
        torch.from_numpy(labels.astype(np.int64)),
    )
