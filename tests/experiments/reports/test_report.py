"""Tables, the page as a file, and all that is written."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import made_up
import pytest
from reported import Parser, config, page_data

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.reports.comparison import compare
from cabs.experiments.reports.report import default_out, write_report
from cabs.experiments.reports.tables import cells, comma_separated, headings, markdown
from cabs.experiments.runs.reader import find_runs


def test_without_times(sweep: Path, tmp_path: Path) -> None:
    [section] = write_report([sweep], tmp_path, examples_only=True).sections
    assert headings(section)[5].startswith("examples to loss")
    text = dict(zip((row[0] for row in cells(section)), cells(section), strict=True))
    assert text["Constant 128"][5:] == ["400k", "1.00×", "400k", "1.00×"]
    assert "seconds" not in (tmp_path / "table.csv").read_text()
    parser = Parser()
    parser.feed((tmp_path / "report.html").read_text())
    for content in (parser.text, (tmp_path / "table.md").read_text()):
        assert "examples to accuracy" in content
        assert not re.search(r"\btimes?\b|seconds|\d s\b|\d min", content)
    with_times = compare(find_runs([sweep]).runs)
    assert " in " in cells(with_times[0])[0][5]
    assert "seconds_to_loss" in comma_separated(with_times)


def test_csv_has_the_numbers(sweep: Path) -> None:
    sections = compare(find_runs([sweep]).runs)
    rows = list(csv.DictReader(io.StringIO(comma_separated(sections))))
    assert len(rows) == 8
    assert float(rows[0]["test_accuracy"]) == sections[0].rows[0].score
    assert rows[-1]["examples_to_accuracy"] == ""


def test_all_files_are_written_and_written_the_same(sweep: Path, tmp_path: Path) -> None:
    written = write_report([sweep], tmp_path / "one").files
    names = sorted(path.name for path in written)
    assert names == sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"report.html", "table.md", "table.csv", "cifar10-400k-results.png", "cifar10-400k-more.pdf"} <= set(names)
    write_report([sweep], tmp_path / "two")
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp; $x^2$ @js@ </script>"


def test_names_from_runs_are_text_and_nothing_else(tmp_path: Path) -> None:
    hostile = replace(config(), problem=f"imagefolder:/data/{HOSTILE.replace('/', '')}")
    for name in ("a", "b"):
        made_up.write_run(tmp_path / (name + HOSTILE.replace("/", "_")), hostile)
    write_report([tmp_path], tmp_path / "out", title=HOSTILE)
    page = (tmp_path / "out" / "report.html").read_text()
    parser = Parser()
    parser.feed(page)
    assert "img" not in parser.tags
    assert parser.tags.count("script") == 3
    assert parser.links == ["data:,"]
    assert HOSTILE in parser.text
    [section] = page_data(page)
    assert all("<" not in method["label"] for method in section["methods"])
    assert "script" in section["methods"][0]["label"]


def test_markdown_cells_do_not_break_the_table(tmp_path: Path) -> None:
    for name in ("a|b", "c"):
        made_up.write_run(tmp_path / name, config())
    text = markdown(compare(find_runs([tmp_path]).runs))
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 2
    for rows in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


@pytest.mark.parametrize(
    ("prepare", "error", "expected"),
    [
        (lambda d: None, UsageError, "no run in it or below it"),
        (lambda d: made_up.write_run(d / "a", config(), status="unfinished"), UsageError, "no finished run"),
        (
            lambda d: (made_up.write_run(d / "a", config()) / "config.json").write_text("{}"),
            CommandError,
            "not the configuration of a run",
        ),
        (
            lambda d: (made_up.write_run(d / "a", config()) / "summary.json").write_text("[]"),
            CommandError,
            "not the summary of a run",
        ),
        (
            lambda d: (made_up.write_run(d / "a", config()) / "metrics.jsonl").write_text(""),
            CommandError,
            "rows were lost",
        ),
    ],
)
def test_directories_that_cannot_be_reported(tmp_path, prepare, error, expected) -> None:
    prepare(tmp_path)
    with pytest.raises(error, match=expected):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_directory_and_a_file_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        write_report([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        write_report([tmp_path], tmp_path / "file")


def test_where_a_report_goes(tmp_path: Path) -> None:
    assert default_out([tmp_path]) == tmp_path / "report"
    assert default_out([tmp_path, tmp_path / "b"]) == Path("report")
