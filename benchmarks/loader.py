"""Throughput of AdaptiveLoader against DataLoader at the same constant batch size.

    python benchmarks/loader.py [--repeats 7] [--examples 4096] [--threads N]

Both loaders take turns within one run, epoch by epoch, so that whatever else the machine does meets both
alike. Ratios are medians over these pairs of epochs; above 1 AdaptiveLoader is faster. On a machine with
other work to do take --threads 1: a gather that waits for a second thread measures the scheduler.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cabs.loader import AdaptiveLoader

SIZES = (16, 128, 1024)


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """A map-style dataset that does a little work for each example, as decoding and augmentation would."""

    def __init__(self, examples: int) -> None:
        self.images = torch.randint(0, 256, (examples, 3, 32, 32), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].float()
        return (image - image.mean()) / image.std(), index % 10


def seconds(loader: Iterable[Any]) -> float:
    """One epoch."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def compare(make: Callable[[Any], Any], repeats: int) -> tuple[float, float, float]:
    """Median seconds of an epoch of ours and of theirs, and the median ratio of theirs to ours."""
    ours, theirs = make(AdaptiveLoader), make(DataLoader)
    seconds(ours), seconds(theirs)  # processes start, memory is touched
    pairs = []
    for repeat in range(repeats):
        # Who goes first alternates too.
        if repeat % 2:
            pairs.append((seconds(ours), seconds(theirs)))
        else:
            second = seconds(theirs)
            pairs.append((seconds(ours), second))
    return (
        statistics.median(ours for ours, _ in pairs),
        statistics.median(theirs for _, theirs in pairs),
        statistics.median(theirs / ours for ours, theirs in pairs),
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="pairs of epochs to take medians of")
    parser.add_argument("--examples", type=int, default=4096, help="examples in an epoch")
    parser.add_argument("--threads", type=int, help="threads of torch in this process")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    pictures = Pictures(arguments.examples)
    tensors = TensorDataset(pictures.images.float(), torch.arange(arguments.examples))
    workers = {"num_workers": 2, "persistent_workers": True}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("tensors in memory", tensors, {}),
        ("map-style, 0 workers", pictures, {}),
        ("map-style, 2 workers", pictures, workers),
    ]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{'':<22}{'batch':>6}{'ours, ex/s':>14}{'DataLoader':>14}{'ratio':>8}")
    for name, dataset, options in cases:
        for size in SIZES:

            def make(kind: Any, dataset: Any = dataset, size: int = size, options: dict[str, Any] = options) -> Any:
                return kind(dataset, batch_size=size, shuffle=True, **options)

            ours, theirs, ratio = compare(make, arguments.repeats)
            rates = f"{arguments.examples / ours:>14,.0f}{arguments.examples / theirs:>14,.0f}"
            print(f"{name:<22}{size:>6}{rates}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
