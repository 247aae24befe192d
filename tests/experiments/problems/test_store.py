"""Finding and loading data sets on disk."""

from __future__ import annotations

import warnings
from pathlib import Path

import official
import pytest
import torch

from cabs.experiments.errors import DataError
from cabs.experiments.problems.data import store
from cabs.experiments.problems.data.sources import CIFAR10, MNIST, SOURCES


def test_digits_need_no_files_and_never_change() -> None:
    data = store.load_digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.train.images.shape[1:] == (1, 8, 8)
    assert int(data.train.images.max()) == 16
    assert data.test.labels[:5].tolist() == [4, 9, 4, 9, 4]
    assert int(data.train.images.sum()) + int(data.test.images.sum()) == 561718


LOADERS = {
    "mnist": (store.load_mnist, official.write_mnist, 30, (1, 28, 28)),
    "svhn": (store.load_svhn, official.write_svhn, 30, (3, 32, 32)),
    "cifar10": (store.load_cifar10, official.write_cifar10, 100, (3, 32, 32)),
    "cifar100": (store.load_cifar100, official.write_cifar100, 40, (3, 32, 32)),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("below", ["", "name", "folder", "both"])
def test_files_are_found_wherever_they_may_lie(tmp_path: Path, name: str, below: str) -> None:
    load, write, train, shape = LOADERS[name]
    folder = SOURCES[name].folder
    write(tmp_path / {"": "", "name": name, "folder": folder, "both": f"{name}/{folder}"}[below])
    with pytest.warns(UserWarning, match="have other contents"):
        data = load(tmp_path)
    assert len(data.train) == train
    assert data.train.images.shape[1:] == shape
    assert data.train.images.dtype == torch.uint8
    assert len(data.classes) == (100 if name == "cifar100" else 10)


def test_cifar10_parts_are_in_order(tmp_path: Path) -> None:
    official.write_cifar10(tmp_path, per_file=4)
    with pytest.warns(UserWarning, match="other contents"):
        data = store.load_cifar10(tmp_path)
    expected = [int(label) for k in range(5) for label in official.cifar_records(4, 1, 10, seed=k)[:, 0]]
    assert data.train.labels.tolist() == expected
    assert data.test.labels.tolist() == official.cifar_records(4, 1, 10, seed=5)[:, 0].tolist()


def test_uncompressed_mnist_is_found_too(tmp_path: Path) -> None:
    official.write_mnist(tmp_path, compressed=False)
    with pytest.warns(UserWarning, match="other contents"):
        assert len(store.load_mnist(tmp_path).train) == 30


def test_official_contents_raise_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official.write_cifar10(tmp_path)
    import hashlib
    from dataclasses import replace

    def digests(names):
        return {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names}

    same = replace(CIFAR10, train=digests(CIFAR10.train), test=digests(CIFAR10.test))
    monkeypatch.setattr(store, "CIFAR10", same)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(store.load_cifar10(tmp_path).train) == 100
    (tmp_path / "test_batch.bin").write_bytes(official.cifar_records(4, 1, 10, seed=9).tobytes())
    with pytest.warns(UserWarning, match="test_batch.bin"):  # the same set-up does warn of other contents
        store.load_cifar10(tmp_path)


def test_warning_names_only_the_files_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official.write_cifar10(tmp_path)
    import hashlib
    from dataclasses import replace

    digests = {n: hashlib.sha256((tmp_path / n).read_bytes()).hexdigest() for n in CIFAR10.files}
    digests["data_batch_3.bin"] = "0" * 64
    train = {name: digests[name] for name in CIFAR10.train}
    monkeypatch.setattr(store, "CIFAR10", replace(CIFAR10, train=train, test={k: digests[k] for k in CIFAR10.test}))
    with pytest.warns(UserWarning, match="other contents") as caught:
        store.load_cifar10(tmp_path)
    message = str(caught[0].message)
    assert "data_batch_3.bin" in message
    assert "data_batch_1.bin" not in message


def test_absent_data_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        store.load_mnist(tmp_path)
    message = str(caught.value)
    for part in (str(tmp_path), "cabs data fetch mnist", "--data", "CABS_DATA", "train-images-idx3-ubyte.gz", "digits"):
        assert part in message


def test_incomplete_data_says_what_is_missing(tmp_path: Path) -> None:
    official.write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"lacks t10k-labels-idx1-ubyte\.gz\."):
        store.load_mnist(tmp_path)


def test_other_images_under_mnists_names_are_refused(tmp_path: Path) -> None:
    official.write_mnist(tmp_path)
    import gzip

    content = official.idx_bytes(official.random_images(30, (16, 16)))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="28, 28"):
        store.load_mnist(tmp_path)


def test_root_comes_from_option_then_environment_then_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CABS_DATA", str(tmp_path / "env"))
    assert store.data_root(tmp_path / "option") == tmp_path / "option"
    assert store.data_root() == tmp_path / "env"
    monkeypatch.delenv("CABS_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert store.data_root() == tmp_path / "cache" / "cabs" / "data"


def test_sources_are_consistent() -> None:
    for source in SOURCES.values():
        provided = {name.rpartition("/")[2] for d in source.downloads for name in (d.members or (d.name,))}
        assert provided == set(source.files)
        assert all(len(digest) == 64 for digest in source.files.values())
        assert all(url.endswith(d.name) for d in source.downloads for url in d.urls)
    assert MNIST.size == 11_594_722
