"""Ctrl-C at a bad moment."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class uninterrupted:
    """Delays Ctrl-C while the state is inconsistent."""

    def __enter__(self) -> None:
        if MASKS:
            self._before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))

    def __exit__(self, *exception: object) -> None:
        if MASKS:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


MASKS = hasattr(signal, "pthread_sigmask")
"""Whether the system can delay signals; Windows cannot."""


def gradients_on(enabled: bool) -> AbstractContextManager[Any]:
    """``torch.no_grad()`` or ``torch.enable_grad()`` where it makes a difference.

    Ctrl-C while one of them begins leaves it on for good, so they are not used without need.
    """
    if torch.is_grad_enabled() == enabled:
        return nullcontext()
    return torch.enable_grad() if enabled else torch.no_grad()
