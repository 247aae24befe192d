"""Batches in shares and microbatches: who gets which examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from cabs import AdaptiveLoader
from cabs.loader.deliveries import Batch, microbatch_sizes, shared_sizes
from cabs.loader.sharing import Shard


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 7))
def test_shares_are_disjoint_complete_and_even(first: int, examples: int, world_size: int) -> None:
    counts = [Shard(rank, world_size).count(first, examples) for rank in range(world_size)]
    expected = [sum(t % world_size == rank for t in range(first, first + examples)) for rank in range(world_size)]
    assert counts == expected
    assert max(counts) - min(counts) <= 1
    assert max(counts) == Shard(0, world_size).largest(examples)


@given(st.integers(1, 3000), st.integers(1, 300), st.sampled_from([1, 2]))
def test_microbatches_are_complete_and_fit(examples: int, most: int, least_count: int) -> None:
    sizes = microbatch_sizes(examples, most, least_count)
    assert sum(sizes) == examples
    assert max(sizes) <= most
    assert min(sizes) >= 1
    assert len(sizes) >= min(least_count, examples)
    if most > 2 and examples > 1 and least_count == 1:
        assert min(sizes) > 1, "batch normalisation cannot do with one example"


def test_microbatches_have_few_shapes() -> None:
    shapes = {size for examples in range(65, 2049) for size in microbatch_sizes(examples, 64)}
    assert shapes == {64, 62, 32, 16, 8, 4, 3, 2}
    assert max(len(microbatch_sizes(examples, 64)) for examples in range(65, 129)) <= 6


@given(st.integers(1, 500), st.integers(1, 64), st.integers(2, 5))
def test_ranks_have_equally_many_microbatches(examples: int, most: int, world_size: int) -> None:
    largest = Shard(0, world_size).largest(examples)
    microbatches = []
    for rank in range(world_size):
        share = Shard(rank, world_size).count(0, examples)
        microbatches.append(shared_sizes(share, largest, most))
        assert sum(microbatches[-1]) == share
        assert max(microbatches[-1]) <= most
    assert len({len(sizes) for sizes in microbatches}) == 1


class Numbers(Dataset[int]):
    """Examples that tell their number; not a TensorDataset, so that they are fetched one by one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def run(loader: AdaptiveLoader, sizes: list[int]) -> list[tuple[int, list[int]]]:
    """Batches of the given sizes: how many examples of each are real, and all that came."""
    got = []
    batches = iter(loader)
    for size in sizes:
        loader.batch_size = size
        try:
            batch = next(batches)
        except StopIteration:
            break
        (values,) = batch if isinstance(batch, list) else (batch,)
        got.append((loader.delivery.share, values.tolist()))
    return got


@settings(max_examples=40)
@given(data=st.data(), world_size=st.integers(2, 4), length=st.integers(4, 60), stream=st.booleans())
def test_ranks_get_the_batches_of_one_process(data: Any, world_size: int, length: int, stream: bool) -> None:
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))
    kind = data.draw(st.sampled_from(["tensors", "numbers", "sampler"]))

    def make() -> AdaptiveLoader:
        tensors: Any = TensorDataset(torch.arange(length)) if kind == "tensors" else Numbers(length)
        sampler = RandomSampler(tensors) if kind == "sampler" else None
        return AdaptiveLoader(tensors, shuffle=sampler is None, sampler=sampler, seed=3, stream=stream)

    whole = make()
    expected = run(whole, sizes)
    shares, states = [], []
    for rank in range(world_size):
        loader = make()
        loader.share(rank, world_size)
        shares.append(run(loader, sizes))
        states.append(loader.state_dict())
    assert all(len(share) == len(expected) for share in shares)
    for step, (count, batch) in enumerate(expected):
        parts = [share[step] for share in shares]
        real = sorted(x for n, values in parts for x in values[:n])
        assert real == sorted(batch)
        assert sum(n for n, _ in parts) == count
        assert all(len(values) == max(1, n) for n, values in parts), "an empty share is filled with one example"
        assert max(n for n, _ in parts) - min(n for n, _ in parts) <= 1
    assert all(state == whole.state_dict() for state in states), "a position is the same for any number of processes"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loading_processes_load_only_their_share() -> None:
    parts = []
    for rank in range(2):
        loader = AdaptiveLoader(Numbers(50), batch_size=10, shuffle=True, seed=1, num_workers=1)
        loader.share(rank, 2)
        parts.append([batch.tolist() for batch in loader])
    assert sorted(x for part in parts for batch in part for x in batch) == list(range(50))


