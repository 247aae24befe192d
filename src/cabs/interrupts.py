"""Ctrl-C at a bad moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C while the state is inconsistent."""
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

    Ctrl-C while one of them begins leaves it on for good, so they are not used without need.
    """
    if torch.is_grad_enabled() == enabled:
        return nullcontext()
    return torch.enable_grad() if enabled else torch.no_grad()
