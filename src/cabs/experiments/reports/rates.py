"""How much the learning rate matters to a method: its loss at the end, over all that were tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cabs.experiments.reports.comparison import Section
from cabs.experiments.reports.selection import Method, Setting

WITHIN = 1.1
"""Losses up to a tenth above a method's best count as as good."""


@dataclass(frozen=True)
class Tolerance:
    """The learning rates around a method's best with which it does about as well.

    Attributes:
        decades: log₁₀ of the largest over the smallest.
        open: Whether the range reaches an end of the grid, so that it may be wider.
    """

    decades: float
    open: bool

    def __str__(self) -> str:
        return f"{'≥ ' if self.open else ''}{self.decades:.1f}"


def tolerance(method: Method) -> Tolerance | None:
    """The range of α around the lowest loss that stays within a tenth of it; log loss is linear in log α between runs.

    None if a single learning rate was tried, or all of them diverged.
    """
    points = [(math.log10(setting.lr), _log(setting.loss)) for setting in method.settings]
    best = min(range(len(points)), key=lambda i: points[i][1])
    if len(points) < 2 or math.isinf(points[best][1]):
        return None
    limit = points[best][1] + math.log10(WITHIN)
    high, above = _reaches(points[best:], limit)
    low, below = _reaches(points[best::-1], limit)
    return Tolerance(high - low, above or below)


def _log(loss: float) -> float:
    return math.log10(loss) if loss > 0 else -math.inf


def _reaches(points: Sequence[tuple[float, float]], limit: float) -> tuple[float, bool]:
    """How far from the first point on the loss stays below a limit, and whether it does to the end."""
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        if next_y > limit:
            # Towards a loss that is infinite there is nothing in between.
            return (x if math.isinf(next_y) else x + (next_x - x) * (limit - y) / (next_y - y)), False
    return points[-1][0], True


def lowest(method: Method) -> Setting:
    """The learning rate with the lowest training loss at the end."""
    return min(method.settings, key=lambda setting: setting.loss)


def at_the_edge(section: Section) -> list[Method]:
    """Methods whose lowest loss is at an end of their grid of learning rates: it may be lower beyond."""
    return [
        method
        for method in section.methods
        if len(method.settings) > 1 and lowest(method) in (method.settings[0], method.settings[-1])
    ]


def rates(section: Section) -> list[float]:
    """All learning rates of a section."""
    return sorted({setting.lr for method in section.methods for setting in method.settings})


def rate_headings(section: Section) -> list[str]:
    """The columns of the table of learning rates."""
    return ["training loss at the end", *(f"α = {lr:g}" for lr in rates(section)), "decades of α within 10%"]


def rate_cells(section: Section) -> list[list[str]]:
    """The loss of every method with every learning rate, mean ± deviation over seeds."""
    lines = []
    for method in section.methods:
        by_rate = {setting.lr: setting for setting in method.settings}
        cells = [_cell(by_rate[lr]) if lr in by_rate else "–" for lr in rates(section)]
        lines.append([method.name, *cells, str(tolerance(method) or "–")])
    return lines


def _cell(setting: Setting) -> str:
    failed = sum(not run.finished for run in setting.runs)
    if failed:
        return f"{failed} of {len(setting.runs)} diverged" if len(setting.runs) > 1 else "diverged"
    return with_deviation(setting.loss, setting.loss_deviation)


def with_deviation(mean: float, deviation: float | None) -> str:
    """A mean ± what it is known to, in digits that mean something."""
    if deviation is None or not 0 < deviation < math.inf or mean <= 0:
        return f"{mean:.3g}"
    # Two digits of the deviation, unless the mean had more than four then.
    digits = max(0, min(1 - math.floor(math.log10(deviation)), 3 - math.floor(math.log10(mean))))
    if digits > 5:  # 1e-7 is easier to read than 0.0000001
        return f"{mean:.2g} ± {deviation:.1g}"
    shown = f"{deviation:.{digits}f}"
    return f"{mean:.{digits}f} ± " + (shown if float(shown) else f"<{10.0**-digits:.{digits}f}")


def below_and_above(setting: Setting) -> tuple[float, float]:
    """How far the seeds are from their mean, as bars want it."""
    low, high = setting.loss_range
    return setting.loss - low, high - setting.loss


def rate_explanation(section: Section) -> str:
    """What the table of learning rates says."""
    counts = sorted({len(setting.runs) for method in section.methods for setting in method.settings})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] > 1)}"
    spread = ", mean ± standard deviation; bars in the figure are the range of the seeds" if counts[-1] > 1 else ""
    text = (
        f"{seeds.capitalize()}{spread}. The last column is how far the learning rate can move around its best before "
        f"the loss is a tenth higher; ≥ where the grid ends first."
    )
    edge = at_the_edge(section)
    if edge:
        text += f" The lowest loss is at the edge of the grid for {', '.join(method.name for method in edge)}."
    return text