def test_a_resumed_run_may_have_other_workers() -> None:
    def loaders(world_size: int) -> list[AdaptiveLoader]:
        made = [AdaptiveLoader(Numbers(40), shuffle=True, seed=5, stream=True) for _ in range(world_size)]
        for rank, loader in enumerate(made):
            loader.share(rank, world_size)
        return made

    (alone,) = loaders(1)
    expected = [sorted(values) for _, values in run(alone, [5, 6, 7, 8, 9, 10, 11])]
    first = loaders(3)
    head = [run(loader, [5, 6, 7]) for loader in first]
    second = loaders(2)
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
    tail = [run(loader, [8, 9, 10, 11]) for loader in second]
    joined = [
        sorted(x for part in parts for x in part[1]) for group in (head, tail) for parts in zip(*group, strict=True)
    ]
    assert joined == expected


def test_batches_come_in_microbatches() -> None:
    loader = AdaptiveLoader(TensorDataset(torch.arange(30)), batch_size=11, max_microbatch_size=4)
    batches = list(map(list, loader))
    assert [[x.tolist() for (x,) in batch] for batch in batches[:1]] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]]
    assert torch.cat([x for batch in batches for (x,) in batch]).tolist() == list(range(30))


def test_the_loader_tells_of_the_microbatch_at_hand() -> None:
    loader = AdaptiveLoader(TensorDataset(torch.arange(30)), batch_size=10, max_microbatch_size=4)
    told: list[tuple[int, int]] = []
    loader.on_delivery = lambda microbatch, delivery: told.append((len(microbatch[0]), delivery.left))
    batch = next(iter(loader))
    assert isinstance(batch, Batch)
    assert (batch.examples, len(batch), batch.sizes) == (10, 3, (4, 4, 2))
    seen = [(len(x), loader.delivery.size, loader.delivery.left) for (x,) in batch]
    assert seen == [(4, 4, 2), (4, 4, 1), (2, 2, 0)]
    assert told == [(4, 2), (4, 1), (2, 0)]


@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_a_batch_that_fails_is_not_delivered(microbatch_size: int | None) -> None:
    class Fails(Numbers):
        fail = True

        def __getitem__(self, index: int) -> int:
            if index == 7 and self.fail:
                raise OSError("no such picture")
            return index

    data = Fails(20)
    loader = AdaptiveLoader(data, batch_size=10, max_microbatch_size=microbatch_size)
    batches = iter(loader)

    def following() -> list[int]:
        batch = next(batches)
        return [int(x) for x in (batch if microbatch_size is None else torch.cat(list(batch)))]

    with pytest.raises(OSError, match="no such picture"):
        following()
    assert loader.state_dict()["total"] == 0
    assert loader.delivery.share == 0
    data.fail = False
    assert following() == list(range(10))
    assert loader.delivery.share == 10


def test_refusals() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    loader = AdaptiveLoader(Numbers(10))
    with pytest.raises(ValueError, match="rank must be below"):
        loader.share(2, 2)
    with pytest.raises(ValueError, match="map-style"):
        AdaptiveLoader(Stream()).share(0, 2)
    sampler: Any = DistributedSampler(Numbers(10), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="leave DistributedSampler out"):
        AdaptiveLoader(Numbers(10), sampler=sampler).share(0, 2)
    with pytest.raises(ValueError, match="__len__"):
        AdaptiveLoader(Numbers(10), sampler=(i for i in range(3))).share(0, 2)
    with pytest.raises(ValueError, match="at least 1"):
        AdaptiveLoader(Numbers(10), max_microbatch_size=0)
    with pytest.raises(ValueError, match="give a number"):
        AdaptiveLoader(Stream(), max_microbatch_size="auto")
    with pytest.raises(RuntimeError, match="trial="):
        next(iter(AdaptiveLoader(Numbers(10), max_microbatch_size="auto")))
