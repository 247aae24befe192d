"""Checks of the loader's arguments, with messages that say what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset

VERSION = 1  # of the loader's state


def positive_int(name: str, value: Any, minimum: int = 1) -> int:
    """`value` as an int, refused unless it is one (a bool is not) and at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {value!r} ({type(value).__name__})")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
    return int(value)


def check_dataset(dataset: Any, shuffle: bool, sampler: Any, stream: bool) -> None:
    """Refuses datasets that cannot be loaded in the order asked for."""
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError("an iterable dataset has an order of its own: shuffle inside it and leave shuffle off")
        if sampler is not None:
            raise ValueError("an iterable dataset has no indices: leave sampler out")
        return
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} has no __getitem__: give the dataset one, or derive it from "
            "torch.utils.data.IterableDataset"
        )
    if sampler is not None:
        if shuffle:
            raise ValueError("a sampler sets the order: leave shuffle off, or leave sampler out")
        if not isinstance(sampler, Iterable):
            raise TypeError(f"sampler must be iterable, not {type(sampler).__name__}")
    elif not hasattr(dataset, "__len__"):
        raise TypeError(f"{type(dataset).__name__} has no __len__: give the dataset one, or pass a sampler")
    elif stream and len(dataset) == 0:
        raise ValueError("the dataset is empty: a stream of it would never give a batch")


def check_randomness(seed: Any, generator: Any) -> None:
    """Refuses invalid seeds and generators, and both at once."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, not {type(generator).__name__}")
    if seed is None:
        return
    if generator is not None:
        raise ValueError("seed and generator both say where the order comes from: pass one of them")
    positive_int("seed", seed, minimum=0)


def check_workers(options: dict[str, Any]) -> dict[str, Any]:
    """The options of workers, refused where they are invalid, or where there are no workers."""
    workers = positive_int("num_workers", options["num_workers"], minimum=0)
    if options["timeout"] < 0:
        raise ValueError(f"timeout must be at least 0 seconds, not {options['timeout']}")
    for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
        if not workers and options[name] is not None and options[name] is not False:
            raise ValueError(f"{name} is about workers: set num_workers > 0, or leave {name} out")
    if options["prefetch_factor"] is not None:
        positive_int("prefetch_factor", options["prefetch_factor"])
    methods = torch.multiprocessing.get_all_start_methods()
    context = options["multiprocessing_context"]
    if isinstance(context, str) and context not in methods:
        raise ValueError(f"multiprocessing_context must be one of {', '.join(methods)}, not {context!r}")
    return options


def check_microbatch_size(size: Any, dataset: Any) -> None:
    """Refuses an invalid size of microbatches."""
    if size == "auto":
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                'max_microbatch_size="auto" tries examples out, which an iterable dataset would lose: give a number'
            )
    elif size is not None:
        positive_int("max_microbatch_size", size)


def check_shareable(iterable: bool, length: int | None, sampler: Any) -> None:
    """Refuses data that several processes cannot share."""
    if iterable:
        raise ValueError(
            "an iterable dataset cannot be shared among processes, for nobody knows its examples by number: use a "
            "map-style dataset"
        )
    if isinstance(sampler, DistributedSampler):
        raise ValueError("the loader shares the data among processes itself: leave DistributedSampler out")
    if length is None:
        raise ValueError("a sampler without a length cannot be shared among processes: give it __len__")


def check_state(state: Any, expected: Mapping[str, Any]) -> None:
    """Refuses a state that is not a loader's, or that is of other data than `expected` describes."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a loader's state is a dict, not {type(state).__name__}")
    numbers = {"epoch": 0, "consumed": 0, "total": 0, "seed": 0, "batch_size": 1}
    missing = [key for key in ("version", *numbers, *expected) if key not in state]
    if missing:
        raise ValueError(f"not the state of an AdaptiveLoader: it lacks {', '.join(missing)}")
    if state["version"] != VERSION:
        raise ValueError(f"the state has version {state['version']!r}, and this release reads version {VERSION}")
    for key, minimum in numbers.items():
        positive_int(f"the state's {key}", state[key], minimum)
    for key, value in expected.items():
        if state[key] != value:
            raise ValueError(
                f"the state is of a loader with {key} {state[key]!r}, this one has {key} {value!r}: "
                "resume with the dataset and arguments it was saved with"
            )
    length = expected.get("length")
    if length is not None and state["consumed"] > length:
        raise ValueError(f"the state has consumed {state['consumed']} of {length} examples")
