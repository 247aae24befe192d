"""A data loader whose batch size may move at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from cabs.loader.arguments import (
    VERSION,
    check_dataset,
    check_microbatch_size,
    check_randomness,
    check_shareable,
    check_state,
    check_workers,
    positive_int,
)
from cabs.loader.batches import Batches, Progress, can_pin, count_batches
from cabs.loader.chunks import Collate, Part
from cabs.loader.conversion import arguments_of
from cabs.loader.deliveries import Delivery, Observed
from cabs.loader.order import EpochSampler, Seed
from cabs.loader.sharing import Shard
from cabs.loader.sources import Size, Workers, fetch
from cabs.torch_loading import pin


class AdaptiveLoader(Observed):
    """A `DataLoader` whose `batch_size` may be set at any time and holds from the very next batch.

    Workers load chunks of examples ahead, and batches are cut to size where they are consumed, so there is no
    lag, whatever `num_workers` and `prefetch_factor`. One epoch visits every example once. A `TensorDataset`
    (or a `Subset` of one) with the default collate takes one gather per batch and tensor, and no workers.

    The order is a function of the seed and the epoch's number. `state_dict` counts the examples handed out,
    not those loaded ahead, and `load_state_dict` resumes at the same example of the same order. A loop that
    leaves an epoch early and starts another gets the next epoch, as with `DataLoader`; a stream continues where
    it stopped.

    Args:
        dataset: Map-style, or a `torch.utils.data.IterableDataset`.
        batch_size: Examples of the next batch.
        shuffle: Whether each epoch of a map-style dataset has a random order.
        sampler: Indices in the order to load them. Where it has `set_epoch`, that is called with the loader's
            epoch. What it draws from torch's global generator follows from the loader's seed, so random
            samplers resume; a sampler with a generator of its own keeps its own order.
        num_workers: Processes that load ahead; 0 loads exactly the examples of a batch, when it is asked for.
        collate_fn: Makes a batch of a list of examples. With workers, one other than `default_collate` is
            called where batches are consumed, once for each batch, with exactly its examples.
        pin_memory: Whether batches are copied to page-locked memory, if there is an accelerator.
        drop_last: Whether to leave out the rest of an epoch that is smaller than the batch size. If not, that rest is
            a batch of its own, or, if it is a single example, goes into the batch before it.
        timeout: Seconds to wait for a worker, 0 for ever.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: How workers are started.
        generator: Where the seed is drawn from; torch's global generator by default.
        seed: The seed itself.
        prefetch_factor: Chunks that each worker loads ahead, 2 by default.
        persistent_workers: Whether workers live on after an epoch.
        chunk_size: Examples that a worker loads at a time. By default a batch of the present size, or up to
            four of them where one is below 64 examples; for an iterable dataset, whose order depends on it,
            that of the first batch size, for good.
        stream: Whether to continue across epochs, for ever, so that every batch has the size asked for.
        max_microbatch_size: The most examples to compute with at a time. If given, each batch comes as its
            microbatches, an iterator: call `scheduler.backward(loss)` on each of them. `"auto"` lets the scheduler
            find the largest that fits into memory.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range or contradicts another.

    Example:
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(7))
        >>> loader = AdaptiveLoader(dataset, batch_size=2)
        >>> for (batch,) in loader:
        ...     print(batch.tolist())
        ...     loader.batch_size += 1
        [0, 1]
        [2, 3, 4]
        [5, 6]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = False,
        *,
        sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        chunk_size: int | None = None,
        stream: bool = False,
        max_microbatch_size: int | Literal["auto"] | None = None,
    ) -> None:
        self._size = Size(positive_int("batch_size", batch_size))
        check_dataset(dataset, bool(shuffle), sampler, stream)
        check_randomness(seed, generator)
        check_microbatch_size(max_microbatch_size, dataset)
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"collate_fn must be callable, not {type(collate_fn).__name__}")
        options = {
            "num_workers": num_workers,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        self._options = check_workers(options)
        self.dataset = dataset
        self.shuffle = bool(shuffle)
        self.num_workers = int(num_workers)
        self.collate_fn: Collate = default_collate if collate_fn is None else collate_fn
        self.pin_memory = pin_memory
        self.drop_last = drop_last
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.generator = generator
        self.prefetch_factor = 2 if num_workers and prefetch_factor is None else prefetch_factor
        self.persistent_workers = persistent_workers
        self.chunk_size = None if chunk_size is None else positive_int("chunk_size", chunk_size)
        self.stream = stream
        self._iterable = isinstance(dataset, IterableDataset)
        if self._iterable and self.chunk_size is None:
            self.chunk_size = self._size.chunk()
        self._seed = Seed(None if seed is None else int(seed), generator)
        self._own_order = sampler is None
        if sampler is None and not self._iterable:
            sampler = EpochSampler(dataset, self.shuffle, self._seed)
        self.sampler = sampler
        self._workers: Workers | None = None
        self._progress = Progress()
        self.max_microbatch_size = max_microbatch_size
        self.least_microbatches = 1  # how many a batch has at least; two if they are compared
        self.place: Callable[[Any], Any] | None = None  # what moves each batch or microbatch to where it is computed
        self.delivery = Delivery()  # what was handed out last
        self.batches_begun = 0
        self.on_delivery: Callable[[Any, Delivery], None] | None = None
        """Called with each batch or microbatch before it is handed out."""
        self.on_request: Callable[[], None] | None = None  # called when a batch is asked for
        self.steered = False  # whether somebody may move the size, so that nobody knows how many batches there will be
        self._shard = Shard()

    @classmethod
    def from_dataloader(cls, loader: DataLoader[Any], **changes: Any) -> AdaptiveLoader:
        """A loader with the dataset, order and workers of a `DataLoader`; `changes` are arguments that differ."""
        return cls(**{**arguments_of(loader), **changes})

    @property
    def batch_size(self) -> int:
        """Examples of the next batch."""
        return self._size.value

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        value = positive_int("batch_size", value)
        self.steered = self.steered or value != self._size.value
        self._size.value = value

    @property
    def epoch(self) -> int:
        """The epoch that the next example belongs to, from 0."""
        return self._progress.epoch

    @property
    def seed(self) -> int | None:
        """The seed of the order; None until it is drawn, at the first iteration or `state_dict`."""
        return self._seed.value

    @property
    def world_size(self) -> int:
        """How many processes share the batches."""
        return self._shard.world_size

    def share(self, rank: int, world_size: int, seed: int | None = None) -> None:
        """Makes the next iteration hand out only this process's share of every batch.

        `batch_size` stays the size of the whole batch. Shares differ by at most one example. A rank whose share of a
        batch is empty gets a placeholder, to keep in step with the others; `delivery` tells. The scheduler calls this
        if several processes train the model.

        Args:
            rank: This process's number, from 0.
            world_size: How many processes there are.
            seed: What the order follows from, the same for all; by default the loader's own.

        Raises:
            ValueError: If the dataset cannot be shared.
        """
        world_size = positive_int("world_size", world_size)
        rank = positive_int("rank", rank, minimum=0)
        if rank >= world_size:
            raise ValueError(f"rank must be below the world size, {world_size}, not {rank}")
        if world_size > 1:
            check_shareable(self._iterable, self._length(), self.sampler)
        self._shard = Shard(rank, world_size)
        self._size.world_size = world_size
        if seed is not None:
            self._seed.value = positive_int("seed", seed, minimum=0)

    def examples(self, count: int) -> Any:
        """The first `count` examples of the dataset as a batch, again from its beginning if there are fewer."""
        indices = [number % len(self.dataset) for number in range(count)]
        batch = fetch(self.dataset, self.collate_fn)([Part(0, 0, count, indices)])
        return pin(batch) if self.pin_memory and can_pin() else batch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of the given epoch; in a resumed epoch, leaves it where it is."""
        epoch = positive_int("epoch", epoch, minimum=0)
        if self._progress.begun or self._progress.epoch != epoch:
            self._progress = Progress(epoch, total=self._progress.total)

    def _length(self) -> int | None:
        try:
            return len(self.dataset if self._iterable else self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def __len__(self) -> int:
        """Batches in an epoch, as long as the batch size stays as it is.

        Raises:
            TypeError: If it is unknown: the batch size moves, or it is a stream, which has no end.
        """
        if self.stream:
            raise TypeError("a stream has no length: it never ends")
        length = self._length()
        if length is None:
            raise TypeError(f"the length of {type(self.dataset).__name__} is not known")
        if self.steered:
            raise TypeError(
                "the number of batches is not known, since their size moves: count examples, of which an epoch has "
                "len(loader.dataset), and scheduler.last.examples_total were seen"
            )
        return count_batches(length, self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        self._seed.fix()
        last = self._progress
        if last.begun and not self.stream:
            self._progress = Progress(last.epoch + 1, total=last.total, begun=True)
        else:
            self._progress = replace(last, begun=True)
        return Batches(self, self._progress)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is, in plain values that `torch.load(..., weights_only=True)` reads."""
        return {
            "version": VERSION,
            "epoch": self._progress.epoch,
            "consumed": self._progress.consumed,
            "total": self._progress.total,
            "seed": self._seed.fix(),
            "batch_size": self.batch_size,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration resume where the state was taken, in the same order, with its batch size.

        Examples before that are not loaded, except that an iterable dataset is run through up to there.
        Iterators that are under way are not affected.

        Args:
            state: What `state_dict` returned, of a loader of the same dataset and order.

        Raises:
            TypeError: If it is not a dict, or not of numbers.
            ValueError: If it is of another kind, version, dataset or order. The loader is then as it was.
        """
        check_state(state, self._identity())
        self._seed.value = int(state["seed"])
        self._size.value = int(state["batch_size"])
        self._progress = Progress(int(state["epoch"]), int(state["consumed"]), int(state["total"]))

    def _identity(self) -> dict[str, Any]:
        """What a state and the loader that loads it must have in common."""
        order = "shuffled" if self.shuffle else "sequential"
        if self._iterable:
            order = "iterable"
        elif not self._own_order:
            order = "sampler"
        # The copies of an iterable dataset in several workers take turns, chunk by chunk.
        turns = [self.num_workers, self.chunk_size] if self._iterable and self.num_workers else None
        return {"order": order, "length": self._length(), "turns": turns}
