"""Reports of directories in which something is wrong: the rest is reported, and what is wrong is named."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import made_up
import pytest
from reported import Parser, config

from cabs import cli
from cabs.experiments.errors import CommandError, WriteError
from cabs.experiments.reports.report import write_report

DAMAGES: dict[str, Callable[[Path], object]] = {
    "no configuration": lambda run: (run / "config.json").write_text("{}"),
    "a configuration of bytes": lambda run: (run / "config.json").write_bytes(b"\xff\xfe"),
    "a summary that is none": lambda run: (run / "summary.json").write_text("[]"),
    "no rows": lambda run: (run / "metrics.jsonl").write_text(""),
    "rows cut off": lambda run: os.truncate(run / "metrics.jsonl", (run / "metrics.jsonl").stat().st_size // 2),
    "a row of bytes": lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"),
    "a row without a number": lambda run: (run / "metrics.jsonl").write_text('{"examples": NaN}\n'),
    "another end than the summary's": lambda run: (run / "summary.json").write_text(
        '{"status": "finished", "train_loss": 5.0}'
    ),
    "an end in words": lambda run: (run / "summary.json").write_text('{"status": "finished", "train_loss": "low"}'),
    "a pipe for a file": lambda run: ((run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")),
    "a directory for a file": lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_one_damaged_run_is_named_and_the_others_reported(
    tmp_path: Path,
    damage: Callable[[Path], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made_up.write_run(tmp_path / "good", config())
    bad = made_up.write_run(tmp_path / "<bad>", config(lr=0.2))
    damage(bad)
    before = {path: path.read_bytes() for path in bad.iterdir() if path.is_file()}
    monkeypatch.setattr(sys, "argv", ["cabs", "report", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    output = capsys.readouterr()
    assert "CIFAR-10, 10k examples: 1 method, 1 run" in output.out
    assert "note: 1 damaged run left out and left alone:" in output.err
    assert str(bad) in output.err
    assert "Traceback" not in output.err
    parser = Parser()
    parser.feed((tmp_path / "out" / "report.html").read_text())
    assert "1 damaged run left out" in parser.text
    assert str(bad) in parser.text
    assert {path: path.read_bytes() for path in bad.iterdir() if path.is_file()} == before


def test_a_report_of_nothing_but_damaged_runs(tmp_path: Path) -> None:
    for name in "ab":
        (made_up.write_run(tmp_path / name, config()) / "metrics.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(CommandError, match=r"(?s)that can be read:.*a/metrics\.jsonl.*b/metrics\.jsonl"):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["report.html", "table.csv", "cifar10-10k-results.png"])
def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made_up.write_run(tmp_path / "run", config())
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(target).name == name:
            raise OSError(errno.EROFS, "Read-only file system", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteError, match=f"{re.escape(name)} cannot be written: Read-only file system; make the file"):
        write_report([tmp_path / "run"], tmp_path / "out")


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up.write_run(tmp_path / "run", config())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(WriteError, match="out cannot be written: Permission denied; make it writable, then try again"):
        write_report([tmp_path / "run"], tmp_path / "out")


def test_a_link_in_the_place_of_a_part_is_not_followed(tmp_path: Path) -> None:
    made_up.write_run(tmp_path / "run", config())
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html.part").symlink_to(tmp_path / "precious")
    (tmp_path / "out" / "table.md").symlink_to(tmp_path / "precious")
    write_report([tmp_path / "run"], tmp_path / "out")
    assert (tmp_path / "precious").read_text() == "mine"


def test_numbers_at_the_edge_do_not_break_a_report(tmp_path: Path) -> None:
    """Losses of 0, of everything, and the same score throughout."""
    for lr, loss in ((0.1, 0.0), (0.2, 1e300), (0.3, -1.0)):
        path = made_up.write_run(tmp_path / str(lr), config(lr=lr))
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if "train_loss" in row:
                row |= {"train_loss": loss, "test_loss": loss, "test_accuracy": 0.0}
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(write_report([tmp_path], tmp_path / "out").sections) == 1
