"""The adaptive loader against a loop that is obviously right, and its promises one by one."""

from __future__ import annotations

import doctest
import gc
import io
import itertools
import multiprocessing
import os
import signal
import time
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from cabs.loader import AdaptiveLoader
from cabs.loader import adaptive as adaptive_module
from cabs.loader import batches as batches_module
from cabs.loader.chunks import collates_by_parts, cut, join, sample_chunk
from cabs.loader.sources import tensors_of

# Two workers on a machine of one core are slow, not wrong.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Point = namedtuple("Point", ["x", "name"])


class Nested(Dataset[Any]):
    """Examples with everything that default_collate nests."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {
            "index": index,
            "tensor": torch.full((2, 3), float(index)),
            "pair": (index / 7, f"example {index}"),
            "point": Point(torch.tensor(index), str(index).encode()),
            "list": [[index % 2 == 0], {"deep": torch.arange(2) + index}],
            "nothing": (),
        }


class Squares(Dataset[Any]):
    """Examples (i, i²), and a record of which were loaded in this process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.loaded.append(index)
        return index, torch.tensor([float(index**2)])


class Counted(IterableDataset[Any]):
    """0, 1, 2, …, dealt out among workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(start, self.length, step))


class Sized(Counted):
    def __len__(self) -> int:
        return self.length


def same(left: Any, right: Any) -> bool:
    """Equal in values, types and dtypes all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict | UserDict | MappingProxyType):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def reference(
    dataset: Any, order: Callable[[int], list[int]], sizes: list[int], drop_last: bool, stream: bool
) -> Iterator[Any]:
    """What the loader should give: the next m of the epoch's order, collated; in a stream, of all epochs.

    A last example that would be alone comes with the batch before it, and what is dropped is never a whole epoch.
    """
    indices = list(itertools.chain.from_iterable(map(order, range(sum(sizes))))) if stream else order(0)
    whole = len(indices)
    for size in sizes:
        if not stream and not drop_last and size > 1 and len(indices) == size + 1:
            size += 1
        first = len(indices) == whole
        batch, indices = indices[:size], indices[size:]
        if not batch or (drop_last and len(batch) < size and not first):
            return
        yield default_collate([dataset[index] for index in batch])


def order_of(loader: AdaptiveLoader) -> Callable[[int], list[int]]:
    """The loader's order as a function of the epoch, from another loader of the same seed, one by one."""

    def order(epoch: int) -> list[int]:
        twin = AdaptiveLoader(range(len(loader.dataset)), shuffle=loader.shuffle, seed=loader.state_dict()["seed"])
        twin.set_epoch(epoch)
        return [int(batch) for batch in twin]

    return order


def run(loader: AdaptiveLoader, sizes: list[int]) -> Iterator[Any]:
    """Batches of the given sizes."""
    batches = iter(loader)
    for size in sizes:
        loader.batch_size = size
        try:
            yield next(batches)
        except StopIteration:
            return


def indices(batches: Any) -> list[list[int]]:
    """The indices in batches of Squares or Counted."""
    return [(batch[0] if isinstance(batch, list | tuple) else batch).tolist() for batch in batches]


def children() -> list[Any]:
    return multiprocessing.active_children()


# ---------------------------------------------------------------------------------------------- the reference

LOOP = {
    "sizes": st.lists(st.integers(1, 12), min_size=1, max_size=8),
    "resume_after": st.integers(0, 8),
    "drop_last": st.booleans(),
    "stream": st.booleans(),
}


def check_against_reference(loader: AdaptiveLoader, sizes: list[int], resume_after: int) -> None:
    """The same batches as the reference, whether in one go or through a saved state."""
    order = order_of(loader)
    expected = list(reference(loader.dataset, order, sizes, loader.drop_last, loader.stream))
    state = loader.state_dict()
    got = list(run(loader, sizes))
    assert len(got) == len(expected)
    assert all(map(same, got, expected))

    loader.load_state_dict(state)
    before = list(run(loader, sizes[:resume_after]))
    if len(before) == resume_after:  # otherwise the epoch ended, and what follows is the next
        loader.load_state_dict(loader.state_dict())
        before += run(loader, sizes[resume_after:])
    assert len(before) == len(expected)
    assert all(map(same, before, expected))


