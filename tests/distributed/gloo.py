"""Real processes that talk over gloo, started once and used by many tests."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = int(os.environ.get("CABS_TEST_PATIENCE", "240"))  # seconds, on a machine with much else to do


def serve(connection: Connection) -> None:
    """What a process does: the functions it is sent, each in a process group of its own."""
    torch.set_num_threads(1)
    while True:
        job = connection.recv()
        if job is None:
            return
        function, rank, processes, store, args = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=processes,
                timeout=datetime.timedelta(seconds=PATIENCE),
            )
            try:
                result = (True, function(*args))
            finally:
                dist.destroy_process_group()
        except BaseException:
            result = (False, traceback.format_exc())
        connection.send(result)


class Processes:
    """Up to so many processes; made anew after a test that left them in disorder."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __call__(self, function: Callable[..., Any], processes: int, *args: Any) -> list[Any]:
        """The results of a function in several processes at once."""
        self._start()
        with tempfile.TemporaryDirectory() as directory:
            store = Path(directory) / "store"
            for rank in range(processes):
                self._connections[rank].send((function, rank, processes, str(store), args))
            results = [self._result(rank) for rank in range(processes)]
        failed = [value for good, value in results if not good]
        if failed:
            self.stop()
            raise AssertionError("\n".join(failed))
        return [value for _, value in results]

    def _result(self, rank: int) -> tuple[bool, Any]:
        if not self._connections[rank].poll(PATIENCE):
            return False, f"process {rank} did not answer in {PATIENCE} s"
        try:
            result: tuple[bool, Any] = self._connections[rank].recv()
        except EOFError:
            return False, f"process {rank} died"
        return result

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        for _ in range(self.most):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
