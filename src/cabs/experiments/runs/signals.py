"""Being asked to stop: by Ctrl-C, by SIGTERM, or by the end of the sweep that started us."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cabs.experiments.errors import CommandError

PARENT = "CABS_SWEEP_PROCESS"
"""Environment variable with the process id of the sweep that a run belongs to."""


class Interrupted(CommandError):
    """The work was asked to stop; it can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopRequest:
    """Knows whether to stop, and why. Asking twice by a signal stops at once."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._parent = os.environ.get(PARENT)

    def __call__(self) -> bool:
        # A sweep that was killed cannot tell its runs; left alone, they would hold their directories.
        if self._parent is not None and str(os.getppid()) != self._parent:
            self.signal_number = self.signal_number or signal.SIGTERM
        return self.signal_number is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal."""
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Ctrl-C and SIGTERM end what is being done at the next good moment, not the program.

    Within another such block, the request is that block's.
    """
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(outer, StopRequest):
        yield outer
        return
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