@settings(max_examples=80, deadline=None)
@given(length=st.integers(0, 30), shuffle=st.booleans(), **LOOP)
def test_in_process_equals_reference(
    length: int, sizes: list[int], resume_after: int, shuffle: bool, drop_last: bool, stream: bool
) -> None:
    loader = AdaptiveLoader(
        Nested(max(length, int(stream))), shuffle=shuffle, seed=length, drop_last=drop_last, stream=stream
    )
    check_against_reference(loader, sizes, resume_after)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 30), shuffle=st.booleans(), **LOOP)
def test_tensors_equal_reference(
    length: int, sizes: list[int], resume_after: int, shuffle: bool, drop_last: bool, stream: bool
) -> None:
    data = TensorDataset(torch.arange(40), torch.randn(40, 2, 2), torch.zeros(40, dtype=torch.bool))
    dataset = Subset(Subset(data, range(39, 4, -1)), list(range(1, 1 + length)))
    loader = AdaptiveLoader(dataset, shuffle=shuffle, seed=length, drop_last=drop_last, stream=stream)
    check_against_reference(loader, sizes, resume_after)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(length=st.integers(0, 30), chunk_size=st.none() | st.integers(1, 9), **LOOP)
def test_two_workers_equal_reference(
    length: int, sizes: list[int], resume_after: int, chunk_size: int | None, drop_last: bool, stream: bool
) -> None:
    loader = AdaptiveLoader(
        Nested(max(length, int(stream))),
        shuffle=True,
        seed=length,
        num_workers=2,
        chunk_size=chunk_size,
        drop_last=drop_last,
        stream=stream,
    )
    check_against_reference(loader, sizes, resume_after)


# ---------------------------------------------------------------------------------------------- size and order


def test_sizes_hold_from_the_next_batch() -> None:
    loader = AdaptiveLoader(Squares(10), batch_size=2)
    seen = []
    for index, square in loader:
        assert torch.equal(square[:, 0], index.float() ** 2)
        seen.append(index.tolist())
        loader.batch_size += 1
    assert seen == [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]], "an example is not left alone"


def test_sizes_hold_from_the_next_batch_with_workers_far_ahead() -> None:
    loader = AdaptiveLoader(Squares(64), batch_size=16, num_workers=2, prefetch_factor=4)
    assert indices(run(loader, [16, 1, 30, 2, 3, 4, 100])) == [
        list(range(*span)) for span in [(0, 16), (16, 17), (17, 47), (47, 49), (49, 52), (52, 56), (56, 64)]
    ]


def test_the_example_in_the_docstring() -> None:
    result = doctest.testmod(adaptive_module)
    assert (result.attempted, result.failed) == (3, 0)


def test_literal_shuffled_orders() -> None:
    loader = AdaptiveLoader(Squares(6), batch_size=4, shuffle=True, seed=0)
    assert indices(loader) == [[1, 5, 0, 3], [4, 2]]
    assert indices(loader) == [[3, 5, 2, 0], [4, 1]]
    other = AdaptiveLoader(Squares(6), batch_size=4, shuffle=True, seed=1)
    assert indices(other) == [[1, 3, 4, 0], [2, 5]]


def test_stream_crosses_epochs() -> None:
    loader = AdaptiveLoader(Squares(3), stream=True, drop_last=True)
    assert indices(run(loader, [2, 2, 7])) == [[0, 1], [2, 0], [1, 2, 0, 1, 2, 0, 1]]
    assert loader.state_dict()["epoch"] == 3
    assert loader.state_dict()["total"] == 11
    # A stream has no epochs to start over: it goes on.
    assert indices(run(loader, [2])) == [[2, 0]]


