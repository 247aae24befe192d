"""Shakespeare, character by character: windows of the text are examples, the characters that follow their targets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from cabs.experiments.errors import DataError
from cabs.experiments.problems.data.sources import SHAKESPEARE
from cabs.experiments.problems.data.store import locate, warn_if_other

CONTEXT = 64
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""All that occur in the text, in the order of their numbers."""

_LONGEST = 1 << 28


@dataclass(frozen=True)
class TextSet:
    """Windows of a text.

    Attributes:
        windows: ``uint8`` tensor of shape (examples, context + 1) with the numbers of characters. It may be a view that
            holds the text but once.
    """

    windows: Tensor

    def __len__(self) -> int:
        return len(self.windows)

    def dataset(self) -> TensorDataset:
        """The same examples as a PyTorch data set: all characters of a window but the last, and all but the first."""
        return TensorDataset(self.windows[:, :-1], self.windows[:, 1:])

    def sample(self, count: int, seed: int = 0) -> TextSet:
        """A fixed random choice of ``count`` examples; all of them when there are no more."""
        if count >= len(self):
            return self
        generator = torch.Generator().manual_seed(seed)
        return TextSet(self.windows[torch.randperm(len(self), generator=generator)[:count].sort().values])


@dataclass(frozen=True)
class TextData:
    """A training set and a test set, of windows that have no character in common."""

    train: TextSet
    test: TextSet

    def summary(self) -> list[str]:
        """What is in it, in a few lines for people."""
        width = self.train.windows.shape[1]
        return [
            f"{len(self.train):,} training and {len(self.test):,} test windows of {width - 1} characters",
            f"{len(CHARACTERS)} different characters",
        ]


def load_shakespeare(data: Path | None = None) -> TextData:
    """The text: nine tenths to train on, at every offset; the last tenth to test with, each character predicted once.

    Args:
        data: The directory with data sets, or the file itself; None for the usual places.

    Raises:
        DataError: If it is not there, too short, or has characters that do not occur in it.
    """
    [path] = locate(SHAKESPEARE, data)
    content = _read(path)
    numbers = _numbers(content, path)
    cut = len(numbers) * 9 // 10
    train, test = numbers[:cut], numbers[cut:]
    if len(test) <= CONTEXT:
        raise DataError(f"{path}: {len(numbers):,} characters are too few for windows of {CONTEXT} in their last tenth")
    warn_if_other(SHAKESPEARE, [path], [hashlib.sha256(content).hexdigest()])
    return TextData(TextSet(train.unfold(0, CONTEXT + 1, 1)), TextSet(test.unfold(0, CONTEXT + 1, CONTEXT)))


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) > _LONGEST:
        raise DataError(f"{path}: more than {_LONGEST:,} bytes; the wrong file?")
    return content


def _numbers(content: bytes, path: Path) -> Tensor:
    """The number of each character."""
    table = torch.full((256,), len(CHARACTERS), dtype=torch.uint8)
    table[torch.tensor(list(CHARACTERS.encode()))] = torch.arange(len(CHARACTERS), dtype=torch.uint8)
    numbers = table[torch.frombuffer(bytearray(content or b"\n"), dtype=torch.uint8).long()]
    foreign = (numbers == len(CHARACTERS)).nonzero()
    if len(foreign):
        position = int(foreign[0])
        raise DataError(
            f"{path}: byte {position:,} is {content[position : position + 1]!r}, which does not occur in the text of "
            "Shakespeare; the wrong file?"
        )
    return numbers
