"""The axes that pictures of runs have."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from cabs.experiments.problems.problem import Metric
from cabs.experiments.wording import short_count
from cabs.pictures import plain_number


def examples_axis(axes: Axes, budget: float) -> None:
    """Label the horizontal axis that all pictures share."""
    axes.set_xlabel("training examples accessed")
    axes.xaxis.set_major_formatter(FuncFormatter(short_count))
    axes.set_xlim(0, budget)


def loss_axis(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with numbers as people write them. Call it when the curves are drawn."""
    if axes.lines and axes.dataLim.y1 <= 0:  # a loss of 0 has no logarithm
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    if decades < 0.7:  # hardly a power of ten in it: numbers at equal distances tell more
        axes.yaxis.set_major_locator(MaxNLocator(5))
    else:
        steps = (1.0, 2.0, 5.0) if decades < 1.8 else (1.0, 3.0) if decades < 3.5 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(plain_number))
    axes.yaxis.set_minor_formatter(NullFormatter())


def size_axis(axes: Axes) -> None:
    """Label the vertical axis of batch sizes, which are whole numbers."""
    axes.set_title("Batch size")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def share_axis(axes: Axes) -> None:
    """Make the vertical axis one of noise shares, with a line at the quarter that CABS keeps. Call it at the end."""
    axes.set_title("Noise share of the loss")
    axes.axhline(0.25, color="#888888", linewidth=0.8, linestyle=":", zorder=1)
    across = axes.get_yaxis_transform()
    axes.text(1, 0.25, "¼, what CABS aims at", transform=across, ha="right", va="bottom", fontsize=8, color="#888888")
    loss_axis(axes)


def score_axis(axes: Axes, metric: Metric) -> None:
    """Label the vertical axis with a metric as people write it."""
    axes.yaxis.set_major_formatter(FuncFormatter(percent if metric.format.endswith("%") else plain_number))


def percent(value: float, _: object = None) -> str:
    """A share as a percentage without needless digits."""
    return f"{value * 100:.6g}%"
