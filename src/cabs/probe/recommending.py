"""One batch size, and why."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cabs.probe.timing import SLOWER
from cabs.probe.wording import between, number, percent, seconds, size
from cabs.rules import round_and_clip

if TYPE_CHECKING:
    from cabs.probe.report import Report

NEAR = 0.9
"""Sizes that gain this much of the most that can be gained per second are as good."""


@dataclass(frozen=True)
class Recommendation:
    """A size to train with.

    Attributes:
        size: the size; None where none can be told.
        near: from where to where sizes gain at least 90% as much per second.
        reasons: why, in sentences.
    """

    size: int | None
    near: tuple[int, int] | None
    reasons: tuple[str, ...]


def gain(m: float, best: float) -> float:
    """The expected gain of a step of m examples, 1 without noise; the most per example is at ``best``."""
    return 1 - best / (2 * m)


def per_second(m: float, best: float, line: tuple[float, float]) -> float:
    """The gain per second."""
    return gain(m, best) / (line[0] + line[1] * m)


def recommend(report: Report) -> Recommendation:
    """What the numbers come to."""
    cabs = report.cabs_batch_size
    if cabs is None:
        return Recommendation(None, None, (*_why_none(report), *_throughput(report)))
    most = min(report.max_batch_size, report.dataset_size)
    wanted = cabs.value if report.cabs_batch_size_per_second is None else report.cabs_batch_size_per_second
    least, reach = report.min_batch_size, float(most)
    if report.cost is None and report.times.reckoned is not None:
        wanted = reach = max(wanted, report.times.measured[-1][0])  # what was timed is all that is known to be free
    best, limits = round_and_clip(wanted, least, most), []
    if report.fits.bound == "memory" and best > report.fits.size:
        # Microbatches pay c₀ each, so beyond what fits only the gain per example counts.
        best = max(report.fits.size, round_and_clip(cabs.value, least, most))
        how = f": make {best:,} of microbatches (max_microbatch_size={report.fits.size})"
        limits.append(f"{report.fits.size:,} is the most that fits at a time{how if best > report.fits.size else ''}.")
    if wanted > most and best == most:
        what = "the dataset" if most == report.dataset_size else "max_batch_size"
        limits.append(f"{most:,} is the most that {what} allows.")
    if wanted < least and best == least:
        limits.append(f"{least:,} is the least that is recommended (min_batch_size), as CABS has it.")
    reasons = (*_noise(report), *_cost(report), *limits, *_throughput(report), *_scale(report, best))
    near = _near(report, best, cabs.value, min(most, round(reach)))
    return Recommendation(best, near, (*reasons, *_present(report, best, near)))


def _why_none(report: Report) -> list[str]:
    if report.noise.coupled is None:
        return ["The optimizer has no P for all of its parameters even after some steps, so α tr(PΣ) is not known."]
    return [
        f"The loss is {number(report.noise.loss.value)}, and m = α tr Σ / F needs it to be clearly above "
        f"loss_floor = {number(report.loss_floor)}: pass a lower bound of your loss, loss_floor=…"
    ]


def _noise(report: Report) -> list[str]:
    share = report.noise_share
    assert share is not None
    assert report.cabs_batch_size is not None
    verdict = "about the quarter that CABS keeps"
    if share.value > 0.4:
        verdict = "more than the quarter that CABS keeps: per example, larger batches gain more"
    elif share.value < 0.15:
        verdict = "less than the quarter that CABS keeps: per example, smaller batches gain more"
    return [
        f"At m = {report.batch_size:,}, {percent(share.value)} of the loss is gradient noise, {verdict}.",
        f"The most gain per example is at m = {size(report.cabs_batch_size.value)} "
        f"({between(report.cabs_batch_size, size)}).",
    ]


def _cost(report: Report) -> list[str]:
    faster, measured = report.cabs_batch_size_per_second, report.times.measured
    if report.times.reckoned is None:
        return ["What a step costs could not be told, so examples are all that counts."]
    if report.cost is None or faster is None:
        timed = f"{measured[0][0]:,} to {measured[-1][0]:,}"
        return [f"Steps of {timed} examples take the same time: up to there, more examples are free."]
    c0, c1 = report.cost
    if c0 == 0:
        return ["A step costs nothing but its examples, so the most gain per second is at the same size."]
    return [
        f"A step costs {seconds(c0)} before its first example, as much as {number(c0 / c1)} examples: "
        f"the most gain per second is at m = {size(faster)}."
    ]


def _throughput(report: Report) -> list[str]:
    times, (timed, rate) = report.times, report.times.fastest
    largest, taken = times.measured[-1]
    if largest / taken < SLOWER * rate:
        part = percent(largest / taken / rate)
        return [f"Throughput was greatest at m = {timed:,}; at {largest:,} it was {part} of that."]
    if times.saturation is None:
        return []
    if times.saturation > largest:
        return [f"Throughput still grows at m = {largest:,}, the largest size timed."]
    return [f"From m = {size(max(1.0, times.saturation))} on, throughput is at 90% of the most there is, or above."]


def _scale(report: Report, best: int) -> list[str]:
    scale = report.noise.noise_scale
    if best > 2 * scale.high:
        return [f"It is above the noise scale, {size(scale.value)}: there, more examples hardly make a step better."]
    if best < scale.low / 2:
        return [
            f"It is below the noise scale, {size(scale.value)}: a step of so few examples goes mostly by noise, and "
            "twice the examples make nearly twice the progress, for twice the price."
        ]
    return [f"It is about the noise scale, {size(scale.value)} ({between(scale, size)})."]


def _near(report: Report, best: int, cabs: float, most: int) -> tuple[int, int] | None:
    """Where gain per second is 90% of that at the best size, which rises up to there and falls from there on."""
    line = report.times.reckoned or (0.0, 1.0)
    if gain(best, cabs) <= 0:
        return None

    def enough(m: int) -> bool:
        return per_second(m, cabs, line) >= NEAR * per_second(best, cabs, line)

    low = report.min_batch_size + bisect_left(range(report.min_batch_size, best), True, key=enough)
    return low, best + bisect_left(range(best + 1, most + 1), True, key=lambda m: not enough(m))


def _present(report: Report, best: int, near: tuple[int, int] | None) -> list[str]:
    present, cabs = report.batch_size, report.cabs_batch_size
    assert cabs is not None
    if near is None:
        return [f"Even m = {best:,} gains nothing with so much noise: lower the learning rate."]
    if near[0] <= present <= near[1]:
        return [f"Your m = {present:,} is as good: it gains at least 90% as much."]
    line = report.times.reckoned
    part = per_second(present, cabs.value, line or (0.0, 1.0)) / per_second(best, cabs.value, line or (0.0, 1.0))
    unit = "second" if line else "example"
    if part <= 0:
        return [f"At your m = {present:,} a step gains nothing on average: noise undoes it."]
    return [f"Your m = {present:,} gains {percent(part)} as much per {unit}."]
