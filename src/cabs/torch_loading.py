"""What is private or undocumented of PyTorch's data loader, behind names of its own; see ``torch_internals.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import collate, pin_memory


def default_collate_is_as_it_came() -> bool:
    """Whether nobody has changed ``default_collate``'s map of types. Why: the map is in a private module. Since 2.0."""
    return all(function.__module__ == collate.__name__ for function in collate.default_collate_fn_map.values())


def end_workers(loader: DataLoader[Any], iterator: Any) -> None:
    """Ends the workers of a loader's iterator. Why: publicly, only garbage collection does. Since 1.7."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None


pin: Callable[[Any], Any] = pin_memory.pin_memory
"""Pins all tensors of a batch. Why: publicly only tensors can be pinned, one by one. Since 1.2."""
