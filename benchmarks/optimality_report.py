"""The picture and the table of ``optimality.py``."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from cabs.experiments.problems import title_of
from cabs.experiments.runs.optimizers import optimizer_kind
from cabs.pictures import COLOURS, DPI, house_style, plain_number

Curve = list[tuple[float, float, float]]
"""Sizes, a value for each, and its standard error."""
STYLES = ("-", "--", ":", "-.")


def per_example(point: dict[str, Any], steps: int) -> Curve:
    """The gain per example of a point, by batch size."""
    return [(m, mean / m / steps, error / m / steps) for m, mean, error in gain(point)]


def gain(point: dict[str, Any]) -> Curve:
    """The gain of a point, by batch size."""
    return sorted((float(m), mean, error) for m, (mean, error) in point["gains"].items())


def best(curve: Curve) -> tuple[float, float]:
    """Where a curve is highest, and its highest value.

    Between sizes it is found from the highest value and its neighbours: there the gain of a step is fitted by A - B/m,
    which any smooth loss has where the noise of a step is small, and whose greatest value per example is at 2B/A. At
    either end of the sizes it is that end.
    """
    at = max(range(len(curve)), key=lambda i: curve[i][1])
    if at in (0, len(curve) - 1):
        return curve[at][0], curve[at][1]
    near = [(1 / m, y * m, 1 / (e * m) ** 2) for m, y, e in curve[at - 1 : at + 2]]
    weight = sum(w for _, _, w in near)
    x_mean, gain_mean = (sum(w * point[i] for point in near for w in [point[2]]) / weight for i in (0, 1))
    noise = -sum(w * (x - x_mean) * (g - gain_mean) for x, g, w in near) / sum(
        w * (x - x_mean) ** 2 for x, _, w in near
    )
    without = gain_mean + noise * x_mean
    top = 2 * noise / without if noise > 0 and without > 0 else curve[at][0]
    return min(max(top, curve[at - 1][0]), curve[at + 1][0]), curve[at][1]


def interval(curve: Curve, tries: int = 2000) -> tuple[float, float]:
    """Between which sizes the maximum is, in nine of ten cases, by the standard errors."""
    chance = random.Random(0)
    tops = sorted(best([(m, chance.gauss(y, e), e) for m, y, e in curve])[0] for _ in range(tries))
    return tops[tries // 20], tops[-tries // 20]


def share(curve: Curve, at: float) -> tuple[float, float]:
    """How much of the greatest value there is at a size, and its standard error; not a number beyond the sizes."""
    top = best(curve)[1]
    sizes = [m for m, _, _ in curve]
    if not sizes[0] <= at <= sizes[-1]:
        return math.nan, math.nan
    high = next(i for i, m in enumerate(sizes) if m >= at)
    low = max(high - 1, 0)
    weight = math.log(at / sizes[low]) / math.log(sizes[high] / sizes[low]) if high > low else 1.0
    value = (1 - weight) * curve[low][1] + weight * curve[high][1]
    error = math.hypot((1 - weight) * curve[low][2], weight * curve[high][2])
    return (value / top, error / top) if top > 0 else (math.nan, math.nan)


def draw(report: dict[str, Any], path: Path) -> None:
    """A column for each point: the gain above, the gain per example below."""
    points, steps = report["points"], report["steps"]
    with house_style():
        figure = Figure(figsize=(max(3.1 * len(points), 6.5), 5.6), layout="constrained")
        grid = figure.subplots(2, len(points), squeeze=False, sharex=True)
        for point, (above, below) in zip(points, grid.T, strict=True):
            _panel(above, gain(point), point)
            _panel(below, per_example(point, steps), point)
            low, high = interval(per_example(point, steps))
            below.axvspan(
                low, high, color="#888888", alpha=0.18, linewidth=0, label="the maximum is here (90%)", zorder=0
            )
            above.set_title(
                f"α = {point['lr']:g}, {point['examples']:,} examples\nF = {point['loss']:.2g}", fontsize=10
            )
            below.set_xlabel("batch size m")
        grid[0][0].set_ylabel("gain of a step" if steps == 1 else f"gain of {steps} steps")
        grid[1][0].set_ylabel("gain per example")
        figure.legend(*grid[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        what = f"{title_of(report['problem'])}, {optimizer_kind(report['optimizer']).label}"
        figure.suptitle(f"{what}: what real steps gain", x=0.02, ha="left", weight="bold")
        figure.savefig(path, dpi=0.75 * DPI)


def _panel(axes: Axes, curve: Curve, point: dict[str, Any]) -> None:
    sizes, means, errors = (list(column) for column in zip(*curve, strict=True))
    axes.errorbar(
        sizes,
        means,
        errors,
        marker="o",
        markersize=3.5,
        linewidth=1.3,
        color="#222222",
        label="measured ± 1 standard error",
    )
    axes.axhline(0, color="#888888", linewidth=0.8)
    for colour, style, (name, size) in zip(COLOURS, STYLES, point["marks"].items(), strict=False):
        # A mark beyond the sizes that were tried would squeeze them: it is named in the legend, and in the table.
        shown = size if sizes[0] / 2 <= size <= sizes[-1] * 2 else math.nan
        axes.axvline(shown, color=colour, linestyle=style, linewidth=1.6, label=name)
    top = max(mean + error for mean, error in zip(means, errors, strict=True))
    if top > 0:  # sizes far below the best may lose a great deal, which would flatten the rest
        axes.set_ylim(max(-0.4 * top, min(means) - 0.1 * top), 1.12 * top)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1,), numticks=5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(plain_number))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def table(report: dict[str, Any]) -> str:
    """The best size, what the rules say, and how much of the best gain per example CABS's own size has."""
    lines = [
        "| α | examples | F | best m (90%) | CABS, in the run | CABS | norm test | noise scale | at CABS, of best |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for point in report["points"]:
        curve = per_example(point, report["steps"])
        low, high = interval(curve)
        part, error = share(curve, point["marks"]["CABS"])
        sizes = " | ".join(f"{size:,.0f}" if size >= 2 else f"{size:.1f}" for size in point["marks"].values())
        where = f"{best(curve)[0]:.0f} ({low:.0f}–{high:.0f})"
        shown = "–" if math.isnan(part) else f"{part:.0%} ± {error:.0%}"
        lines.append(f"| {point['lr']:g} | {point['examples']:,} | {point['loss']:.2g} | {where} | {sizes} | {shown} |")
    return "\n".join(lines)
