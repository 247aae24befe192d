"""The paper's figures from runs: results of all methods, and their sensitivity to the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cabs.experiments.reports.comparison import Curve, Section, curve, diverged, far_apart, tracks_of
from cabs.experiments.reports.palette import colours, label, sensitivity_families, setting_label, shades
from cabs.experiments.reports.rates import below_and_above, rates
from cabs.experiments.reports.selection import Method, Setting
from cabs.experiments.reports.tables import seeds_of
from cabs.experiments.runs.ranges import Track, interesting_range
from cabs.experiments.runs.style import examples_axis, loss_axis, score_axis, share_axis, size_axis
from cabs.pictures import house_style, plain

_PANELS_IN_A_ROW = 3


def draw_results(section: Section, methods: Sequence[Method]) -> Figure:
    """Training loss, score, batch size and noise share against examples, each method with its best learning rate."""
    palette, metric = colours(section.methods), section.metric
    methods = [method for method in methods if method.best.finished]
    with house_style():
        shares = {method.name: curve(method.best, "noise_share") for method in methods}
        panels = 4 if any(data.examples for data in shares.values()) else 3
        figure = Figure(figsize=(7.2, 2.8 * panels), layout="constrained")
        loss, score, size, *rest = figure.subplots(panels, 1, sharex=True)
        tracks: list[Track] = []
        largest = 0.0
        adaptive = any(method.kind.role != "baseline" for method in methods)
        apart = far_apart(methods)
        for method in methods:
            colour = palette[method.name]
            front = 3 if method.kind.role == "ours" else 2
            style = "--" if method.decays else "-"
            _plot(loss, curve(method.best, "train_loss"), colour, front, plain(label(method)), style=style)
            _plot(score, curve(method.best, metric.key), colour, front, style=style)
            tracks += tracks_of(method.best, metric.key)
            if rest:
                _plot(rest[0], shares[method.name], colour, front, width=1.3, style=style)
            if method.kind.role == "baseline" and adaptive:
                size.axhline(method.best.runs[0].config.bounds[0], color=colour, linewidth=1.2, linestyle=":")
            else:
                sizes = curve(method.best, "batch_size")
                _plot(size, sizes, colour, front, width=1.3, style=style)
                largest = max(largest, *sizes.mean)
        loss.set(title="Training loss")
        loss_axis(loss)
        score.set(title=metric.title)
        score.set_ylim(*interesting_range(tracks, metric))
        score_axis(score, metric)
        size_axis(size)
        if apart:
            loss_axis(size)
        else:  # sizes that were chosen are the interesting ones; constant ones may lie beyond
            size.set_ylim(0, largest * 1.15)
        if rest:
            share_axis(rest[0])
        examples_axis(rest[0] if rest else size, section.budget)
        handles = [*loss.get_legend_handles_labels()[0], *_how_to_read(methods)]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        _title(figure, section)
    return figure


def draw_sensitivity(section: Section) -> Figure | None:
    """Families of training loss curves, one curve for each learning rate, a panel for each kind of method."""
    families = sensitivity_families(section)
    if not families:
        return None
    palette = colours(section.methods)
    with house_style():
        rows = math.ceil(len(families) / _PANELS_IN_A_ROW)
        columns = math.ceil(len(families) / rows)
        figure = Figure(figsize=(1.0 + 3.2 * columns, 0.6 + 3.4 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        panels = list(grid.flat)[: len(families)]
        for empty in list(grid.flat)[len(families) :]:
            empty.remove()
        for axes, method in zip(panels, families, strict=True):
            axes.set_title(plain(method.name))
            for setting, colour in shades(method, palette[method.name]):
                if setting.finished:
                    _plot(axes, curve(setting, "train_loss"), colour, 2, setting_label(setting))
            examples_axis(axes, section.budget)
            axes.tick_params(labelbottom=True)  # also where the panel below is missing
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        # Losses on their way to infinity must not squeeze the others: the axis is settled before they are drawn.
        loss_axis(panels[0])
        panels[0].set_ylim(panels[0].get_ylim())
        for axes, method in zip(panels, families, strict=True):
            for setting, colour in shades(method, palette[method.name]):
                _plot_diverged(axes, setting, colour)
            loss_axis(axes)
            axes.legend(fontsize=8, loc="lower left", handlelength=1.2)
        for axes in grid[:, 0]:
            axes.set_ylabel("training loss")
        _title(figure, section, "sensitivity to the learning rate")
    return figure


def draw_rates(section: Section) -> Figure | None:
    """The training loss at the end over the learning rate, a curve for each method; bars are the range of the seeds.

    Standard deviations are no bars for a logarithmic axis, where a mean less its deviation may have no place.
    """
    methods = [method for method in section.methods if sum(setting.finished for setting in method.settings) > 1]
    if not methods:
        return None
    palette = colours(section.methods)
    with house_style():
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for method in methods:
            settings = [setting for setting in method.settings if setting.finished]
            axes.errorbar(
                [setting.lr for setting in settings],
                [setting.loss for setting in settings],
                list(zip(*(below_and_above(setting) for setting in settings), strict=True)),
                color=palette[method.name],
                label=plain(method.name),
                linewidth=2.2 if method.kind.role == "ours" else 1.4,
                linestyle="--" if method.decays else "-",
                marker="o",
                markersize=4,
                elinewidth=0.9,
                capsize=2,
                alpha=1.0 if method in section.main else 0.35,
                zorder=3 if method.kind.role == "ours" else 2,
            )
        axes.set_xscale("log")
        axes.set_xticks(rates(section), [f"{lr:g}" for lr in rates(section)])
        axes.minorticks_off()
        axes.set(xlabel="learning rate α", ylabel="training loss at the end")
        loss_axis(axes)
        figure.legend(loc="outside lower center", ncols=3)
        _title(figure, section, "the end over the learning rate")
    return figure


def _how_to_read(methods: Sequence[Method]) -> list[Artist]:
    """Entries of a legend for what belongs to no one method."""
    entries: list[Artist] = []
    if seeds := seeds_of(methods):
        entries.append(Patch(color="#888888", alpha=0.25, linewidth=0, label=f"range of {seeds}"))
    if len({method.kind.role == "baseline" for method in methods}) == 2:
        entries.append(Line2D([], [], color="#888888", linewidth=1.2, linestyle=":", label="constant batch size"))
    return entries


def _plot(
    axes: Axes, data: Curve, colour: str, order: int, name: str | None = None, *, width: float = 1.8, style: str = "-"
) -> None:
    axes.plot(data.examples, data.mean, color=colour, label=name, zorder=order, linewidth=width, linestyle=style)
    if data.low is not None and data.high is not None:
        axes.fill_between(data.examples, data.low, data.high, color=colour, alpha=0.15, linewidth=0, zorder=1)


def _plot_diverged(axes: Axes, setting: Setting, colour: str) -> None:
    """A setting that diverged: a dotted curve as far as it was measured, and a cross where it ended."""
    if (fate := diverged(setting)) is None:
        return
    data, end = fate
    low, high = axes.get_ylim()
    axes.plot(data.examples, data.mean, color=colour, linestyle=":", linewidth=1.8, zorder=2)
    top = high / (high / low) ** 0.03  # all of the cross is in the panel
    last = min(max(data.mean[-1], low), top) if data.mean else top
    axes.plot(
        [end], [last], "x", color=colour, markersize=8, markeredgewidth=2, clip_on=False, zorder=4,
        label=setting_label(setting),
    )  # fmt: skip


def _title(figure: Figure, section: Section, more: str = "") -> None:
    text = f"{section.title}: {more}" if more else section.title
    figure.suptitle(plain(text), x=0.02, ha="left", fontsize=13, fontweight="bold")
