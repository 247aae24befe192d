"""The machine that numbers were made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe(threads: int | None = None) -> dict[str, Any]:
    """What a reader needs to know about a machine to judge its numbers.

    Args:
        threads: Threads that PyTorch computed with; by default those it computes with now.

    Returns:
        ``processor``, ``cores`` (those this process may use), ``memory_gib`` (None where the system does not tell),
        ``system``, ``python``, ``torch`` and ``threads``, all fit for JSON.
    """
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads() if threads is None else threads,
    }


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """How many cores this process may use, which can be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gib() -> float | None:
    """Main memory in GiB."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf, and not every system knows these names
        return None
