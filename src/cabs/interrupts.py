"""Ctrl-C at a bad moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts off Ctrl-C for a moment in which things do not fit together."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def gradients_on(enabled: bool) -> AbstractContextManager[Any]:
    """``torch.no_grad()`` or ``torch.enable_grad()`` where it makes a difference.

    Both are not undone if Ctrl-C comes while they begin, so it is as well not to begin them for nothing.
    """
    if torch.is_grad_enabled() == enabled:
        return nullcontext()
    return torch.enable_grad() if enabled else torch.no_grad()
