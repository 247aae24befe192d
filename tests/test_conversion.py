"""An AdaptiveLoader made of a DataLoader loads what that does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from cabs import AdaptiveLoader

DATA = TensorDataset(torch.arange(23), torch.arange(23) * 2)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


def doubled(examples: list[Any]) -> Any:
    return torch.tensor([2 * int(example[0]) for example in examples])


def examples(loader: Any) -> list[Any]:
    return [example for batch in batches(loader) for example in batch]


def batches(loader: Any) -> list[Any]:
    return [batch[0].tolist() if isinstance(batch, (list, tuple)) else batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=5),
        DataLoader(DATA, batch_size=5, drop_last=True),
        DataLoader(DATA, batch_size=4, collate_fn=doubled),
        DataLoader(DATA, batch_size=4, sampler=[3, 1, 4, 15, 9, 2, 6]),
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 6, drop_last=True)),
        DataLoader(Counting(), batch_size=4),
        DataLoader(Counting(), batch_size=4, drop_last=True),
        DataLoader(DATA, batch_size=6, num_workers=1, prefetch_factor=3),
    ],
    ids=["plain", "drop_last", "collate", "sampler", "batch_sampler", "stream", "stream_drop_last", "workers"],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_same_batches(loader: DataLoader[Any]) -> None:
    adaptive = AdaptiveLoader.from_dataloader(loader)
    assert batches(adaptive) == batches(loader)
    assert len(batches(adaptive)) > 1


def test_shuffled_and_random_orders() -> None:
    shuffled = AdaptiveLoader.from_dataloader(DataLoader(DATA, batch_size=5, shuffle=True), seed=3)
    assert shuffled.shuffle
    assert batches(shuffled) == batches(AdaptiveLoader(DATA, batch_size=5, shuffle=True, seed=3))
    assert sorted(examples(shuffled)) == list(range(23))
    for sampler in (
        WeightedRandomSampler([1.0] * 23, 9),
        RandomSampler(DATA, num_samples=9),
        RandomSampler(DATA, replacement=True),
    ):
        adaptive = AdaptiveLoader.from_dataloader(DataLoader(DATA, batch_size=5, sampler=sampler))
        assert adaptive.sampler is sampler
        assert len(examples(adaptive)) == len(sampler)


def test_the_generator_sets_the_order() -> None:
    orders = []
    for _ in range(2):
        loader = DataLoader(DATA, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1))
        orders.append(batches(AdaptiveLoader.from_dataloader(loader)))
    assert orders[0] == orders[1]


def test_arguments_that_differ() -> None:
    adaptive = AdaptiveLoader.from_dataloader(DataLoader(DATA, batch_size=5), batch_size=7, max_microbatch_size=3)
    assert adaptive.batch_size == 7
    assert adaptive.max_microbatch_size == 3


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1, 2, 3])


class Pairs(BatchSampler):
    pass


def test_what_cannot_be_converted() -> None:
    with pytest.raises(TypeError, match="OwnWay makes its batches in a way of its own"):
        AdaptiveLoader.from_dataloader(OwnWay(DATA))
    with pytest.raises(ValueError, match="batch_size=None"):
        AdaptiveLoader.from_dataloader(DataLoader(DATA, batch_size=None))
    with pytest.raises(ValueError, match="batch_size=None"):
        AdaptiveLoader.from_dataloader(DataLoader(Counting(), batch_size=None))
    with pytest.raises(ValueError, match="Pairs"):
        AdaptiveLoader.from_dataloader(DataLoader(DATA, batch_sampler=Pairs(SequentialSampler(DATA), 2, False)))
    with pytest.raises(TypeError, match="not list"):
        AdaptiveLoader.from_dataloader([1, 2])  # type: ignore[arg-type]