def test_drop_last_and_length() -> None:
    loader = AdaptiveLoader(Squares(7), batch_size=3, drop_last=True)
    assert len(loader) == 2
    assert indices(loader) == [[0, 1, 2], [3, 4, 5]]
    assert loader.dataset.loaded == list(range(6))
    loader.drop_last = False
    assert len(loader) == 2, "the last example comes with the batch before it"
    assert indices(loader) == [[0, 1, 2], [3, 4, 5, 6]]
    assert len(AdaptiveLoader(Squares(8), batch_size=3)) == 3
    assert len(AdaptiveLoader(Squares(8), batch_size=1)) == 8
    assert len(AdaptiveLoader(Sized(6), batch_size=2)) == 3
    moved = AdaptiveLoader(Squares(8), batch_size=3)
    moved.batch_size = 4
    for unknown in (AdaptiveLoader(Counted(5)), AdaptiveLoader(Squares(5), stream=True), moved):
        with pytest.raises(TypeError):
            len(unknown)


def test_a_size_beyond_the_data_does_not_starve() -> None:
    loader = AdaptiveLoader(Squares(7), batch_size=3, drop_last=True)
    assert indices(loader) == [[0, 1, 2], [3, 4, 5]]
    loader.batch_size = 10
    for _ in range(2):
        assert indices(loader) == [[0, 1, 2, 3, 4, 5, 6]]
    loader.batch_size = 4
    assert indices(loader) == [[0, 1, 2, 3]]


def test_seed_is_drawn_when_first_needed() -> None:
    def order(generator: torch.Generator | None = None) -> tuple[list[list[int]], float]:
        loader = AdaptiveLoader(Squares(20), batch_size=20, shuffle=True, generator=generator)
        torch.manual_seed(3)
        return indices(loader) + indices(loader), torch.rand(()).item()

    torch.manual_seed(1)
    first, after = order()
    assert (first, after) == order()
    assert first[0] != first[1]
    # With a generator the global one is left alone.
    torch.manual_seed(3)
    untouched = torch.rand(()).item()
    given_generator = order(torch.Generator().manual_seed(5))
    assert given_generator == order(torch.Generator().manual_seed(5))
    assert given_generator[1] == untouched


def test_breaking_out_starts_the_next_epoch() -> None:
    loader = AdaptiveLoader(Squares(20), batch_size=5, shuffle=True, seed=0)
    order = order_of(loader)
    for epoch in range(3):
        assert loader.epoch == max(0, epoch - 1)
        first = next(iter(loader))
        assert first[0].tolist() == order(epoch)[:5]
    assert indices(loader) == [order(3)[i : i + 5] for i in range(0, 20, 5)]
    assert loader.state_dict()["epoch"] == 4
    assert loader.state_dict()["consumed"] == 0


def test_set_epoch() -> None:
    loader = AdaptiveLoader(Squares(20), batch_size=20, shuffle=True, seed=0)
    order = order_of(loader)
    loader.set_epoch(7)
    assert indices(loader) == [order(7)]
    loader.set_epoch(2)
    assert indices(run(loader, [4])) == [order(2)[:4]]
    state = loader.state_dict()
    loader.set_epoch(2)
    assert indices(loader) == [order(2)[i : i + 4] for i in range(0, 20, 4)]
    # Loops that number their epochs must not undo what they loaded.
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert indices(loader) == [order(2)[i : i + 4] for i in range(4, 20, 4)]


# ---------------------------------------------------------------------------------------------- collating


def total_of(samples: list[Any]) -> tuple[int, list[int]]:
    return os.getpid(), [sample[0] for sample in samples]


def test_custom_collate_sees_exactly_the_batch() -> None:
    for workers in (0, 2):
        loader = AdaptiveLoader(Squares(20), num_workers=workers, collate_fn=total_of)
        got = list(run(loader, [3, 1, 9, 20]))
        assert [batch for _, batch in got] == [[0, 1, 2], [3], list(range(4, 13)), list(range(13, 20))]
        assert {pid for pid, _ in got} == {os.getpid()}


