"""The picture of one run: training loss, test score, batch size and noise share against examples accessed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cabs.experiments.files import atomically
from cabs.experiments.problems import metric_of, title_of
from cabs.experiments.problems.problem import Metric
from cabs.experiments.runs.directory import PICTURE, read_config
from cabs.experiments.runs.metrics import read_metrics
from cabs.experiments.runs.ranges import interesting_range
from cabs.experiments.runs.style import examples_axis, loss_axis, score_axis, share_axis, size_axis
from cabs.pictures import COLOURS, DPI, house_style, plain


def draw_run(path: Path) -> Path:
    """Draw the run in a directory and save the picture there.

    Returns:
        The picture's path.
    """
    config = read_config(path)
    rows = list(read_metrics(path))
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "train_loss" in row]
    with house_style():
        shares = [row for row in steps if row.get("noise_share") is not None]
        panels = 4 if shares else 3
        figure = Figure(figsize=(7.2, 7.6 * panels / 3), layout="constrained")
        top, middle, size, *rest = figure.subplots(panels, 1, sharex=True)
        _loss(top, steps, evaluations)
        _score(middle, evaluations, metric_of(config.problem))
        _batch_size(size, steps)
        for axes in rest:
            axes.plot(_column(shares, "examples"), _column(shares, "noise_share"), color=COLOURS[0], linewidth=1.0)
            share_axis(axes)
        examples_axis(rest[0] if rest else size, max([config.examples, *_column(rows, "examples")]))
        title = f"{title_of(config.problem)} · {config.method} · α = {config.lr:g}"
        figure.suptitle(plain(title), x=0.02, ha="left", fontsize=13, fontweight="bold")
        with atomically(path / PICTURE) as file:
            figure.savefig(file, format="png", dpi=DPI)
    return path / PICTURE


def _column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows]


def _loss(axes: Axes, steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> None:
    axes.set_title("Loss")
    axes.plot(
        _column(steps, "examples"),
        _column(steps, "loss"),
        color=COLOURS[1],
        alpha=0.22,
        linewidth=0.7,
        label="mini-batches",
    )
    axes.plot(
        _column(evaluations, "examples"),
        _column(evaluations, "train_loss"),
        color=COLOURS[1],
        label="training set",
    )
    axes.plot(
        _column(evaluations, "examples"),
        _column(evaluations, "test_loss"),
        color=COLOURS[2],
        linestyle="--",
        label="test set",
    )
    loss_axis(axes)
    axes.legend(loc="lower left", ncols=3)


def _score(axes: Axes, evaluations: Sequence[dict[str, Any]], metric: Metric) -> None:
    examples, values = _column(evaluations, "examples"), _column(evaluations, metric.key)
    axes.plot(examples, values, color=COLOURS[3])
    score_axis(axes, metric)
    axes.set_title(metric.title)
    if examples:
        axes.set_title(f"{metric.title}, {metric.show(values[-1])} at the end")
        axes.set_ylim(*interesting_range([(examples, values)], metric))
        axes.plot(examples[-1], values[-1], "o", color=COLOURS[3], clip_on=False)


def _batch_size(axes: Axes, steps: Sequence[dict[str, Any]]) -> None:
    size_axis(axes)
    examples, sizes = _column(steps, "examples"), _column(steps, "batch_size")
    axes.plot(examples, sizes, color=COLOURS[0], drawstyle="steps-pre")
    axes.set_ylim(bottom=0)
    if sizes:
        axes.fill_between(examples, sizes, color=COLOURS[0], alpha=0.12, linewidth=0, step="pre")
