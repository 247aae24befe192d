"""Readers of official files: right on good files, clear on bad ones."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import official
import pytest

from cabs.experiments.errors import DataError
from cabs.experiments.problems.data import formats


@pytest.mark.parametrize("compressed", [True, False])
def test_idx_is_read_as_written(tmp_path: Path, compressed: bool) -> None:
    images = official.random_images(5, (4, 3))
    path = tmp_path / ("images.gz" if compressed else "images")
    content = official.idx_bytes(images)
    path.write_bytes(gzip.compress(content) if compressed else content)
    array, digest = formats.read_idx(path, 3)
    assert (array == images).all()
    assert digest == hashlib.sha256(content).hexdigest()


def test_idx_images_and_labels_become_tensors(tmp_path: Path) -> None:
    official.write_mnist(tmp_path, train=7)
    examples, _ = formats.read_idx_images(
        tmp_path / "train-images-idx3-ubyte.gz", tmp_path / "train-labels-idx1-ubyte.gz", classes=10
    )
    assert examples.images.shape == (7, 1, 28, 28)
    assert (examples.images[:, 0].numpy() == official.random_images(7, (28, 28))).all()
    assert (examples.labels.numpy() == official.random_labels(7, 10)).all()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda content: content[:-1], "truncated"),
        (lambda content: content + b"x", "truncated or damaged"),
        (lambda content: content[:10], "too short"),
        (lambda content: b"", "too short"),
        (lambda content: b"\x00\x00\x08\x01" + content[4:], "expected 00 00 08 03"),
        (lambda content: b"\x00\x00\x0d\x03" + content[4:], "expected 00 00 08 03"),
        (lambda content: content[:4] + b"\xff\xff\xff\xff" + content[8:], "impossible shape"),
        (lambda content: content[:4] + b"\x00\x00\x00\x00" + content[8:], "impossible shape"),
    ],
)
@pytest.mark.parametrize("compressed", [True, False])
def test_bad_idx_is_refused_by_name(tmp_path, damage, expected, compressed) -> None:
    content = damage(official.idx_bytes(official.random_images(5, (4, 3))))
    path = tmp_path / ("images.gz" if compressed else "images")
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(DataError, match=expected) as caught:
        formats.read_idx(path, 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("cut", [5, 30, -4])
def test_truncated_gzip_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(official.idx_bytes(official.random_images(50, (28, 28))))[:cut])
    with pytest.raises(DataError, match=r"images\.gz: .*(gzip|too short)"):
        formats.read_idx(path, 3)


def test_file_that_only_claims_to_be_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(DataError, match="gzip"):
        formats.read_idx(path, 3)


def test_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(official.idx_bytes(official.random_images(5, (4, 3))))
    (tmp_path / "labels").write_bytes(official.idx_bytes(official.random_labels(4, 10)))
    with pytest.raises(DataError, match="4 labels, but images has 5"):
        formats.read_idx_images(tmp_path / "images", tmp_path / "labels", 10)


@pytest.mark.parametrize(("label_bytes", "classes"), [(1, 10), (2, 100)])
def test_cifar_records(tmp_path: Path, label_bytes: int, classes: int) -> None:
    records = official.cifar_records(6, label_bytes, classes)
    path = tmp_path / "batch.bin"
    records.tofile(path)
    examples, digest = formats.read_cifar(path, label_bytes, classes)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (examples.labels.numpy() == records[:, label_bytes - 1]).all()  # the fine label is the last one
    red, green, blue = examples.images[3]
    assert red.flatten().tolist() == records[3, label_bytes : label_bytes + 1024].tolist()
    assert blue[31, 31] == records[3, -1]
    assert green[0, 1] == records[3, label_bytes + 1025]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda content: content[:-1], "whole number of 3,073-byte records"),
        (lambda content: b"", "whole number"),
        (lambda content: b"\x0a" + content[1:], "label 10, expected labels from 0 to 9"),
    ],
)
def test_bad_cifar_is_refused_by_name(tmp_path, change, expected) -> None:
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(change(official.cifar_records(3, 1, 10).tobytes()))
    with pytest.raises(DataError, match=expected) as caught:
        formats.read_cifar(path, 1, 10)
    assert str(path) in str(caught.value)


def test_svhn_digits(tmp_path: Path) -> None:
    official.write_svhn(tmp_path, train=9)
    examples, _ = formats.read_svhn(tmp_path / "train_32x32.mat")
    pixels = official.random_images(9, (32, 32, 3))
    assert (examples.images.numpy() == pixels.transpose(0, 3, 1, 2)).all()
    assert (examples.labels.numpy() == (official.random_labels(9, 10) + 1) % 10).all()


def test_svhn_label_ten_is_zero(tmp_path: Path) -> None:
    from scipy.io import savemat

    savemat(tmp_path / "a.mat", {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[10], [9]], np.uint8)})
    examples, _ = formats.read_svhn(tmp_path / "a.mat")
    assert examples.labels.tolist() == [0, 9]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "variables X"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))}, "float64"),
        ({"X": np.zeros((2, 32, 32, 3), np.uint8), "y": np.ones((2, 1))}, "shape"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1))}, "3 labels for 2 images"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.zeros((2, 1))}, "expected 1 to 10"),
    ],
)
def test_wrong_svhn_is_refused(tmp_path, variables, expected) -> None:
    from scipy.io import savemat

    savemat(tmp_path / "a.mat", variables)
    with pytest.raises(DataError, match=expected):
        formats.read_svhn(tmp_path / "a.mat")


@pytest.mark.parametrize("keep", [0, 50, 200, 5000])
def test_truncated_svhn_is_refused(tmp_path: Path, keep: int) -> None:
    official.write_svhn(tmp_path)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"train_32x32\.mat"):
        formats.read_svhn(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for read in (lambda p: formats.read_idx(p, 3), lambda p: formats.read_cifar(p, 1, 10), formats.read_svhn):
        with pytest.raises(DataError, match="nowhere"):
            read(tmp_path / "nowhere")
