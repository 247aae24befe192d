"""The largest microbatch that fits into memory, found by trying."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cabs.loader import AdaptiveLoader
from cabs.parallel import Team

MARGIN = 0.15
"""The part of the free memory that stays unused."""


class Memory(ABC):
    """The memory of a device."""

    @abstractmethod
    def limit(self) -> float:
        """How far ``peak`` may go before something breaks."""

    @abstractmethod
    def peak(self, work: Callable[[], None]) -> float:
        """The most memory in use while some work was done; infinite if it was not enough."""


class CudaMemory(Memory):
    """Of a GPU, what this process has and what is free."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def limit(self) -> float:
        free, _ = torch.cuda.mem_get_info(self._device)
        return float(free + torch.cuda.memory_reserved(self._device))

    def peak(self, work: Callable[[], None]) -> float:
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            work()
            torch.cuda.synchronize(self._device)
            return float(torch.cuda.max_memory_reserved(self._device))
        except torch.OutOfMemoryError:
            return math.inf
        finally:
            torch.cuda.empty_cache()


class HostMemory(Memory):
    """Of the machine, this process's part of what is available, as Linux tells it."""

    def __init__(self, status: Path = Path("/proc/self/status")) -> None:
        self._status = status
        if not status.is_file():
            raise RuntimeError(
                'max_microbatch_size="auto" knows the memory of CUDA devices and of Linux: give a number here'
            )

    def limit(self) -> float:
        available = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
        for most, current in (
            ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        ):
            try:
                available = min(available, int(Path(most).read_text()) - int(Path(current).read_text()))
            except (OSError, ValueError):
                continue  # no such group, or "max": no limit
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return _kilobytes(self._status, "VmRSS") + available / here

    def peak(self, work: Callable[[], None]) -> float:
        Path("/proc/self/clear_refs").write_text("5")  # begins a new high-water mark
        try:
            work()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error):
                raise
            return math.inf
        return _kilobytes(self._status, "VmHWM")


def _kilobytes(path: Path, name: str) -> float:
    line = next(line for line in path.read_text().splitlines() if line.startswith(name + ":"))
    return 1024.0 * int(line.split()[1])


def memory_of(model: nn.Module) -> Memory:
    """The memory of the device that a model is on."""
    device = next(model.parameters()).device
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def find_microbatch_size(
    model: nn.Module,
    trial: Callable[[Any], Tensor],
    loader: AdaptiveLoader,
    most: int,
    *,
    team: Team | None = None,
    memory: Memory | None = None,
) -> int:
    """The largest power of two, up to ``most``, whose forward and backward pass fit into memory with a margin.

    The size is doubled as long as the next one should fit, to judge by the last two. The model, its gradients and
    buffers and torch's random state are restored afterwards.

    Args:
        model: the module that is trained.
        trial: the loss of a batch.
        loader: what makes batches.
        most: the largest size that makes sense.
        team: the processes that train together; they agree on what fits all of them.
        memory: where it must fit; by default that of the model's device.

    Raises:
        MemoryError: not even two examples fit.
    """
    memory = memory or memory_of(model)
    found, size, peaks = 0, min(2, most), [0.0]
    with _as_before(model):
        budget = _most(team, -(1 - MARGIN) * memory.limit())
        while True:
            peaks.append(_most(team, memory.peak(_passes(model, trial, loader, size, team))))
            if peaks[-1] > -budget:
                break
            found = size
            # Memory grows in proportion to the examples: from 2 n to 4 n by twice as much as from n to 2 n.
            larger = min(2 * size, most)
            growth = max(0.0, peaks[-1] - peaks[-2]) * (larger - size) / (size / 2) if len(peaks) > 2 else 0.0
            if size == most or peaks[-1] + growth > -budget:
                break
            size = larger
    if not found:
        raise MemoryError(
            f"a forward and backward pass of {size} examples does not fit into memory: use a smaller model, gradient "
            "checkpointing, or lower precision"
        )
    return found


def _most(team: Team | None, number: float) -> float:
    return number if team is None else team.largest(number)


def _passes(
    model: nn.Module, trial: Callable[[Any], Tensor], loader: AdaptiveLoader, size: int, team: Team | None
) -> Callable[[], None]:
    def passes() -> None:
        if team is not None:
            team.begin_microbatch(last=True)
        loss = trial(loader.examples(size))
        if not isinstance(loss, Tensor):
            raise TypeError(f"trial returned {type(loss).__name__}: it must return the loss of the batch, a tensor")
        loss.mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return passes


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
