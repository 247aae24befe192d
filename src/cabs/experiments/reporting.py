"""`cabs report`: from directories of runs to pictures, tables and a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cabs.experiments.comparison import Section, compare
from cabs.experiments.errors import UsageError
from cabs.experiments.figures import draw_results, draw_sensitivity
from cabs.experiments.files import atomically
from cabs.experiments.page import render
from cabs.experiments.runs import find_runs
from cabs.experiments.session import file_name
from cabs.experiments.style import DPI, short_count
from cabs.experiments.tables import comma_separated, markdown

PAGE = "report.html"


def write_report(
    directories: Sequence[Path],
    out: Path,
    *,
    title: str | None = None,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    examples_only: bool = False,
) -> tuple[list[Path], list[Section]]:
    """Write a report of all runs in and below some directories.

    Args:
        directories: Where the runs are.
        out: Where the report goes; files of an earlier report there are replaced.
        title: The page's title.
        target_loss: The training loss that tables ask for; by default what the best constant size ends with.
        target_accuracy: The test accuracy that tables ask for; likewise.
        examples_only: Tell examples alone and no seconds, for runs on a machine that was busy with other work.

    Returns:
        The files written, and what is in them.

    Raises:
        CommandError: If there are no finished runs, or some cannot be read.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out takes a directory")
    sections = compare(find_runs(directories), target_loss, target_accuracy, times=not examples_only)
    if not sections:
        raise UsageError(f"no finished run in {', '.join(map(str, directories))}; resume those that are not")
    out.mkdir(parents=True, exist_ok=True)
    written = [_write(out / PAGE, render(sections, title or _title(sections)))]
    for section in sections:
        stem = f"{file_name(section.problem)}-{short_count(section.budget)}"
        figures = {f"{stem}-results": draw_results(section, section.main)}
        others = [method for method in section.methods if method not in section.main]
        if others:
            with_cabs = [method for method in section.methods if method.rule == "cabs" or method in others]
            figures[f"{stem}-more"] = draw_results(section, with_cabs)
        if sensitivity := draw_sensitivity(section):
            figures[f"{stem}-sensitivity"] = sensitivity
        for name, figure in figures.items():
            written += _save(figure, out / name)
    written.append(_write(out / "table.md", markdown(sections)))
    written.append(_write(out / "table.csv", comma_separated(sections)))
    return written, sections


def _title(sections: Sequence[Section]) -> str:
    return "CABS: " + "; ".join(section.title for section in sections)


def _write(path: Path, text: str) -> Path:
    with atomically(path) as file:
        file.write(text.encode())
    return path


def _save(figure: Figure, path: Path) -> list[Path]:
    paths = []
    # Without dates in them, the same runs give the same files.
    for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
        target = path.with_name(path.name + suffix)
        with atomically(target) as file:
            figure.savefig(file, format=suffix[1:], metadata=metadata, dpi=DPI)
        paths.append(target)
    return paths


def default_out(directories: Sequence[Path]) -> Path:
    """Where a report goes that was given no directory: into the one it is about, or into the present one."""
    return directories[0] / "report" if len(directories) == 1 else Path(os.curdir) / "report"
