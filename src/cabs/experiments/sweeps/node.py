"""A run on a node of a cluster: a ``cabs train`` process there, and the files that it writes.

The class is sent to the node by value and imports nothing but the standard library; the package follows as a zip
file. So the processes of a node compute with the sweep's version of cabs, whether or not one is installed there.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cabs.experiments.files import PART
from cabs.experiments.runs.directory import LOG, SUMMARY
from cabs.experiments.runs.metrics import METRICS
from cabs.experiments.runs.signals import PARENT

Known = dict[str, tuple[int, bytes]]
"""What the other side has of each file: its size and `digest`."""

Change = tuple[str, int, bytes]
"""A file, how many of the first bytes that the other side has are right, and what comes after them."""

_NEW, _HOME, _OWNER = "cabs-new-", "cabs-run-", "owner"


def digest(content: bytes) -> bytes:
    """Tells one content from another."""
    return hashlib.sha256(content).digest()


def reading_order(name: str) -> int:
    """Files are read in this order and written in the opposite one.

    A summary speaks of a checkpoint, and a checkpoint of rows that are in the metrics already: a copy that is
    broken off never has the one without the other.
    """
    return {SUMMARY: 0, METRICS: 2}.get(name, 1)


class NodeRun:
    """The actor that holds a run. Its process ends when the actor does, and so with the sweep."""

    def __init__(self) -> None:
        import fcntl

        remove_left_behind()
        # The directory gets its name once it is locked, so that no other actor takes it for one left behind.
        made = Path(tempfile.mkdtemp(prefix=_NEW))
        self._lock = open(made / _OWNER, "wb")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.home = made.rename(made.with_name(_HOME + made.name.removeprefix(_NEW)))
        self.run = self.home / "run"
        self._process: subprocess.Popen[bytes] | None = None
        self._unchanged: dict[str, object] = {}

    def start(self, package: bytes, files: dict[str, bytes], arguments: list[str], threads: int) -> None:
        """Start the process that resumes a run.

        Args:
            package: The cabs package, a zip file.
            files: The run's directory.
            arguments: Of the ``cabs`` command, but for the directory.
            threads: How many the process may use.
        """
        code = self.home / "code"
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            archive.extractall(code)
        self.run.mkdir()
        for name, content in files.items():
            (self.run / name).write_bytes(content)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")])),
            PARENT: str(os.getpid()),
        }
        with open(self.run / LOG, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cabs", *arguments, "--out", str(self.run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.home,
                start_new_session=True,
            )

    def news(self, known: Known) -> tuple[int | None, list[Change]]:
        """What has changed.

        Args:
            known: What the sweep has.

        Returns:
            The exit code of the process if it has ended, and the changes to the files.
        """
        assert self._process is not None
        code = self._process.poll()  # asked first: the files of a process that has ended are complete
        names = [entry.name for entry in os.scandir(self.run) if entry.is_file() and not entry.name.endswith(PART)]
        changes = [self._change(name, known.get(name, (0, digest(b"")))) for name in sorted(names, key=reading_order)]
        return code, [change for change in changes if change is not None]

    def _change(self, name: str, known: tuple[int, bytes]) -> Change | None:
        path = self.run / name
        try:
            status = path.stat()
            state = (status.st_mtime_ns, status.st_size, status.st_ino, known)
            if self._unchanged.get(name) == state:
                return None
            content = path.read_bytes()
        except FileNotFoundError:  # replaced by another at this moment
            return None
        size = known[0]
        if digest(content[:size]) != known[1]:
            return name, 0, content
        if len(content) == size:
            self._unchanged[name] = state
            return None
        return name, size, content[size:]

    def stop(self) -> None:
        """Ask the process to stop and leave a checkpoint."""
        # Not SIGINT, which Ray blocks in its processes, and so in what they start.
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """End the process if it has not ended, and leave nothing on the disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.home, ignore_errors=True)
        self._lock.close()


def remove_left_behind() -> None:
    """Remove directories of runs whose actor was killed before it could."""
    import fcntl

    for home in Path(tempfile.gettempdir()).glob(_HOME + "*"):
        try:
            if home.is_symlink() or home.stat().st_uid != os.getuid():
                continue
            with open(home / _OWNER, "rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)
        except OSError:  # in use, or somebody else has just removed it
            continue
