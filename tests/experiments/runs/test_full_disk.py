"""Disks that are full and directories that cannot be written: the run ends in words, and nothing saved is lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cabs.experiments.problems import DIGITS
from cabs.experiments.runs import session
from cabs.experiments.runs.config import RunConfig

resource = pytest.importorskip("resource", reason="this system has no limits on file sizes, and mounts in other ways")

SHORT = {"rule": "norm-test", "theta": 0.6, "eval_every": 600, "checkpoint_every": 150, "log_every": 50, "threads": 1}

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def cabs(cabs: Callable[..., tuple[int, str, str]]) -> Command:
    """The command in this process: gives its exit code and what it says of errors."""
    return lambda *arguments: cabs(*arguments)[::2]


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file may be written beyond a size; unlike a full disk, that needs nobody's permission."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def numbers(path: Path) -> str:
    return re.sub(r'"seconds":[0-9.e-]+', "", (path / "metrics.jsonl").read_text())


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path / "checkpoint.pt", weights_only=True)["network"]


def assert_same(path: Path, reference: Path) -> None:
    assert numbers(path) == numbers(reference)
    expected = weights(reference)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(path).items())


def saved(path: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in path.glob("checkpoint*")}


def trained(path: Path, examples: int) -> Path:
    session.train(RunConfig.make(DIGITS, {**SHORT, "examples": examples}), path, Console(quiet=True))
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of 1,200 examples that nothing disturbed."""
    return trained(tmp_path_factory.mktemp("reference") / "run", 1200)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 600 examples, to be copied and gone on with to 1,200."""
    return trained(tmp_path_factory.mktemp("half") / "run", 600)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, which is soon full."""
    path = tmp_path / "disk"
    path.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a small file system")
    mounted = mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path))
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no command mount")


def test_a_limit_on_file_sizes_leaves_the_last_checkpoint(
    cabs: Command, reference: Path, half: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(half, path)
    before = saved(path)
    go_on = ["train", "digits", "--out", str(path), "--resume", "--examples", "1200"]
    with file_limit(len(before["checkpoint.pt"]) - 5000):
        code, words = cabs(*go_on)
    assert code == 1
    assert f"{path / 'checkpoint.pt'} cannot be written: File too large; raise the limit" in words
    assert f"resume from it with: cabs train digits --out {path} --resume" in words
    assert "Traceback" not in words
    assert saved(path) == before
    assert cabs("train", "--out", str(path), "--resume") == (0, "")
    assert_same(path, reference)


def test_a_full_disk_leaves_the_last_checkpoint(cabs: Command, reference: Path, half: Path, disk: Path) -> None:
    path = disk / "run"
    shutil.copytree(half, path)
    before = saved(path)
    room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(room - 20_480))
    code, words = cabs("train", "digits", "--out", str(path), "--resume", "--examples", "1200")
    assert code == 1
    assert f"{path / 'checkpoint.pt'} cannot be written: No space left on device; make room" in words
    assert "Traceback" not in words
    assert saved(path) == before

    room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with open(ballast, "ab") as file:  # to the last byte: now not even a row can be written
        file.write(bytes(room))
    code, words = cabs("train", "--out", str(path), "--resume")
    assert code == 1
    assert "No space left on device; make room" in words
    assert "Traceback" not in words
    assert saved(path) == before

    ballast.unlink()
    assert cabs("train", "--out", str(path), "--resume")[0] == 0
    assert_same(path, reference)


def test_a_directory_that_becomes_read_only(cabs: Command, reference: Path, half: Path, disk: Path) -> None:
    path = disk / "run"
    shutil.copytree(half, path)
    before = saved(path)
    assert mount("-o", "remount,ro", str(disk)).returncode == 0
    code, words = cabs("train", "--out", str(path), "--resume", "--examples", "1200")
    assert code == 1
    assert f"{path} cannot be written: Read-only file system; make the file system writable" in words
    assert "Traceback" not in words
    code, words = cabs("train", "--out", str(disk / "new"))
    assert code == 1
    assert f"{disk / 'new'} cannot be written: Read-only file system" in words
    assert saved(path) == before
    assert mount("-o", "remount,rw", str(disk)).returncode == 0
    assert cabs("train", "--out", str(path), "--resume", "--examples", "1200")[0] == 0
    assert_same(path, reference)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(cabs: Command, reference: Path, half: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(half, path)
    before = saved(path)
    path.chmod(0o555)
    try:
        code, words = cabs("train", "--out", str(path), "--resume", "--examples", "1200")
        assert code == 1
        assert "cannot be written: Permission denied; make it writable" in words
        assert "Traceback" not in words
        assert saved(path) == before
    finally:
        path.chmod(0o755)
    assert cabs("train", "--out", str(path), "--resume", "--examples", "1200")[0] == 0
    assert_same(path, reference)
