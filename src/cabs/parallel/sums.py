"""Sums over processes, and a clean end of the process after them.

A thread of the transport makes the sum, and drops its references a moment after the caller continues. If they are the
last ones, that thread frees Python objects, for which it needs the interpreter; if the interpreter has ended by then,
the process aborts. So tensors and futures are held here for longer than by the thread, and the interpreter waits at
its end for the callbacks, which only the thread can free.
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
"""The longest wait for callbacks, in seconds: a thread that waits for a lost process never frees them."""

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
