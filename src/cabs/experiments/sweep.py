"""Many runs in parallel processes: each resumable, none able to take the others down with it."""

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

from cabs.experiments.config import RunConfig
from cabs.experiments.errors import UsageError
from cabs.experiments.rundir import CONFIG, LOG, RunDirectory, read_config
from cabs.experiments.runs import read_status
from cabs.experiments.session import run_name
from cabs.experiments.signals import PARENT

# Another number of threads or place of the data changes no more than the last digits of a run.
_MAY_DIFFER = {"threads", "data"}
_POLL = 0.25
_PATIENCE = 60.0


@dataclass
class Job:
    """One run of a sweep.

    Attributes:
        config: What to run.
        path: Where.
        status: ``waiting``, ``running``, ``finished``, ``diverged``, ``failed``, or ``interrupted``.
        skipped: Whether an earlier sweep had finished it.
        crashes: How often its process died.
    """

    config: RunConfig
    path: Path
    status: str = "waiting"
    skipped: bool = False
    crashes: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.path.name


def plan(configs: list[RunConfig], out: Path) -> list[Job]:
    """The jobs of a sweep, those that an earlier one has finished marked so.

    Raises:
        UsageError: If a directory holds a run of another configuration.
    """
    jobs = []
    for config in configs:
        job = Job(config, out / run_name(config))
        if (job.path / CONFIG).exists():
            _check_same(config, read_config(job.path), job.path)
            status = read_status(job.path)
            if status in ("finished", "diverged"):
                job.status, job.skipped = status, True
        elif job.path.exists() and (not job.path.is_dir() or any(job.path.iterdir())):
            raise UsageError(f"{job.path} is in the way: it is not a run of cabs; choose another --out")
        jobs.append(job)
    return jobs


def _check_same(wanted: RunConfig, there: RunConfig, path: Path) -> None:
    for name in (item.name for item in fields(RunConfig) if item.name not in _MAY_DIFFER):
        if getattr(wanted, name) != getattr(there, name):
            raise UsageError(
                f"{path} holds a run with {name} = {getattr(there, name)}, not {getattr(wanted, name)}; "
                "choose another --out, or remove it"
            )


def run_all(
    jobs: list[Job], workers: int, retries: int, stop: Callable[[], bool], changed: Callable[[Job | None], None]
) -> bool:
    """Run the waiting jobs.

    Args:
        jobs: All jobs; their statuses are kept up to date.
        workers: How many run at the same time.
        retries: How often a run whose process dies is gone on with.
        stop: Asked now and then whether to stop early; the runs then leave checkpoints.
        changed: Called when the status of a job has changed, and with None now and then.

    Returns:
        Whether all was done, rather than stopped early.
    """
    waiting = [job for job in jobs if job.status == "waiting"]
    running: list[Job] = []
    with _ended(running):
        while waiting or running:
            if stop():
                _interrupt(running)
                return False
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                _start(job)
                running.append(job)
                changed(job)
            time.sleep(_POLL)
            for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
                running.remove(job)
                _judge(job, retries)
                if job.status == "waiting":
                    waiting.insert(0, job)
                changed(job)
            changed(None)
    return True


def command_of(job: Job) -> list[str]:
    """The command that goes on with a job's run, or starts it: its configuration is in its directory already."""
    command = [sys.executable, "-m", "cabs", "train", job.config.problem, "--out", str(job.path), "--resume"]
    return command if job.config.data is None else [*command, "--data", job.config.data]


def _start(job: Job) -> None:
    if not (job.path / CONFIG).exists():
        RunDirectory.create(job.path, job.config).close()
    threads = str(job.config.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, PARENT: str(os.getpid())}
    with open(job.path / LOG, "ab") as log:
        # A session of its own: Ctrl-C reaches the sweep alone, which then asks its runs to stop, once.
        job.process = subprocess.Popen(
            command_of(job),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    job.status = "running"


def _judge(job: Job, retries: int) -> None:
    """What became of a job whose process has ended."""
    assert job.process is not None
    code, job.process = job.process.returncode, None
    status = read_status(job.path)
    if status in ("finished", "diverged"):
        job.status = status
    elif code == 130 and status == "interrupted":
        job.status = "interrupted"
    else:
        job.crashes += 1
        job.status = "waiting" if job.crashes <= retries else "failed"


def _interrupt(running: list[Job]) -> None:
    """Ask all running jobs to stop, and wait until they have."""
    for job in running:
        if job.process is not None:
            job.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _PATIENCE
    for job in running:
        if job.process is not None:
            try:
                job.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
            job.process = None
        job.status = read_status(job.path)
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
    """The end of what a run had to say, for an error message."""
    try:
        lines = (job.path / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
