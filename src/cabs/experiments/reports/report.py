"""`cabs report`: from directories of runs to pictures, tables and a page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.files import atomically, writing
from cabs.experiments.reports.comparison import Section, compare
from cabs.experiments.reports.page import render
from cabs.experiments.reports.tables import comma_separated, markdown
from cabs.experiments.runs.reader import find_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        files: The files, the page first.
        sections: What is in them.
        damaged: Runs that could not be read and are left out: their directories, and what is wrong with each.
    """

    files: list[Path]
    sections: list[Section]
    damaged: dict[Path, str]


def write_report(
    directories: Sequence[Path],
    out: Path,
    *,
    title: str | None = None,
    target_loss: float | None = None,
    target_scores: Mapping[str, float] | None = None,
    examples_only: bool = False,
) -> Report:
    """Write a report of all runs in and below some directories.

    Args:
        directories: Where the runs are.
        out: Where the report goes; files of an earlier report there are replaced.
        title: The page's title.
        target_loss: The training loss that tables ask for; by default what the best constant size ends with.
        target_scores: The score on the test set that tables ask for, by the name of the metric; likewise.
        examples_only: Tell examples alone and no seconds, for runs on a machine that was busy with other work.

    Raises:
        CommandError: If there are no finished runs that can be read, or the report cannot be written.
    """
    with writing(out):
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file; --out takes a directory")
    found = find_runs(directories)
    sections = compare(found.runs, target_loss, target_scores, times=not examples_only)
    if not sections:
        where = ", ".join(map(str, directories))
        if found.damaged:
            reasons = "\n  ".join(found.damaged.values())
            raise CommandError(f"no finished run in {where} that can be read:\n  {reasons}")
        raise UsageError(f"no finished run in {where}; resume those that are not")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    page = render(sections, title or _title(sections), found.damaged)
    written = [_write(out / PAGE, page)]
    for section in sections:
        for name, figure in _figures(section).items():
            written += _save(figure, out / name)
    written.append(_write(out / "table.md", markdown(sections)))
    written.append(_write(out / "table.csv", comma_separated(sections)))
    return Report(written, sections, found.damaged)


def _figures(section: Section) -> dict[str, Figure]:
    from cabs.experiments.reports.figures import draw_rates, draw_results, draw_sensitivity  # matplotlib takes its time

    stem = section.stem
    figures = {f"{stem}-results": draw_results(section, section.main)}
    others = [method for method in section.methods if method not in section.main]
    if others:
        with_ours = [method for method in section.methods if method.kind.role == "ours" or method in others]
        figures[f"{stem}-more"] = draw_results(section, with_ours)
    if sensitivity := draw_sensitivity(section):
        figures[f"{stem}-sensitivity"] = sensitivity
    if over_rates := draw_rates(section):
        figures[f"{stem}-rates"] = over_rates
    return figures


def _title(sections: Sequence[Section]) -> str:
    return "CABS: " + "; ".join(section.title for section in sections)


def _write(path: Path, text: str) -> Path:
    with writing(path), atomically(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    return path


def _save(figure: Figure, path: Path) -> list[Path]:
    from cabs.pictures import DPI

    paths = []
    # Without dates in them, the same runs give the same files.
    for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
        target = path.with_name(path.name + suffix)
        with writing(target), atomically(target) as file:
            figure.savefig(file, format=suffix[1:], metadata=metadata, dpi=DPI)
        paths.append(target)
    return paths


def default_out(directories: Sequence[Path]) -> Path:
    """Where a report goes that was given no directory: into the one it is about, or into the present one."""
    return directories[0] / "report" if len(directories) == 1 else Path(os.curdir) / "report"
