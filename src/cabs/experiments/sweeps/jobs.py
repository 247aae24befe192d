"""Many runs at a time, each resumable; a crash of one does not touch the others.

They are processes of this machine unless told otherwise; what stands for a process may as well be on another.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.files import open_appending, writing
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.directory import CONFIG, LOG, RunDirectory, read_config, vacant
from cabs.experiments.runs.naming import run_name
from cabs.experiments.runs.reader import SETTLED, read_run, read_status
from cabs.experiments.runs.signals import PARENT

# Another number of threads or place of the data changes no more than the last digits of a run.
_MAY_DIFFER = {"threads", "data"}
_POLL = 0.25
_PATIENCE = 60.0
# A node that is lost is not the run's fault; one run that loses so many in a row before it gets on may be at fault.
_LOSSES = 10

LOST = 1000
"""In place of the exit code of a process that was lost with its machine."""


class Process(Protocol):
    """A run under way, here or elsewhere."""

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass
class Job:
    """One run of a sweep.

    Attributes:
        config: What to run.
        path: Where.
        status: ``waiting``, ``running``, ``finished``, ``diverged``, ``failed``, ``interrupted``, or ``damaged``.
        skipped: Whether an earlier sweep had finished it.
        crashes: How often its process died.
        losses: How often in a row its process was lost with its machine before the run got on.
        trouble: What is wrong with a run that is damaged.
        process: Its process.
    """

    config: RunConfig
    path: Path
    status: str = "waiting"
    skipped: bool = False
    crashes: int = 0
    losses: int = 0
    trouble: str = ""
    process: Process | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def done(self) -> bool:
        """Whether there is no more to do."""
        return self.status in (*SETTLED, "failed", "damaged")

    def damage(self, error: CommandError) -> None:
        """Take note that the run cannot be read; its directory stays as it is."""
        self.status, self.trouble = "damaged", str(error)


def plan(configs: list[RunConfig], out: Path) -> list[Job]:
    """The jobs of a sweep, those that an earlier one has finished marked so, and likewise those that are damaged.

    Raises:
        UsageError: If a directory holds a run of another configuration.
    """
    jobs = []
    for config in configs:
        job = Job(config, out / run_name(config))
        if (job.path / CONFIG).exists():
            _look_at(job)
        elif job.path.exists() and (not job.path.is_dir() or not vacant(job.path)):
            raise UsageError(f"{job.path} is in the way: it is not a run of cabs; choose another --out")
        jobs.append(job)
    return jobs


def _look_at(job: Job) -> None:
    """See what an earlier sweep has made of a job."""
    try:
        there, status = read_config(job.path), read_status(job.path)
        if status in SETTLED:
            read_run(job.path)
    except CommandError as error:
        job.damage(error)
        return
    _check_same(job.config, there, job.path)
    if status in SETTLED:
        job.status, job.skipped = status, True


def _check_same(wanted: RunConfig, there: RunConfig, path: Path) -> None:
    for name in (item.name for item in fields(RunConfig) if item.name not in _MAY_DIFFER):
        if getattr(wanted, name) != getattr(there, name):
            raise UsageError(
                f"{path} holds a run with {name} = {getattr(there, name)}, not {getattr(wanted, name)}; "
                "choose another --out, or remove it"
            )


def run_all(
    jobs: list[Job],
    slots: int,
    retries: int,
    stop: Callable[[], bool],
    changed: Callable[[Job | None], None],
    start: Callable[[Job], Process] | None = None,
) -> bool:
    """Run the waiting jobs.

    Args:
        jobs: All jobs; their statuses are kept up to date.
        slots: How many run at the same time.
        retries: How often to resume a run whose process dies.
        stop: Asked now and then whether to stop early; the runs then leave checkpoints.
        changed: Called when the status of a job has changed, and with None now and then.
        start: Starts a job; its status becomes ``running`` then, or later when its process is polled. None for
            processes of this machine.

    Returns:
        Whether all was done, rather than stopped early.
    """
    waiting = [job for job in jobs if job.status == "waiting"]
    running: list[Job] = []
    start = start or start_here
    with _ended(running):
        while waiting or running:
            if stop():
                _interrupt(running)
                return False
            while waiting and len(running) < slots:
                job = waiting.pop(0)
                try:
                    job.process = start(job)
                except CommandError as error:
                    job.status, job.trouble = "failed", str(error)
                    changed(job)
                    continue
                running.append(job)
                if job.status == "running":
                    changed(job)
            time.sleep(_POLL)
            for job in list(running):
                assert job.process is not None
                before, code = job.status, job.process.poll()
                if code is not None:
                    running.remove(job)
                    _judge(job, code, retries)
                    if job.status == "waiting":
                        waiting.insert(0, job)
                if job.status != before:
                    changed(job)
            changed(None)
    return True


def command_of(job: Job) -> list[str]:
    """The command that resumes or starts a job's run: its configuration is in its directory already."""
    return [sys.executable, "-m", "cabs", *arguments_of(job.config), "--out", str(job.path)]


def arguments_of(config: RunConfig) -> list[str]:
    """The arguments of `cabs` that resume a run, without the run's directory."""
    arguments = ["train", config.problem, "--resume"]
    return arguments if config.data is None else [*arguments, "--data", config.data]


def prepare(job: Job) -> None:
    """Make sure that a job's directory exists, with the configuration in it."""
    if not (job.path / CONFIG).exists():
        RunDirectory.create(job.path, job.config).close()


def start_here(job: Job) -> Process:
    """Start a job as a process of this machine."""
    prepare(job)
    threads = str(job.config.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, PARENT: str(os.getpid())}
    with writing(job.path / LOG), open_appending(job.path / LOG) as log:
        # A session of its own: Ctrl-C reaches the sweep alone, which then asks its runs to stop, once.
        process = subprocess.Popen(
            command_of(job),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    job.status = "running"
    return process


def _judge(job: Job, code: int, retries: int) -> None:
    """Record the outcome of a job whose process has ended."""
    job.process = None
    try:
        status = read_status(job.path)
    except CommandError as error:
        job.damage(error)
        return
    if status in SETTLED:
        job.status = status
    elif code == 130 and status == "interrupted":
        job.status = "interrupted"
    elif code == LOST:
        job.losses += 1
        job.status = "waiting" if job.losses <= _LOSSES else "failed"
    else:
        job.losses = 0
        job.crashes += 1
        job.status = "waiting" if job.crashes <= retries else "failed"


def _interrupt(running: list[Job]) -> None:
    """Ask all running jobs to stop, and wait until they have."""
    for job in running:
        if job.process is not None:
            job.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _PATIENCE
    left = list(running)
    while left and time.monotonic() < deadline:
        time.sleep(_POLL)
        left = [job for job in left if job.process is not None and job.process.poll() is None]
    for job in running:
        if job.process is not None and job.process.returncode is not None:
            job.process = None
            if job.status == "running":
                try:
                    job.status = read_status(job.path)
                except CommandError as error:
                    job.damage(error)
    running[:] = [job for job in running if job.process is not None]


@contextmanager
def _ended(running: list[Job]) -> Iterator[None]:
    """Leave no process behind, whatever happens."""
    try:
        yield
    finally:
        for job in running:
            if job.process is not None and job.process.poll() is None:
                job.process.kill()
                job.process.wait()


def last_words(job: Job) -> str:
    """The last line of a run's output, for an error message."""
    if job.trouble:
        return job.trouble
    try:
        lines = (job.path / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
