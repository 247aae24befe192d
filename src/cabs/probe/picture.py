"""The picture of a probe: throughput over the batch size, and what a step gains per example and per second."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from cabs.pictures import COLOURS, DPI, house_style, plain
from cabs.probe.recommending import gain, per_second
from cabs.probe.report import Report
from cabs.probe.wording import size

_QUIET = "#888888"
_BESIDE: Any = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}


def draw(report: Report, path: str | Path | IO[bytes]) -> None:
    """Draw a report and save it."""
    form = Path(path).suffix.lstrip(".") if isinstance(path, str | Path) else ""
    with house_style():
        figure = Figure(figsize=(8.6, 6.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
        sizes = _sizes(report)
        _throughput(top, report, sizes)
        _gain(bottom, report, sizes)
        bottom.set_xscale("log", base=2)
        bottom.set_xlim(sizes[0], sizes[-1])
        bottom.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        bottom.xaxis.set_minor_locator(NullLocator())
        bottom.set_xlabel("batch size m")
        figure.suptitle(plain(report.headline), x=0.02, ha="left", fontsize=13, fontweight="bold")
        figure.supxlabel(plain(report.title), x=0.02, ha="left", color="#555555", fontsize=9)
        figure.savefig(path, format=form if form in ("pdf", "svg") else "png", dpi=DPI)


def _sizes(report: Report) -> np.ndarray:
    """From one example to beyond all that is marked."""
    shown = [report.batch_size, report.fits.size, *(m for m, _ in report.times.measured), *_marks(report).values()]
    return np.geomspace(1, 1.5 * max(shown), 400)


def _marks(report: Report) -> dict[str, float]:
    """The sizes to mark, by what they are."""
    marks = {"present": float(report.batch_size)}
    if report.cabs_batch_size is not None:
        marks["CABS, per example"] = report.cabs_batch_size.value
    if report.recommendation.size is not None:
        marks["recommended"] = float(report.recommendation.size)
    return {name: m for name, m in marks.items() if m >= 1}


def _throughput(axes: Axes, report: Report, sizes: np.ndarray) -> None:
    axes.set_title("Throughput, examples per second")
    measured = np.array(report.times.measured)
    axes.plot(measured[:, 0], measured[:, 0] / measured[:, 1], "o", color=COLOURS[1], label="timed", clip_on=False)
    most = report.times.most
    if report.cost is not None and report.times.saturation is not None and most is not None:
        c0, c1 = report.cost
        about = sizes[sizes <= report.times.fitted] if report.times.fitted < report.times.measured[-1][0] else sizes
        axes.plot(about, about / (c0 + c1 * about), color=COLOURS[1], label="m / (c₀ + c₁m)")
        axes.axhline(most, color=_QUIET, linewidth=0.8, linestyle=":", label="the most")
        if sizes[0] <= report.times.saturation <= sizes[-1]:
            axes.plot(report.times.saturation, 0.9 * most, "D", color=COLOURS[2], label="90% of it")
    axes.axvline(report.fits.size, color=_QUIET, linewidth=0.8, linestyle="--", label="the largest tried")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_ylim(bottom=0)
    axes.legend(**_BESIDE)


def _gain(axes: Axes, report: Report, sizes: np.ndarray) -> None:
    axes.set_title("Expected gain, in parts of the most")
    cabs, line = report.cabs_batch_size, report.times.reckoned
    axes.set_ylim(0, 1.12)
    if cabs is None:
        text = "what CABS would choose is not known"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=_QUIET)
        return
    per_example = np.array([gain(m, cabs.value) / m for m in sizes])
    axes.plot(sizes, _relative(per_example), color=COLOURS[0], label="per example")
    if line is not None:
        axes.plot(sizes, _relative(np.array([per_second(m, cabs.value, line) for m in sizes])), color=COLOURS[3],
                  label="per second")  # fmt: skip
    axes.axvspan(max(cabs.low, sizes[0]), max(cabs.high, sizes[0]), color=COLOURS[0], alpha=0.12, linewidth=0,
                 label="CABS, 95%")  # fmt: skip
    near = report.recommendation.near
    if near is not None:
        axes.plot(near, (0.03, 0.03), color=COLOURS[3], linewidth=4, alpha=0.5, label="as good as recommended")
    for name, m in _marks(report).items():
        style, colour = ("-", COLOURS[3]) if name == "recommended" else ("--", COLOURS[0])
        if name == "present":
            style, colour = ":", "#333333"
        axes.axvline(m, color=colour, linewidth=1.1, linestyle=style, label=f"{name}, {size(m)}")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.legend(**_BESIDE)


def _relative(values: np.ndarray) -> np.ndarray:
    """In parts of the most; nothing where a step loses more than it gains."""
    most = values.max()
    return np.where(values > 0, values / most, np.nan) if most > 0 else np.full_like(values, np.nan)
