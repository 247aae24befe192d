"""One look for all pictures: colours that the colour-blind can tell apart, quiet axes, numbers people can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

# CABS is the first; the others are for the methods it is compared with.
COLOURS = ("#d1495b", "#30638e", "#edae49", "#2e933c", "#7d53de", "#00798c", "#9a6324", "#6c757d")

_SETTINGS: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.usetex": False,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in our style, and leave the user's settings as they were."""
    with matplotlib.rc_context(_SETTINGS):
        yield


DPI = 160


def plain(text: str) -> str:
    """Text that matplotlib shows as it is, not as mathematics."""
    return text.replace("\\", "\\\\").replace("$", r"\$")


def short_count(value: float, _: object = None) -> str:
    """A number of examples in few characters: 400k, 1.5M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.10g}{unit}"
    return f"{value:.10g}"


def examples_axis(axes: Axes, budget: float) -> None:
    """Label the horizontal axis that all pictures share."""
    axes.set_xlabel("training examples accessed")
    axes.xaxis.set_major_formatter(FuncFormatter(short_count))
    axes.set_xlim(0, budget)


def percent(value: float, _: object = None) -> str:
    """A share as a percentage without needless digits."""
    return f"{value * 100:.6g} %"
