"""One look for all pictures: colours that the colour-blind can tell apart, quiet axes, numbers people can read.

Needs matplotlib, so nothing imports this before a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np

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


def plain_number(value: float, _: object = None) -> str:
    """A number without powers of ten: 0.003, not 3e-3."""
    if value and not 1e-7 <= abs(value) < 1e7:  # a run on its way to infinity would fill the page with zeros
        return f"{value:.3g}"
    return np.format_float_positional(float(f"{value:.6g}"), trim="-")
