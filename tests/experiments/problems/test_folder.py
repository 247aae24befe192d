"""One's own images as a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import official
import pytest
from PIL import Image

from cabs.experiments.errors import DataError
from cabs.experiments.problems.data.folder import class_names, load_folder


def write_images(folder: Path, count: int, size: tuple[int, int] = (40, 30), seed: int = 0, kind: str = "png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(official.random_images(count, (*size, 3), seed)):
        Image.fromarray(pixels).save(folder / f"{number}.{kind}")


def test_every_fifth_image_of_a_class_is_for_testing(tmp_path: Path) -> None:
    write_images(tmp_path / "cat", 10)
    write_images(tmp_path / "ant", 7, kind="jpg")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "cat" / ".hidden.png").write_text("not an image")
    (tmp_path / "empty").mkdir()
    data = load_folder(tmp_path)
    assert data.classes == ("ant", "cat")
    assert data.train.labels.tolist() == [0] * 6 + [1] * 8
    assert data.test.labels.tolist() == [0] * 1 + [1] * 2
    assert data.train.images.shape == (14, 3, 32, 32)


def test_folders_for_training_and_testing(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 3)):
        for name in ("a", "b"):
            write_images(tmp_path / split / name, count)
    data = load_folder(tmp_path)
    assert data.classes == ("a", "b")
    assert (len(data.train), len(data.test)) == (12, 6)


def test_images_are_cut_square_and_keep_their_pixels(tmp_path: Path) -> None:
    pixels = official.random_images(1, (32, 48, 3))[0]
    for name in ("a", "b"):
        write_images(tmp_path / "train" / name, 1)
        (tmp_path / "test" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "test" / name / "0.png")
    data = load_folder(tmp_path)
    assert (data.test.images[0].permute(1, 2, 0).numpy() == pixels[:, 8:40]).all()


def test_grey_and_palette_images_become_rgb(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / name, 5, size=(32, 32))
    grey = np.arange(1024, dtype=np.uint8).reshape(32, 32)
    Image.fromarray(grey).save(tmp_path / "a" / "0.png")
    Image.fromarray(grey).convert("P").save(tmp_path / "a" / "1.png")
    data = load_folder(tmp_path)
    assert (data.train.images[0] == data.train.images[0][:1]).all()
    assert data.train.images.shape[1] == 3


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda d: None, "at least two classes, found none"),
        (lambda d: write_images(d / "only", 5), "found only only"),
        (lambda d: [write_images(d / n, 2) for n in "ab"], "no images to test with"),
        (lambda d: [write_images(d / p, 5) for p in ("train/a", "train/b", "test/a", "test/c")], "classes c"),
    ],
)
def test_unusable_folders_are_refused(tmp_path, prepare, expected) -> None:
    prepare(tmp_path)
    with pytest.raises(DataError, match=expected):
        load_folder(tmp_path)


def test_damaged_image_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / name, 5)
    path = tmp_path / "b" / "3.png"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"b/3\.png: cannot be read as an image"):
        load_folder(tmp_path)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        class_names(tmp_path / "nowhere")
