"""The paper's figures from runs: results of all methods, and their sensitivity to the learning rate."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cabs.experiments.comparison import Curve, Section, curve, diverged
from cabs.experiments.picture import interesting_from
from cabs.experiments.select import Method, Setting
from cabs.experiments.style import examples_axis, house_style, loss_axis, percent, plain

_RED, _PINK, _GOLD, _BROWN = "#d1495b", "#e88598", "#e0992b", "#96703c"
# Constant sizes from small to large.
_RAMP = ("#45b39d", "#2e9cca", "#3b7dd8", "#5a63c8", "#7b57b8", "#8f4f9f")


def colours(methods: Sequence[Method]) -> dict[str, str]:
    """A colour for each method: CABS red, the Competitor gold, constant sizes from green to violet."""
    constants = [method.name for method in methods if method.rule == "constant"]
    result = {}
    cabs = 0
    for method in methods:
        if method.rule == "cabs":
            result[method.name] = (_RED, _PINK, "#b5838d")[min(cabs, 2)]
            cabs += 1
        elif method.rule == "constant":
            position = constants.index(method.name) / max(1, len(constants) - 1)
            result[method.name] = _RAMP[round(position * (len(_RAMP) - 1))]
        else:
            result[method.name] = _GOLD if method.rule == "norm-test" else _BROWN
    return result


def label(method: Method) -> str:
    """A method with its best learning rate, for a legend."""
    return f"{method.name}, α = {method.best.lr:g}"


def draw_results(section: Section, methods: Sequence[Method]) -> Figure:
    """Training loss, test accuracy and batch size against examples, each method with its best learning rate."""
    palette = colours(section.methods)
    methods = [method for method in methods if method.best.finished]
    with house_style():
        figure = Figure(figsize=(7.2, 8.4), layout="constrained")
        loss, accuracy, size = figure.subplots(3, 1, sharex=True)
        lowest, highest, largest = [], 0.0, 0.0
        adaptive = any(method.rule != "constant" for method in methods)
        for method in methods:
            colour = palette[method.name]
            front = 3 if method.rule == "cabs" else 2
            _plot(loss, curve(method.best, "train_loss"), colour, front, plain(label(method)))
            accuracies = curve(method.best, "test_accuracy")
            _plot(accuracy, accuracies, colour, front)
            lowest.append(interesting_from(accuracies.examples, accuracies.mean))
            highest = max(highest, *accuracies.mean)
            if method.rule == "constant" and adaptive:
                size.axhline(method.best.runs[0].config.batch_size or 0, color=colour, linewidth=1.2, linestyle=":")
            else:
                sizes = curve(method.best, "batch_size")
                _plot(size, sizes, colour, front, width=1.3)
                largest = max(largest, *sizes.mean)
        loss.set(title="Training loss")
        loss_axis(loss)
        accuracy.set(title="Test accuracy")
        # The slowest method must not squeeze the others where they differ.
        bottom = sorted(lowest)[len(lowest) // 2]
        accuracy.set_ylim(bottom, highest + 0.05 * (highest - bottom) + 0.001)
        accuracy.yaxis.set_major_formatter(FuncFormatter(percent))
        size.set(title="Batch size")
        # Sizes that were chosen are the interesting ones; constant ones may lie beyond.
        size.set_ylim(0, largest * 1.15)
        examples_axis(size, section.budget)
        figure.legend(loc="outside lower center", ncols=2)
        _title(figure, section)
    return figure


def draw_sensitivity(section: Section) -> Figure | None:
    """Families of training loss curves, one curve for each learning rate, a panel for each kind of method."""
    families = sensitivity_families(section)
    if not families:
        return None
    palette = colours(section.methods)
    with house_style():
        figure = Figure(figsize=(2.2 + 3.2 * len(families), 4.0), layout="constrained")
        panels = figure.subplots(1, len(families), sharex=True, sharey=True, squeeze=False)[0]
        for axes, method in zip(panels, families, strict=True):
            axes.set_title(plain(method.name))
            for setting, colour in shades(method, palette[method.name]):
                if setting.finished:
                    _plot(axes, curve(setting, "train_loss"), colour, 2, setting_label(setting))
            examples_axis(axes, section.budget)
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        # Losses on their way to infinity must not squeeze the others: the axis is settled before they are drawn.
        loss_axis(panels[0])
        panels[0].set_ylim(panels[0].get_ylim())
        for axes, method in zip(panels, families, strict=True):
            for setting, colour in shades(method, palette[method.name]):
                _plot_diverged(axes, setting, colour)
            loss_axis(axes)
            axes.legend(fontsize=8, loc="lower left", handlelength=1.2)
        panels[0].set_ylabel("training loss")
        _title(figure, section, "sensitivity to the learning rate")
    return figure


def sensitivity_families(section: Section) -> list[Method]:
    """The methods to show learning rates of: CABS, the Competitor, and the best constant size."""
    return [
        method
        for method in section.methods
        if len(method.settings) > 1
        and method.best.finished
        and (method.rule != "constant" or method.name == section.reference)
    ]


def shades(method: Method, colour: str, lightest: float = 0.75, darkest: float = 0.35) -> list[tuple[Setting, str]]:
    """The settings of a method, from the smallest to the largest learning rate in shades of its colour."""
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    hue, _, saturation = colorsys.rgb_to_hls(red, green, blue)
    result = []
    for position, setting in enumerate(method.settings):
        lightness = lightest + (darkest - lightest) * position / max(1, len(method.settings) - 1)
        shade = colorsys.hls_to_rgb(hue, lightness, saturation)
        result.append((setting, "#" + "".join(f"{round(part * 255):02x}" for part in shade)))
    return result


def _plot(axes: Axes, data: Curve, colour: str, order: int, name: str | None = None, width: float = 1.8) -> None:
    axes.plot(data.examples, data.mean, color=colour, label=name, zorder=order, linewidth=width)
    if data.low is not None and data.high is not None:
        axes.fill_between(data.examples, data.low, data.high, color=colour, alpha=0.15, linewidth=0, zorder=1)


def setting_label(setting: Setting) -> str:
    """A learning rate for a legend, with what became of it."""
    failed = sum(not run.finished for run in setting.runs)
    share = f" ({failed} of {len(setting.runs)})" if failed < len(setting.runs) else ""
    return f"α = {setting.lr:g}" + (f", diverged{share}" if failed else "")


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
