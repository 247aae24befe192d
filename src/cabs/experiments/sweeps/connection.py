"""The way to a Ray cluster: its address, the connection, and what a run takes up on a node."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import warnings
from dataclasses import dataclass
from typing import Any

from cabs.experiments.errors import CommandError, UsageError

_CONNECTING = 120.0
_ADDRESS = re.compile(r"auto|(?P<client>ray://)?(?P<host>[^\s/:]+|\[[0-9a-fA-F:]+\]):(?P<port>\d+)")
_HEAD = "start a cluster with  ray start --head  on one machine and give the address that it prints"


@dataclass(frozen=True)
class Resources:
    """What a run takes up on its node.

    Attributes:
        cpus: Cores; as many threads compute.
        gpus: GPUs, or a part of one.
        memory: Bytes of memory; None for any.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.cpus < float("inf"):
            raise UsageError(f"--cpus-per-run {self.cpus:g}: must be a positive number")
        if not 0 <= self.gpus < float("inf"):
            raise UsageError(f"--gpus-per-run {self.gpus:g}: must not be negative")

    @property
    def threads(self) -> int:
        """Threads to compute with."""
        return max(1, int(self.cpus))

    def fit(self, node: dict[str, float]) -> bool:
        """Whether an idle node with these resources has room for a run."""
        needs = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory or 0}
        return all(node.get(name, 0) >= need for name, need in needs.items())


def parse_memory(text: str) -> int:
    """Bytes of memory as people write them: ``500M``, ``2G``, ``1.5GiB``.

    Raises:
        UsageError: If it is not a positive amount.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    value = float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ") if match else 0
    if value < 1:
        raise UsageError(f"--memory-per-run {text}: not an amount of memory; write it like 500M or 2G")
    return int(value)


def check_address(address: str) -> None:
    """Refuse what cannot be the address of a cluster.

    Raises:
        UsageError: If it is neither ``auto`` nor ``HOST:PORT`` nor ``ray://HOST:PORT``.
    """
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"--ray {address}: an address is auto, HOST:PORT or ray://HOST:PORT")


def import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "cabs":
            raise
        raise CommandError(f'--ray needs Ray, and {error.name} is missing:  pip install "torch-cabs[ray]"') from error
    return ray


def connect(ray: Any, address: str) -> None:
    _check_reachable(ray, address)
    # Ray can go on trying for longer than anybody would wait, and cannot be told to stop; nothing is running yet.
    given_up = threading.Timer(_CONNECTING, _give_up, [address])
    given_up.daemon = True
    given_up.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        raise CommandError(f"--ray {address}: cannot connect: {first_line(error)}; {_HEAD}") from error
    finally:
        given_up.cancel()


def _check_reachable(ray: Any, address: str) -> None:
    match = _ADDRESS.fullmatch(address)
    if match is None or match["host"] is None:
        return
    host, what = match["host"].strip("[]"), ""
    if match["client"] is None and host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()
        what = f" at {host}, which Ray takes for this machine's address (see  ray start --node-ip-address)"
    try:
        socket.create_connection((host, int(match["port"])), timeout=20).close()
    except (OSError, OverflowError) as error:
        raise CommandError(f"--ray {address}: nobody answers{what} ({error}); {_HEAD}") from error


def _give_up(address: str) -> None:
    print(f"cabs: --ray {address}: no connection after {_CONNECTING:.0f} seconds; {_HEAD}", file=sys.stderr, flush=True)
    os._exit(1)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
