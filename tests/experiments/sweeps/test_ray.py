"""Sweeps on a real Ray cluster: two nodes on this machine, with a core each and no directory in common."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 600.0
MARK = "CABS_TEST_NODE"
GRID = ["digits", "--rules", "cabs,constant", "--sizes", "32,64", "--lrs", "0.1", "--examples", "12k"]

on_linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something to become true."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)  # looking through all processes is work
    raise AssertionError(f"in vain: {what}")


def environment(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended, or belongs to somebody else
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Node:
    """The processes of ``ray start``, and all that they start."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.tmp = home / "tmp"
        self.tmp.mkdir(parents=True)
        self._log = open(home / "log", "wb")  # noqa: SIM115
        settings = {
            MARK: str(home),
            "TMPDIR": str(self.tmp),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_worker_niceness": "0",
        }
        common = ["--num-cpus=1", "--object-store-memory=80000000", f"--temp-dir={home / 'ray'}", "--block"]
        ports = ["--min-worker-port=0", "--max-worker-port=0"]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from ray.scripts.scripts import main; main()",
                "start",
                *common,
                *ports,
                *arguments,
            ],
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_started(self) -> None:
        def started() -> bool:
            said = (self.home / "log").read_text(errors="replace")
            assert self._process.poll() is None, said
            return "Ray runtime started" in said

        until(started, "a node that starts")

    def processes(self) -> list[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if environment(pid).get(MARK) == str(self.home)]

    def runs(self) -> list[int]:
        """Its ``cabs train`` processes."""
        found = []
        for pid in self.processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[1:4] == [b"-m", b"cabs", b"train"]:
                found.append(pid)
        return found

    def kill(self) -> None:
        """What a power cut does."""

        def gone() -> bool:
            self._process.poll()
            for pid in (left := self.processes()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            return not left

        until(gone, "the end of a node")
        self._process.wait()
        self._log.close()


class Nodes:
    """The head and another node."""

    def __init__(self, home: Path) -> None:
        from ray.util import get_node_ip_address

        ip, port, client = get_node_ip_address(), free_port(), free_port()
        self.address = f"{ip}:{port}"
        options = [f"--port={port}", f"--ray-client-server-port={client}", "--include-dashboard=false"]
        self.all = [Node(home / "a", "--head", f"--node-ip-address={ip}", *options)]
        try:
            self.all[0].wait_until_started()
            # With an address of its own it cannot be the one that sweeps connect to.
            self.all.append(Node(home / "b", "--node-ip-address=127.0.0.2", f"--address={self.address}"))
            self.all[1].wait_until_started()
        except BaseException:
            self.kill()
            raise

    def runs(self) -> list[int]:
        return [pid for node in self.all for pid in node.runs()]

    def kill(self) -> None:
        for node in reversed(self.all):
            node.kill()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray")
    home = Path(tempfile.mkdtemp(dir="/tmp", prefix="r"))  # the names of sockets must be short
    try:
        nodes = Nodes(home)
        yield nodes
        nodes.kill()
        assert not [pid for node in nodes.all for pid in node.processes()]
    finally:
        shutil.rmtree(home, ignore_errors=True)


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "cabs", "sweep", *GRID, "--out", str(out), *arguments]


def sweep(out: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(command(out, *arguments), capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts sweeps, none of which outlives the test."""
    processes = []

    def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(out, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def results(out: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows of all runs, but for the time they took."""
    rows = {}
    for path in sorted(out.glob("*/metrics.jsonl")):
        assert json.loads((path.parent / "summary.json").read_text())["status"] == "finished"
        rows[path.parent.name] = [{**json.loads(line), "seconds": None} for line in path.read_text().splitlines()]
    return rows


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The same runs by processes of this machine."""
    out = tmp_path_factory.mktemp("local")
    code, said = sweep(out)
    assert code == 0, said
    return results(out)


@on_linux
def test_a_sweep_that_is_killed_and_stopped_and_given_again(nodes: Nodes, local, started, tmp_path: Path) -> None:
    first = started(tmp_path, "--ray", nodes.address)
    until(nodes.runs, "a run on a node")
    first.kill()
    until(lambda: not nodes.runs(), "the end of the runs of a sweep that was killed")

    second = started(tmp_path, "--ray", nodes.address)
    until(lambda: nodes.runs() and list(tmp_path.glob("*/checkpoint.pt")), "a checkpoint that has come over")
    second.send_signal(signal.SIGINT)
    said = second.communicate(timeout=PATIENCE)[0]
    assert second.returncode == 130, said
    assert "run the same command again to resume" in said
    until(lambda: not nodes.runs(), "the end of the runs of a sweep that was stopped")

    code, said = sweep(tmp_path, "--ray", nodes.address)
    assert code == 0, said
    assert results(tmp_path) == local
    assert "best learning rate" in said


@on_linux
def test_a_node_lost_costs_only_its_unfinished_runs(nodes: Nodes, local, started, tmp_path: Path) -> None:
    process = started(tmp_path, "--ray", nodes.address, "--retries", "0")
    lost = nodes.all[1]

    def held() -> bytes | None:
        """The checkpoint of a run on the node to be lost, stopped when it has one and is not yet finished."""
        for pid in lost.runs():
            try:
                run = Path(os.readlink(f"/proc/{pid}/cwd")) / "run"
                if not (run / "checkpoint.pt").exists():
                    continue
                os.kill(pid, signal.SIGSTOP)
                if not (run / "summary.json").exists() and (run / "checkpoint.pt").exists():
                    assert environment(pid)["PYTHONPATH"].startswith(str(run.with_name("code")))
                    return (run / "checkpoint.pt").read_bytes()
                os.kill(pid, signal.SIGCONT)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return None

    checkpoint = until(held, "a run on the node")
    until(
        lambda: any(path.read_bytes() == checkpoint for path in tmp_path.glob("*/checkpoint.pt")),
        "its checkpoint to come over",
    )
    lost.kill()
    said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, said
    assert "lost (cabs: the node was lost" in said
    assert "resumed" in said
    assert results(tmp_path) == local
