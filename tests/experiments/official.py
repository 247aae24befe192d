"""Tiny data sets in the official formats, for tests."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def idx_bytes(array: Bytes) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def random_images(count: int, shape: tuple[int, ...], seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def random_labels(count: int, classes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, classes, count, dtype=np.uint8)


def write_mnist(directory: Path, train: int = 30, test: int = 10, compressed: bool = True) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", train), ("t10k", test)):
        for kind, array in (
            ("images-idx3", random_images(count, (28, 28))),
            ("labels-idx1", random_labels(count, 10)),
        ):
            path = directory / f"{prefix}-{kind}-ubyte"
            if compressed:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx_bytes(array)))
            else:
                path.write_bytes(idx_bytes(array))


def cifar_records(count: int, label_bytes: int, classes: int, seed: int = 0) -> Bytes:
    labels = np.stack([random_labels(count, classes, seed + k) for k in range(label_bytes)], axis=1)
    return np.concatenate([labels, random_images(count, (3072,), seed)], axis=1)


def write_cifar10(directory: Path, per_file: int = 20) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]):
        cifar_records(per_file, 1, 10, seed=number).tofile(directory / name)


def write_cifar100(directory: Path, train: int = 40, test: int = 10) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, count in (("train.bin", train), ("test.bin", test)):
        cifar_records(count, 2, 100).tofile(directory / name)


def write_svhn(directory: Path, train: int = 30, test: int = 10) -> None:
    from scipy.io import savemat

    directory.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        images = random_images(count, (32, 32, 3)).transpose(1, 2, 3, 0)
        labels = random_labels(count, 10)[:, None] + 1
        savemat(directory / f"{name}_32x32.mat", {"X": images, "y": labels}, do_compression=True)
