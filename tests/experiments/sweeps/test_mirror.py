"""A run on a node and its mirror, without a cluster between them: a stand-in for the package writes the files."""

from __future__ import annotations

import io
import os
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cabs.experiments.errors import CommandError
from cabs.experiments.sweeps.mirror import Mirror
from cabs.experiments.sweeps.node import NodeRun, remove_left_behind

STAND_IN = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
print(*sys.argv[1:3], os.environ["OMP_NUM_THREADS"], flush=True)
(out / "metrics.jsonl").write_text("1\\n2 again\\n3\\n")  # what a checkpoint covers, and other rows after it
(out / "checkpoint.pt").write_text("new")
(out / "half.part").write_text("half")
(out / "summary.json").write_text("{}")
if "wait" in sys.argv:
    time.sleep(600)
sys.exit(3)
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeRun]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    run = NodeRun()
    yield run
    run.close()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text("1\n2\n")
    (path / "checkpoint.pt").write_text("old")
    (path / "summary.json").write_text('{"status": "interrupted"}')
    mirror = Mirror(path)
    yield mirror
    mirror.close()


def package() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("cabs/__init__.py", "")
        archive.writestr("cabs/__main__.py", STAND_IN)
    return buffer.getvalue()


def follow(node: NodeRun, mirror: Mirror, until: str | None = None) -> int | None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        code, changes = node.news(mirror.known)
        mirror.write(changes)
        if code is not None or until in [name for name, _, _ in changes]:
            return code
        time.sleep(0.05)
    raise AssertionError("no end")


def test_a_run_is_sent_and_comes_back(node: NodeRun, mirror: Mirror, tmp_path: Path) -> None:
    files = mirror.files()
    assert files == {"metrics.jsonl": b"1\n2\n", "checkpoint.pt": b"old"}  # the summary was of an earlier end
    node.start(package(), files, ["train", "digits"], 3)
    assert follow(node, mirror) == 3
    came = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    assert came == {
        "metrics.jsonl": "1\n2 again\n3\n",
        "checkpoint.pt": "new",
        "summary.json": "{}",
        "train.log": "train digits 3\n",
    }
    assert node.news(mirror.known) == (3, [])
    node.close()
    assert not list((tmp_path / "tmp").iterdir())


def test_only_what_is_new_is_sent(node: NodeRun, mirror: Mirror) -> None:
    node.start(package(), mirror.files(), ["train", "digits"], 1)
    follow(node, mirror)
    size, digest = mirror.known["metrics.jsonl"]
    with open(node.run / "metrics.jsonl", "a") as file:
        file.write("4\n")
    assert node.news(mirror.known)[1] == [("metrics.jsonl", size, b"4\n")]
    assert node.news({**mirror.known, "metrics.jsonl": (size, digest[::-1])})[1][0][1:] == (0, b"1\n2 again\n3\n4\n")


def test_a_copy_that_is_broken_off_can_be_gone_on_with(mirror: Mirror, tmp_path: Path) -> None:
    changes = [("summary.json", 0, b"{}"), ("checkpoint.pt", 0, b"new"), ("metrics.jsonl", 0, b"1\n2\n3\n")]
    (tmp_path / "run" / "checkpoint.pt.part").mkdir()  # nothing can be written there
    with pytest.raises(CommandError, match="cannot be written"):
        mirror.write(changes)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "1\n2\n3\n"
    assert (tmp_path / "run" / "checkpoint.pt").read_text() == "old"
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_mirror_holds_its_directory(mirror: Mirror, tmp_path: Path) -> None:
    mirror.write([("metrics.jsonl", 0, b"7\n")])
    with pytest.raises(CommandError, match="in use by another process"):
        Mirror(tmp_path / "run")


def test_a_run_is_stopped(node: NodeRun, mirror: Mirror) -> None:
    node.start(package(), mirror.files(), ["train", "digits", "wait"], 1)
    assert follow(node, mirror, until="summary.json") is None
    node.stop()
    assert follow(node, mirror) == -15


def test_what_a_killed_node_left_behind_is_removed(tmp_path: Path, node: NodeRun) -> None:
    left, strange = tmp_path / "tmp" / "cabs-run-left", tmp_path / "tmp" / "cabs-run-strange"
    for path in (left, strange):
        (path / "run").mkdir(parents=True)
    (left / "owner").touch()
    remove_left_behind()
    assert not left.exists()
    assert strange.exists()  # without a lock it is not known to be ours
    assert node.home.exists()
    assert os.listdir(node.home) == ["owner"]
