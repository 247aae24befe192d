"""The command ``cabs`` with a mishap at one step of one process, for torchrun to start.

    torchrun --nproc-per-node 2 tests/distributed/mishap.py RANK STEP DEED train …

DEED is ``die``, or the name of a signal, which is sent to torchrun and has reached this process before it goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from cabs.cli import main
from cabs.experiments.runs.training import Trainer

RANK, STEP, DEED = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
_step = Trainer.make_step


def step(trainer: Trainer, batches: Any) -> None:
    _step(trainer, batches)
    if (trainer.crew.rank, trainer.step) != (RANK, STEP):
        return
    if DEED == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getppid(), signal.Signals[DEED])
    request = signal.getsignal(signal.SIGTERM).__self__  # type: ignore[union-attr]
    while request.signal_number is None:
        time.sleep(0.01)


if __name__ == "__main__":
    Trainer.make_step = step  # type: ignore[method-assign]
    sys.argv[1:] = sys.argv[4:]
    sys.exit(main())
