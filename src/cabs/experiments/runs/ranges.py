"""Which part of an axis is worth looking at."""

from __future__ import annotations

from collections.abc import Sequence

from cabs.experiments.problems.problem import Metric

Track = tuple[Sequence[float], Sequence[float]]
"""Counts of examples, and a quantity at each."""


def interesting_range(tracks: Sequence[Track], metric: Metric) -> tuple[float, float]:
    """The ends of an axis of scores. What the first tenth of the examples brings would squeeze the rest, and so

    would the slowest of several tracks.
    """
    poor = sorted((_interesting_from(*track, metric) for track in tracks), key=metric.goodness)
    start = poor[len(poor) // 2]
    best = max((value for _, values in tracks for value in values), key=metric.goodness)
    margin = 0.05 * abs(best - start) + (0.001 if metric.higher_is_better else 0.01 * abs(best))
    return (start, best + margin) if metric.higher_is_better else (max(0.0, best - margin), start)


def _interesting_from(examples: Sequence[float], values: Sequence[float], metric: Metric) -> float:
    later = [value for count, value in zip(examples, values, strict=True) if count >= examples[-1] / 10]
    worst, best = min(later, key=metric.goodness), max(later, key=metric.goodness)
    if metric.higher_is_better:
        return max(0.0, worst - 0.05 * (best - worst) - 0.002)
    return worst + 0.05 * (worst - best) + 0.01 * abs(worst)
