"""Several processes that make one run together, as ``torchrun`` starts them.

A person sees the first process: it has the run's directory, the display, the messages and the exit code. The others
follow: they compute their share of every batch, write and print nothing, and end with the first one's exit code. They
print messages only if the first one is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.signals import StopRequest, stop_on_signals
from cabs.parallel.sums import start_all_reduce

T = TypeVar("T")

_END = "cabs/end"
# How long, in seconds, followers wait for the first process's end: while it draws the picture, after an error that it
# will have met too, and when a process was lost, which may have been the first.
_PATIENCE, _PATIENCE_AFTER_ERROR, _PATIENCE_WHEN_LOST = 1800.0, 60.0, 3.0
_LOST = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)


class Lost(CommandError):
    """Another process has ended or cannot be reached."""


def usable_device(name: str) -> torch.device:
    """The device of this name, if PyTorch can compute on it.

    Raises:
        UsageError: If there is no such device.
    """
    try:
        device = torch.device(name)
        torch.ones(2, device=device).sum().item()
        return device
    # Each kind of device has its own way of not being there: RuntimeError, AssertionError, NotImplementedError, ...
    except Exception as error:
        # The first sentence: some go on for pages, about backends and how they are built.
        reason = str(error).partition("\n")[0].partition(". ")[0].strip().rstrip(".")
        raise UsageError(f"--device {name}: cannot be used here ({reason}); the default is cpu") from error


class Crew:
    """The processes of a run; one process is a crew of one.

    Attributes:
        rank: This process's number.
        size: How many there are.
        local_rank: This process's number on its machine.
        local_size: How many there are on it.
        lost: Whether another process could not be reached any more.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self.lost = False

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and messages."""
        return self.rank == 0

    def first(self, work: Callable[[], T]) -> T:
        """The result of some work in the first process, for all processes; its error is raised in all."""
        outcome: list[Any] = [self.together(lambda: work() if self.leads else None)]
        if self.size > 1:
            dist.broadcast_object_list(outcome, src=0)
        return outcome[0]

    def together(self, work: Callable[[], T]) -> T:
        """Do work that all processes finish before any continues; an error of one is raised in all.

        Raises:
            CommandError: This process's, or that of the first process that had one.
        """
        if self.size == 1:
            return work()
        failure: CommandError | None = None
        try:
            result = work()
        except CommandError as error:
            failure = error
        failures: list[Any] = [None] * self.size
        dist.all_gather_object(failures, None if failure is None else (str(failure), failure.exit_code))
        if failure is not None and (self.leads or failures[0] is not None):
            raise failure
        for number, other in enumerate(failures):
            if other is not None:
                raise _failure_of(number, *other)
        return result

    def mean(self, value: torch.Tensor, share: int, examples: int) -> Callable[[], float]:
        """Begin to average a loss over a batch; the function returned waits for it.

        Args:
            value: The mean over this process's examples.
            share: How many those are.
            examples: How many the batch has.
        """
        if self.size == 1:
            return value.item
        total = torch.tensor([value.item() * share / examples if share else 0.0], dtype=torch.float64)
        wait = start_all_reduce(total)
        return lambda: wait().item()

    def stop_for_all(self, request: StopRequest) -> Callable[[], bool]:
        """A function that tells all processes alike to stop as soon as one of them was asked to."""
        if self.size == 1:
            return request

        def stop() -> bool:
            request()
            wait = start_all_reduce(torch.tensor([request.signal_number or 0]), op=dist.ReduceOp.MAX)
            request.signal_number = int(wait()) or None
            return request.signal_number is not None

        return stop

    def device(self, name: str) -> torch.device:
        """This process's device, given that of the run; ``cuda`` is one device for each process of a machine."""
        device = usable_device(name)
        if self.size == 1 or device.type != "cuda":
            return device
        if ":" in name:
            raise UsageError(f"--device {name}: each process takes a device of its own; say --device cuda")
        if (count := torch.cuda.device_count()) < self.local_size:
            raise UsageError(f"{self.local_size} processes on {count} devices; give torchrun --nproc-per-node {count}")
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def model(self, network: nn.Module, device: torch.device) -> nn.Module:
        """The network as it is trained: itself, or one of several replicas."""
        if self.size == 1:
            return network
        # Weights of one input channel have strides that can be read in two ways, of which torch notes that they differ.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        group = dist.new_group(backend="nccl") if device.type == "cuda" else None
        return DistributedDataParallel(network, process_group=group)

    def threads(self, count: int) -> int:
        """This process's part of the threads that a machine computes with."""
        return max(1, count // self.local_size)

    @contextmanager
    def in_contact(self) -> Iterator[None]:
        """Replace the transport's error by a message that another process is gone.

        Raises:
            Lost: In place of the transport's error.
        """
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
                raise
            self.lost = True
            raise Lost("another process has ended, or cannot be reached any more") from error


class Follower:
    """A placeholder for the run's directory, for all processes but the first."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self.config = config

    def write_row(self, row: dict[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_crew = Crew()


def crew() -> Crew:
    """The crew that this process belongs to."""
    return _crew


def run_together(command: Callable[[], int]) -> int:
    """Run the command as one of several processes.

    Args:
        command: Does all the work and returns the exit code.

    Returns:
        The first process's exit code.
    """
    global _crew
    # torchrun signals all others as soon as one has ended; that must not cut short what they are writing.
    try:
        store, _crew = _join()
        with stop_on_signals():
            code = _lead(command, store) if _crew.leads else _follow(command, store)
            if not _crew.lost:
                dist.destroy_process_group()
            return code
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _join() -> tuple[Store, Crew]:
    # Evaluations and pictures are the first process's alone; the others wait that long.
    store, rank, size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=_PATIENCE)))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=_PATIENCE)
    )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return store, Crew(rank, size, int(os.environ["LOCAL_RANK"]), local_size)


def _code_of(command: Callable[[], int]) -> int:
    """The command's exit code, also where it is one of those that exit by themselves."""
    try:
        return command()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)


def _lead(command: Callable[[], int], store: Store) -> int:
    code = 1
    try:
        code = _code_of(command)
    finally:
        # All that was to be written and said has been.
        with contextlib.suppress(RuntimeError):  # the store is another machine's
            store.set(_END, str(code))
    return code


def _follow(command: Callable[[], int], store: Store) -> int:
    words = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(words):
        own = _code_of(command)
    patience = _PATIENCE_WHEN_LOST if _crew.lost else _PATIENCE_AFTER_ERROR if own else _PATIENCE
    code = _end_of_first(store, patience)
    if code is None:
        sys.stderr.write(words.getvalue())
        return own or 1
    return code


def _end_of_first(store: Store, patience: float) -> int | None:
    """The first process's exit code; None if it has not come to an end."""
    deadline = time.monotonic() + patience
    while True:
        try:
            if store.check([_END]):
                return int(store.get(_END))
        except RuntimeError:  # the store has gone with the one who kept it
            return None
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def _failure_of(number: int, message: str, exit_code: int) -> CommandError:
    # The first process reports its own failure, without its number.
    failure = CommandError(message if number == 0 else f"process {number}: {message}")
    failure.exit_code = exit_code
    return failure
