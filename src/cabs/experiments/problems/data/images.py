"""What every data set comes down to: images as bytes, and a label each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class ImageSet:
    """Images and their labels.

    Attributes:
        images: ``uint8`` tensor of shape (examples, channels, height, width).
        labels: ``int64`` tensor of shape (examples,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        assert self.images.dtype == torch.uint8
        assert self.images.ndim == 4
        assert self.labels.dtype == torch.int64
        assert self.labels.shape == self.images.shape[:1]

    def __len__(self) -> int:
        return len(self.labels)

    def dataset(self) -> TensorDataset:
        """The same examples as a PyTorch data set."""
        return TensorDataset(self.images, self.labels)

    def take(self, indices: Tensor) -> ImageSet:
        """The examples at these positions."""
        return ImageSet(self.images[indices], self.labels[indices])

    def sample(self, count: int, seed: int = 0) -> ImageSet:
        """A fixed random choice of ``count`` examples; all of them when there are no more."""
        if count >= len(self):
            return self
        generator = torch.Generator().manual_seed(seed)
        return self.take(torch.randperm(len(self), generator=generator)[:count].sort().values)


@dataclass(frozen=True)
class ImageData:
    """A training set, a test set, and the names of the classes."""

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]

    def summary(self) -> list[str]:
        """What is in it, in a few lines for people."""
        shape = "×".join(map(str, self.train.images.shape[1:]))
        counts = self.train.labels.bincount(minlength=len(self.classes)).tolist()
        return [
            f"{len(self.train):,} training and {len(self.test):,} test images of {shape}",
            f"{len(self.classes)} classes; examples of each in the training set:",
            "  " + ", ".join(f"{label}: {count:,}" for label, count in zip(self.classes, counts, strict=True)),
        ]