class Ragged(Squares):
    """Examples of different shapes, which only batches of one can hold."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((index // 4,), index)


def test_chunks_need_not_collate_as_a_whole() -> None:
    loader = AdaptiveLoader(Ragged(12), num_workers=1, chunk_size=3)
    got = list(run(loader, [2, 2, 1, 3, 1, 3]))
    assert [batch.shape for batch in got] == [(2, 0), (2, 0), (1, 1), (3, 1), (1, 2), (3, 2)]
    with pytest.raises(RuntimeError, match="equal size"):
        list(run(loader, [5]))


def test_samples_cross_processes_whole() -> None:
    shared = torch.arange(3)
    samples = [(shared, {"a": [shared.float(), None]}, "text"), (shared, torch.zeros(2, 0), torch.ones(3, 2).T)]
    chunk = sample_chunk(samples)
    assert set(chunk.data) == {torch.int64, torch.float32}  # one tensor per dtype
    part = chunk.part(0, 0)
    assert not part.collated
    assert same(part.data, samples)
    assert part.data[0][0] is part.data[1][0]


def test_default_collate_taught_new_types_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collates_by_parts(default_collate)
    assert not collates_by_parts(total_of)
    monkeypatch.setitem(default_collate_fn_map, Point, lambda batch, collate_fn_map: len(batch))
    assert not collates_by_parts(default_collate)
    points = [Point(1, "a")] * 5
    assert list(run(AdaptiveLoader(points, num_workers=1, chunk_size=2), [3, 9])) == [3, 2]


class Box(UserDict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda i: i,
        lambda i: float(i),
        lambda i: f"{i}",
        lambda i: torch.tensor(i),
        lambda i: [(f"{i}", b"x"), [i]],
        lambda i: Point((i, [i]), {"a": f"{i}"}),
        lambda i: Box({"a": i, "b": (f"{i}",)}),
        lambda i: MappingProxyType({"a": i}),
        lambda i: {"empty": [], "range": range(i, i + 2)},
    ],
)
def test_cut_and_join_undo_each_other(make: Callable[[int], Any]) -> None:
    samples = [make(i) for i in range(7)]
    whole = default_collate(samples)
    for start, stop in [(0, 7), (0, 1), (2, 5), (6, 7)]:
        assert same(cut(whole, start, stop), default_collate(samples[start:stop]))
    assert same(join([default_collate(samples[:2]), default_collate(samples[2:3]), cut(whole, 3, 7)]), whole)


def test_join_refuses_different_shapes() -> None:
    with pytest.raises(RuntimeError, match=r"\[1, 2\] elements"):
        join([default_collate([(1,)]), default_collate([(1, 2)])])
    with pytest.raises(TypeError, match="pass a collate_fn"):
        join([object(), object()])


class Batched(Squares):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.loaded.append(tuple(indices))  # type: ignore[arg-type]
        return [(i, torch.tensor([float(i)])) for i in indices]


def test_datasets_that_load_batches_are_asked_for_batches() -> None:
    dataset = Batched(5)
    assert indices(run(AdaptiveLoader(dataset), [3, 9])) == [[0, 1, 2], [3, 4]]
    assert dataset.loaded == [(0, 1, 2), (3, 4)]


def test_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert indices(AdaptiveLoader(Squares(2), 2, pin_memory=True)) == [[0, 1]]
    monkeypatch.setattr(batches_module, "can_pin", lambda: True)
    monkeypatch.setattr(batches_module, "pin", lambda batch: ("pinned", batch))
    assert next(iter(AdaptiveLoader(Squares(2), 2, pin_memory=True)))[0] == "pinned"


# ---------------------------------------------------------------------------------------------- tensors in memory


def test_tensor_datasets_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("an example was loaded by itself")

    dataset = TensorDataset(torch.arange(6), torch.arange(12).view(6, 2))
    monkeypatch.setattr(TensorDataset, "__getitem__", fail)
    for data in (dataset, Subset(dataset, [0, 1, -4, 3, 4, -1])):
        loader = AdaptiveLoader(data, batch_size=4, num_workers=2)
        first, second = loader
        assert same(first, [torch.arange(4), torch.arange(8).view(4, 2)])
        assert same(second, [torch.arange(4, 6), torch.arange(8, 12).view(2, 2)])
        first[0].zero_()  # a batch is a copy
        assert dataset.tensors[0].tolist() == list(range(6))
    assert not children()
    by_sampler = AdaptiveLoader(dataset, batch_size=4, sampler=[5, -2, 0])
    assert indices(by_sampler) == [[5, 4, 0]]


class Changed(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return -self.tensors[0][index]


def test_what_is_not_gathered() -> None:
    plain = TensorDataset(torch.arange(4))
    for dataset in (
        Squares(3),
        Changed(torch.arange(4)),
        Subset(Squares(3), [0]),
        Subset(plain, ["a"]),  # type: ignore[list-item]
        Subset(plain, [True, False]),
        TensorDataset(torch.eye(3).to_sparse()),
    ):
        assert tensors_of(dataset) is None
    assert next(iter(AdaptiveLoader(Changed(torch.arange(4)), 4))).tolist() == [0, -1, -2, -3]
    assert next(iter(AdaptiveLoader(plain, 4, collate_fn=len))) == 4


# ---------------------------------------------------------------------------------------------- samplers


def test_samplers_set_the_order() -> None:
    assert indices(AdaptiveLoader(Squares(5), 2, sampler=[4, 0, 4, 1])) == [[4, 0], [4, 1]]
    words = {"a": 1, "b": 2}
    assert next(iter(AdaptiveLoader(words, 2, sampler=["b", "a"]))).tolist() == [2, 1]
    endless = AdaptiveLoader(Squares(100), sampler=itertools.cycle([1, 2]))  # type: ignore[arg-type]
    assert indices(run(endless, [3, 2])) == [[1, 2, 1], [2, 1]]
    with pytest.raises(TypeError):
        len(endless)


def test_distributed_sampler_is_told_the_epoch() -> None:
    ranks = []
    for rank in range(2):
        sampler: Any = DistributedSampler(Squares(10), num_replicas=2, rank=rank, seed=4)
        loader = AdaptiveLoader(Squares(10), 5, sampler=sampler)
        assert len(loader) == 1
        ranks.append(indices(loader) + indices(loader))
        sampler.set_epoch(1)
        assert ranks[-1][1] == list(sampler)
    for epoch in range(2):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == list(range(10))


@pytest.mark.parametrize("workers", [0, 1])
def test_random_samplers_resume(workers: int) -> None:
    def make() -> AdaptiveLoader:
        sampler = WeightedRandomSampler([1.0] * 9, 30) if workers else RandomSampler(Squares(30))
        return AdaptiveLoader(Squares(30), 4, sampler=sampler, seed=1, num_workers=workers)

    torch.manual_seed(0)
    untouched = torch.rand(())
    torch.manual_seed(0)
    whole = indices(make())
    assert torch.rand(()) == untouched
    loader = make()
    assert indices(run(loader, [4, 4])) == whole[:2]
    other = make()
    other.load_state_dict(loader.state_dict())
    assert indices(other) == whole[2:]


# ---------------------------------------------------------------------------------------------- iterable datasets


def test_iterable_in_process() -> None:
    loader = AdaptiveLoader(Counted(7))
    assert indices(run(loader, [2, 4, 4])) == [[0, 1], [2, 3, 4, 5, 6]]
    loader = AdaptiveLoader(Counted(7), stream=True)
    assert indices(run(loader, [5, 5, 16])) == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2], [3, 4, 5, 6, *range(7), *range(5)]]
    other = AdaptiveLoader(Counted(7), stream=True)
    other.load_state_dict(loader.state_dict())
    assert indices(run(other, [4])) == [[5, 6, 0, 1]]
    with pytest.raises(RuntimeError, match="gave no example"):
        next(iter(AdaptiveLoader(Counted(0), stream=True)))


def test_iterable_with_workers() -> None:
    def make(**options: Any) -> AdaptiveLoader:
        return AdaptiveLoader(Counted(11), num_workers=2, chunk_size=2, **options)

    order = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9]
    loader = make()
    assert indices(run(loader, [3, 1, 9])) == [order[:3], order[3:4], order[4:]]
    loader = make(stream=True, persistent_workers=True)
    assert indices(run(loader, [3, 10])) == [order[:3], order[3:] + order[:2]]
    other = make(stream=True)
    other.load_state_dict(loader.state_dict())
    assert indices(run(other, [10])) == [order[2:] + order[:1]]
    with pytest.raises(ValueError, match="turns"):
        AdaptiveLoader(Counted(11), num_workers=1, chunk_size=2).load_state_dict(other.state_dict())


# ---------------------------------------------------------------------------------------------- state


def test_resuming_loads_nothing_twice() -> None:
    loader = AdaptiveLoader(Squares(22), shuffle=True, stream=False)
    list(run(loader, [3, 8]))
    state = loader.state_dict()
    assert {key: state[key] for key in ("version", "epoch", "consumed", "total", "batch_size")} == {
        "version": 1,
        "epoch": 0,
        "consumed": 11,
        "total": 11,
        "batch_size": 8,
    }
    other = AdaptiveLoader(Squares(22), shuffle=True)
    other.load_state_dict(state)
    assert other.batch_size == 8
    rest = next(iter(other))[0].tolist()
    assert other.dataset.loaded == rest == order_of(loader)(0)[11:19]
    assert other.state_dict()["total"] == 19


def test_state_counts_what_the_consumer_got() -> None:
    loader = AdaptiveLoader(Squares(40), 4, num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    for steps in range(1, 4):
        next(batches)
        assert loader.state_dict()["consumed"] == 4 * steps
    batches.close()  # type: ignore[attr-defined]
    assert not children()
    assert next(batches, None) is None


def test_state_survives_safe_loading() -> None:
    loader = AdaptiveLoader(Squares(9), 2, shuffle=True, seed=2**62)
    next(iter(loader))
    stream = io.BytesIO()
    torch.save(loader.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    assert state == loader.state_dict()
    loader.load_state_dict(state)


def test_state_at_the_end_of_an_epoch() -> None:
    loader = AdaptiveLoader(Squares(4), 2)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 4)
    other = AdaptiveLoader(Squares(4), 2)
    other.load_state_dict(state)
    # The interrupted epoch has nothing left; the next has everything.
    assert [len(list(other)), len(list(other))] == [0, 2]
    assert next(batches, None) is None
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"], state["total"]) == (1, 0, 4)


def test_older_iterators_keep_their_own_count() -> None:
    loader = AdaptiveLoader(Squares(6), 2)
    old, new = iter(loader), iter(loader)
    next(new)
    assert indices(old) == [[0, 1], [2, 3], [4, 5]]
    assert loader.state_dict()["consumed"] == 2
    assert loader.epoch == 1


GOOD: dict[str, Any] = AdaptiveLoader(Squares(9), 3, seed=1).state_dict()


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ([1], TypeError, "a dict"),
        ({}, ValueError, "lacks version"),
        ({"step": 3, "lr": 0.1}, ValueError, "not the state of an AdaptiveLoader"),
        ({**GOOD, "version": 2}, ValueError, "reads version 1"),
        ({**GOOD, "length": 10}, ValueError, "length 10, this one has length 9"),
        ({**GOOD, "order": "shuffled"}, ValueError, "order 'shuffled', this one has order 'sequential'"),
        ({**GOOD, "consumed": 10}, ValueError, "consumed 10 of 9"),
        ({**GOOD, "consumed": -1}, ValueError, "at least 0"),
        ({**GOOD, "batch_size": 0}, ValueError, "at least 1"),
        ({**GOOD, "seed": 1.5}, TypeError, "seed must be an int"),
    ],
)
def test_bad_states_change_nothing(state: Any, error: type[Exception], match: str) -> None:
    loader = AdaptiveLoader(Squares(9), 3, seed=5)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(error, match=match):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, not 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an int"),
        ({"batch_size": True}, TypeError, "batch_size must be an int"),
        ({"batch_size": None}, TypeError, "batch_size must be an int"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
        ({"shuffle": True, "sampler": [0]}, ValueError, "leave shuffle off"),
        ({"sampler": 3}, TypeError, "sampler must be iterable"),
        ({"dataset": Counted(3), "shuffle": True}, ValueError, "shuffle inside it"),
        ({"dataset": Counted(3), "sampler": [0]}, ValueError, "has no indices"),
        ({"dataset": iter([1])}, TypeError, "IterableDataset"),
        ({"dataset": Dataset()}, TypeError, "has no __len__"),
        ({"dataset": [], "stream": True}, ValueError, "dataset is empty"),
        ({"seed": 1, "generator": torch.Generator()}, ValueError, "pass one of them"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": "1"}, TypeError, "seed must be an int"),
        ({"generator": 3}, TypeError, "torch.Generator"),
        ({"collate_fn": 3}, TypeError, "callable"),
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0"),
        ({"prefetch_factor": 2}, ValueError, "set num_workers > 0"),
        ({"persistent_workers": True}, ValueError, "persistent_workers is about workers"),
        ({"multiprocessing_context": "fork"}, ValueError, "multiprocessing_context is about workers"),
        ({"multiprocessing_context": "knife", "num_workers": 1}, ValueError, "must be one of"),
        ({"prefetch_factor": 0, "num_workers": 1}, ValueError, "prefetch_factor must be at least 1"),
        ({"timeout": -1}, ValueError, "timeout"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], match: str) -> None:
    dataset = options.pop("dataset", [1, 2, 3])
    with pytest.raises(error, match=match):
        AdaptiveLoader(dataset, **options)


@pytest.mark.parametrize("size", [0, -3, 1.5, False, "4", None])
def test_bad_sizes_are_refused_when_assigned(size: Any) -> None:
    loader = AdaptiveLoader(Squares(9), 3)
    with pytest.raises((TypeError, ValueError), match="batch_size must be"):
        loader.batch_size = size
    assert loader.batch_size == 3


def test_attributes_of_a_dataloader() -> None:
    generator = torch.Generator()
    ours = AdaptiveLoader(Squares(4), 2, num_workers=1, generator=generator, timeout=5)
    theirs: Any = DataLoader(ours.dataset, 2, num_workers=1, generator=generator, timeout=5)
    shared = set(vars(ours)) & set(dir(theirs)) | {"batch_size"}
    assert {"dataset", "num_workers", "collate_fn", "drop_last", "pin_memory", "generator"} <= shared
    for name in shared - {"sampler"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert list(ours.sampler) == list(theirs.sampler)  # type: ignore[arg-type]
    assert len(ours) == len(theirs)


# ---------------------------------------------------------------------------------------------- failing and stopping


class Failing(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("no such picture")
        return super().__getitem__(index)


def test_errors_of_workers_reach_the_user() -> None:
    loader = AdaptiveLoader(Failing(9), 2, num_workers=2, chunk_size=2)
    batches = iter(loader)
    assert indices(itertools.islice(batches, 2)) == [[0, 1], [2, 3]]
    with pytest.raises(KeyError, match=r"(?s)Original Traceback.*test_loader.*no such picture"):
        next(batches)
    assert not children()
    assert loader.state_dict()["consumed"] == 4


class Interrupted(Squares):
    """The keyboard is hit once, while example 5 is loaded."""

    hit = False

    def __getitem__(self, index: int) -> Any:
        if index == 5 and not self.hit:
            self.hit = True
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_an_interrupted_batch_is_not_lost() -> None:
    loader = AdaptiveLoader(Interrupted(10), 4, shuffle=False)
    batches = iter(loader)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert loader.state_dict()["consumed"] == 4
    assert indices(batches) == [[4, 5, 6, 7], [8, 9]]


class Slow(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            time.sleep(0.3)
        return super().__getitem__(index)


def test_an_interrupt_while_waiting_for_workers() -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    loader = AdaptiveLoader(Slow(8), 2, num_workers=2, chunk_size=2)
    batches = iter(loader)
    assert indices(itertools.islice(batches, 2)) == [[0, 1], [2, 3]]
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not children()
    assert indices(batches) == [[4, 5], [6, 7]]


def test_abandoned_workers_end() -> None:
    gc.disable()  # no help from the cycle collector
    try:
        for _ in AdaptiveLoader(Squares(40), 2, num_workers=2, stream=True):
            assert len(children()) == 2
            break
        assert not children()
    finally:
        gc.enable()


def where(samples: list[Any]) -> Any:
    return [sample[0] for sample in samples], {sample[1] for sample in samples}


class Noisy(Squares):
    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2)


def test_noise_in_workers_follows_from_the_seed() -> None:
    def epochs(seed: int) -> list[Any]:
        loader = AdaptiveLoader(Noisy(8), 8, num_workers=1, chunk_size=4, seed=seed)
        return [next(iter(loader))[1] for _ in range(2)]

    first = epochs(1)
    assert same(first, epochs(1))
    assert not same(first[0], first[1])
    assert not same(first, epochs(2))


class Located(Squares):
    def __getitem__(self, index: int) -> Any:
        return index, os.getpid()


def test_persistent_workers() -> None:
    gc.disable()
    try:
        loader = AdaptiveLoader(Located(12), 4, num_workers=2, chunk_size=3, persistent_workers=True, collate_fn=where)
        old = iter(loader)
        _, pids = next(old)
        epochs = [list(loader), list(loader)]
        assert pids | set().union(*(pids for epoch in epochs for _, pids in epoch)) == {c.pid for c in children()}
        for epoch in epochs:
            assert [batch for batch, _ in epoch] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        with pytest.raises(RuntimeError, match="newer iterator"):
            next(old)
        del loader, old
        assert not children()
    finally:
        gc.enable()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
@pytest.mark.parametrize("collate_fn", [None, list])
def test_many_small_chunks_release_their_shared_memory(collate_fn: Any) -> None:
    loader = AdaptiveLoader(Squares(200), 150, num_workers=1, chunk_size=2, collate_fn=collate_fn)
    batches = iter(loader)
    before = len(os.listdir("/proc/self/fd"))
    batch = next(batches)
    after = len(os.listdir("/proc/self/fd"))
    assert len(batch if collate_fn else batch[0]) == 150
    assert after - before < 50


class Unsized(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.length))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "examples", "iterable", "sampler"])
@given(length=st.integers(1, 40), sizes=st.lists(st.integers(1, 15), min_size=1, max_size=8))
@settings(deadline=None, max_examples=40)
def test_a_pass_knows_when_it_is_at_its_end(kind: str, drop_last: bool, length: int, sizes: list[int]) -> None:
    def loader() -> AdaptiveLoader:
        dataset: Any = {"tensors": TensorDataset(torch.arange(length)), "iterable": Unsized(length)}.get(
            kind, range(length)
        )
        sampler = (number for number in range(length)) if kind == "sampler" else None
        return AdaptiveLoader(dataset, batch_size=sizes[0], drop_last=drop_last, sampler=sampler)

    def run(asks: bool) -> tuple[list[Any], list[bool]]:
        batches, ends, one = [], [], loader()
        iterator: Any = iter(one)
        for batch in iterator:
            batches.append((batch[0] if isinstance(batch, list) else batch).tolist())
            one.batch_size = sizes[len(batches) % len(sizes)]
            if asks:
                ends.append(iterator.at_end())
        return batches, ends

    batches, ends = run(asks=True)
    assert ends == [False] * (len(batches) - 1) + [True] * bool(batches)
    assert batches == run(asks=False)[0]


def test_a_stream_is_never_at_its_end() -> None:
    batches: Any = iter(AdaptiveLoader(TensorDataset(torch.arange(4)), batch_size=4, stream=True))
    next(batches)
    assert not batches.at_end()
