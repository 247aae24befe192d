"""Files of others in a run's directory: links, pipes and directories under the names of files that runs write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cabs.experiments.errors import UsageError, WriteError
from cabs.experiments.files import atomically, open_alone, open_appending, write_synced
from cabs.experiments.problems import DIGITS
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.directory import RunDirectory, read_config

CONFIG = RunConfig.make(DIGITS, {"examples": 1000})
NAMES = (
    *("metrics.jsonl", "summary.json", "checkpoint.pt", "checkpoint-previous.pt", "picture.png", "train.log"),
    *("config.json.part", "checkpoint.pt.part", "summary.json.part"),
)


def write_everything(path: Path, *, force: bool) -> None:
    with RunDirectory.create(path, CONFIG, force=force) as run:
        run.write_row({"examples": 0})
        run.save_checkpoint({"examples": 0})
        run.save_checkpoint({"examples": 0})
        run.write_summary({"status": "finished"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_force_never_writes_through_a_link(tmp_path: Path, name: str, link) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    write_everything(tmp_path / "run", force=False)
    (tmp_path / "run" / name).unlink(missing_ok=True)
    link(precious, tmp_path / "run" / name)
    write_everything(tmp_path / "run", force=True)
    assert precious.read_text() == "mine"
    assert not (tmp_path / "run" / name).is_symlink()


def test_force_replaces_a_config_that_is_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    write_everything(tmp_path / "one", force=False)
    before = (tmp_path / "one" / "config.json").read_bytes()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").symlink_to(tmp_path / "one" / "config.json")
    other = RunConfig.make(DIGITS, {"examples": 1000, "seed": 7})
    with RunDirectory.create(tmp_path / "two", other, force=True):
        pass
    assert (tmp_path / "one" / "config.json").read_bytes() == before
    assert read_config(tmp_path / "two").seed == 7


def test_a_link_is_not_appended_to_when_a_run_is_resumed(tmp_path: Path) -> None:
    write_everything(tmp_path / "run", force=False)
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "elsewhere").write_bytes(rows + b'{"examples": 7}\n')
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteError, match="it is a link: remove that"):
        RunDirectory.resume(tmp_path / "run", CONFIG)
    assert (tmp_path / "elsewhere").read_bytes() == rows + b'{"examples": 7}\n'


def test_a_directory_with_a_link_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "empty")
    with pytest.raises(UsageError, match="neither empty nor a run"):
        RunDirectory.create(tmp_path / "run", CONFIG)


@pytest.mark.parametrize("name", ["summary.json", "checkpoint.pt", "train.log", "picture.png.part"])
def test_a_directory_in_the_place_of_a_file_is_found_before_anything_is_removed(tmp_path: Path, name: str) -> None:
    write_everything(tmp_path / "run", force=False)
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).mkdir()
    (tmp_path / "run" / name / "precious").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=f"{name} is a directory"):
        RunDirectory.create(tmp_path / "run", CONFIG, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pipe_does_not_make_anybody_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        open_appending(tmp_path / "pipe")


def test_every_way_of_writing_leaves_links_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("a.part", "b", "c"):
        (tmp_path / name).symlink_to(precious)
    with atomically(tmp_path / "a") as file:
        file.write(b"ours")
    write_synced(tmp_path / "b", b"ours")
    with pytest.raises(OSError, match="symbolic links"):
        open_alone(tmp_path / "c", "c")
    assert precious.read_text() == "mine"
    assert [(tmp_path / name).read_bytes() for name in ("a", "b")] == [b"ours", b"ours"]
