"""What an `AdaptiveLoader` must be given to load as a `DataLoader` does."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

SAME_NAME = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "persistent_workers",
)


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of an `AdaptiveLoader` with the examples, order and workers of a `DataLoader`.

    Raises:
        TypeError: If it is no `DataLoader`, or one of a class that makes batches in a way of its own.
        ValueError: If it does not make batches of a number of examples.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"a torch.utils.data.DataLoader can be converted, not {type(loader).__name__}")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{type(loader).__name__} makes its batches in a way of its own, which another loader cannot repeat: make "
            "an AdaptiveLoader of the dataset"
        )
    arguments = {name: getattr(loader, name) for name in SAME_NAME}
    if loader.num_workers:
        arguments["prefetch_factor"] = loader.prefetch_factor
    return {**arguments, **_order(loader)}


def _order(loader: DataLoader[Any]) -> dict[str, Any]:
    """Batch size, order, and what becomes of the last examples."""
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if batches is None:
        raise ValueError(
            "the DataLoader has batch_size=None, so that its dataset makes the batches and nobody else can move their "
            "size: give it a dataset of single examples and a batch_size"
        )
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"the DataLoader's batch_sampler, {type(batches).__name__}, says which examples come together, so that "
            "their number cannot move: give it a sampler of single examples and a batch_size"
        )
    order: dict[str, Any] = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    sampler = batches.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        order["shuffle"] = True
    elif type(sampler) is not SequentialSampler:
        order["sampler"] = sampler
    return order
