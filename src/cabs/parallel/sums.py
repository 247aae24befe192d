"""Sums over processes, and how a process ends well after them.

A sum is made by a thread of the transport, which lets go of it a moment after whoever waits for the sum goes on. What
it lets go of last it has to free, and for what is Python's it needs the interpreter; if that is gone by then, the
process aborts. So tensors and futures are held here longer than by the thread, and the interpreter does not go before
the callbacks have, which only the thread can free.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Futures = tuple["torch.futures.Future[Any]", ...]

PATIENCE = 5.0
"""Seconds that callbacks are waited for at most: a thread that waits for a lost process never frees them."""

_held: deque[Any] = deque(maxlen=4)
_callbacks: list[weakref.ref[Any]] = []


def start_all_reduce(message: Tensor, **options: Any) -> Callable[[], Tensor]:
    """Begin to reduce a few numbers of all ranks, in their place, to sums unless ``op`` is another.

    Returns:
        A function that waits for the outcome.
    """
    work = dist.all_reduce(message, async_op=True, **options)
    assert work is not None
    _held.append(work.get_future())

    def wait() -> Tensor:
        work.wait()
        return message

    return wait


def all_reduce_then(buffer: Tensor, group: dist.ProcessGroup, received: Callable[[Tensor], Tensor]) -> Futures:
    """Begin to add up a tensor of all ranks, in its place, and to call a function with the sum.

    Returns:
        Futures to be held until the next such sum; the last is that of what the function returns.
    """
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None

    def callback(future: Any) -> Tensor:
        return received(future.value()[0])

    _callbacks[:] = [reference for reference in _callbacks if reference() is not None]
    _callbacks.append(weakref.ref(callback))
    summed = work.get_future()
    return summed, summed.then(callback)


@atexit.register
def _await_callbacks() -> None:
    deadline = time.monotonic() + PATIENCE
    while any(reference() is not None for reference in _callbacks) and time.monotonic() < deadline:
        time.sleep(0.001)
