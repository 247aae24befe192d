"""Runs on the nodes of a Ray cluster, each mirrored into the sweep's directory while it is trained.

Nodes share no disk with the sweep, nor with each other. A run is held by an actor (`NodeRun`), which the sweep asks
for what has changed; if the node is lost, the run resumes on another from its last mirrored checkpoint.
"""

from __future__ import annotations

import io
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cabs
from cabs.experiments.errors import CommandError
from cabs.experiments.files import open_appending
from cabs.experiments.runs.checkpoints import NEWEST
from cabs.experiments.runs.directory import LOG
from cabs.experiments.sweeps.connection import Resources, connect, first_line, import_ray
from cabs.experiments.sweeps.jobs import LOST, Job, arguments_of, prepare
from cabs.experiments.sweeps.mirror import Mirror
from cabs.experiments.sweeps.node import NodeRun

_EVERY = 1.0  # seconds between questions to a run
_PATIENCE = 300.0  # seconds that a run may be out of reach before it is given up as lost


class Cluster:
    """A connection to a cluster.

    Attributes:
        notes: What the person at the keyboard should know.
    """

    def __init__(self, ray: Any, resources: Resources) -> None:
        from cabs.experiments.sweeps import node

        self.ray = ray
        self._resources = resources
        ray.cloudpickle.register_pickle_by_value(node)
        self.actor = ray.remote(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            memory=resources.memory,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )(NodeRun)
        self.package = ray.put(_package())
        fitting = any(node["Alive"] and resources.fit(node["Resources"]) for node in ray.nodes())
        self.notes = [] if fitting else ["no node of the cluster has what a run needs; runs wait until one joins"]

    def start(self, job: Job) -> RemoteRun:
        """Have a job run on the next node that has room for it."""
        return RemoteRun(self, job)


@contextmanager
def connected(address: str, resources: Resources) -> Iterator[Cluster]:
    """A connection to a cluster for as long as the block takes; no run stays behind.

    Raises:
        CommandError: If there is no Ray, no cluster, or the connection breaks.
    """
    ray = import_ray()
    connect(ray, address)
    try:
        yield Cluster(ray, resources)
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
        raise CommandError(
            f"the cluster at {address} does not answer any more ({first_line(error)}); "
            "run the same command again to resume"
        ) from error
    finally:
        ray.shutdown()


def _package() -> bytes:
    """The cabs package as a zip file."""
    root = Path(cabs.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, Path(root.name) / path.relative_to(root))
    return buffer.getvalue()


class RemoteRun:
    """A run on a node, or waiting for one; to the sweep a process like those of `subprocess.Popen`.

    Nothing here waits: there is at most one question open, and `poll` sees whether it is answered.

    Attributes:
        returncode: The exit code of the process, or `LOST`; None while it runs.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self.returncode: int | None = None
        self._cluster = cluster
        self._ray = cluster.ray
        self._job = job
        self._mirror: Mirror | None = None
        self._code: int | None = None
        self._actor = cluster.actor.remote()
        self._question = self._actor.__ray_ready__.remote()
        self._next: Callable[[Any], None] = self._placed
        self._not_before = self._answered = time.monotonic()

    def poll(self) -> int | None:
        """Take in what there is from the node; the exit code if the run has ended."""
        if self.returncode is not None or time.monotonic() < self._not_before:
            return self.returncode
        if self._question is None:
            self._ask_for_news()
        elif self._ray.wait([self._question], timeout=0)[0]:
            self._take(self._question)
        return self.returncode

    def _take(self, question: Any) -> None:
        errors = self._ray.exceptions
        self._question = None
        try:
            answer = self._ray.get(question)
        except errors.ActorUnavailableError as error:
            if time.monotonic() - self._answered > _PATIENCE:
                self._lost(error)
            self._not_before = time.monotonic() + _EVERY
        except errors.RayTaskError as error:
            self._broken(error.cause)
        except errors.RaySystemError:  # the connection, not the run
            raise
        except errors.RayError as error:
            self._lost(error)
        else:
            self._answered = time.monotonic()
            self._next(answer)

    def _placed(self, _: object) -> None:
        """A node has room: send it the run."""
        prepare(self._job)
        self._mirror = Mirror(self._job.path)
        self._job.status = "running"
        config = self._job.config
        self._question = self._actor.start.remote(
            self._cluster.package, self._mirror.files(), arguments_of(config), config.threads
        )
        self._next = self._started

    def _started(self, _: object) -> None:
        self._next = self._heard

    def _ask_for_news(self) -> None:
        assert self._mirror is not None
        self._question = self._actor.news.remote(self._mirror.known)

    def _heard(self, news: Any) -> None:
        assert self._mirror is not None
        self._code, changes = news
        self._mirror.write(changes)
        if any(name == NEWEST for name, _, _ in changes):
            self._job.losses = 0
        if self._code is None:
            self._not_before = time.monotonic() + _EVERY
        else:
            self._question = self._actor.close.remote()
            self._next = self._closed

    def _closed(self, _: object) -> None:
        self._end(self._code or 0)

    def _lost(self, error: BaseException) -> None:
        if self._code is not None:  # all of it is here
            self._end(self._code)
            return
        self._note(f"the node was lost: {first_line(error)}")
        self._end(LOST)

    def _broken(self, error: BaseException) -> None:
        self._note(f"the node could not run it: {first_line(error)}")
        self._end(1)

    def _note(self, text: str) -> None:
        """Add a line to the run's log."""
        prepare(self._job)
        with open_appending(self._job.path / LOG) as log:
            log.write(f"cabs: {text}\n".encode())

    def _end(self, code: int) -> None:
        self.returncode = code
        if self._mirror is not None:
            self._mirror.close()
        self._ray.kill(self._actor)

    def send_signal(self, number: int) -> None:
        """Ask the run to stop and leave a checkpoint, by the signal that does so on a node."""
        if self.returncode is None:
            if self._mirror is None:
                self._end(LOST)
            else:
                self._actor.stop.remote()
                self._not_before = time.monotonic()

    def kill(self) -> None:
        """End the run at once."""
        if self.returncode is None:
            self._end(LOST)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the run has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("cabs train", timeout or 0.0)
            time.sleep(0.1)
        return code
