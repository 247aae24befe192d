"""Ctrl-C at a bad moment."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class uninterrupted:
    """Puts off Ctrl-C for a moment in which things do not fit together."""

    def __enter__(self) -> None:
        if MASKS:
            self._before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))

    def __exit__(self, *exception: object) -> None:
        if MASKS:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


MASKS = hasattr(signal, "pthread_sigmask")
"""Whether the system can put signals off; Windows cannot."""


def gradients_on(enabled: bool) -> AbstractContextManager[Any]:
    """``torch.no_grad()`` or ``torch.enable_grad()`` where it makes a difference.

    Both are not undone if Ctrl-C comes while they begin, so it is as well not to begin them for nothing.
    """
    if torch.is_grad_enabled() == enabled:
        return nullcontext()
    return torch.enable_grad() if enabled else torch.no_grad()
