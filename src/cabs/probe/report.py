"""What a probe found: numbers, a table, a picture."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from cabs import rules
from cabs.probe.intervals import Interval
from cabs.probe.noise import Noise
from cabs.probe.recommending import Recommendation, recommend
from cabs.probe.timing import Fits, Times
from cabs.probe.wording import between, number, percent, seconds, size

_BOUNDS = {
    "memory": "tried; the next should not fit",
    "dataset": "tried; all there are",
    "max_batch_size": "tried; max_batch_size",
    "seconds": "tried; larger ones take long",
    "unknown": "tried; free memory unknown",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What batch size is useful, and why. Intervals have a level of 95%.

    Attributes:
        optimizer: the name of its class.
        learning_rates: of its parameter groups.
        batch_size: the present size.
        min_batch_size: the smallest size to recommend.
        max_batch_size: the largest size to try, and to recommend.
        dataset_size: how many examples there are.
        after: how many examples were trained on first.
        filled: how many gradients the optimizer was given, at weights that stayed, to have a P.
        fits: the largest size that was tried and fits into memory, and what kept the probe from larger ones.
        times: what steps take.
        noise: F, tr Σ, the noise scale and α tr(PΣ).
        loss_floor: F_*.
        estimator: of tr Σ.
        training: whether the model was in training mode.
    """

    optimizer: str
    learning_rates: tuple[float, ...]
    batch_size: int
    min_batch_size: int
    max_batch_size: int
    dataset_size: int
    after: int
    filled: int
    fits: Fits
    times: Times
    noise: Noise
    loss_floor: float
    estimator: str
    training: bool

    @property
    def largest_batch_size(self) -> int:
        """The largest size that was tried and fits into memory."""
        return self.fits.size

    @property
    def cost(self) -> tuple[float, float] | None:
        """c₀ and c₁ of a step's seconds c₀ + c₁m; None where they cannot be told."""
        return self.times.line

    @property
    def trace(self) -> Interval:
        """tr Σ."""
        return self.noise.trace

    @property
    def noise_scale(self) -> Interval:
        """tr Σ/‖∇F‖²."""
        return self.noise.noise_scale

    @property
    def cabs_batch_size(self) -> Interval | None:
        """m = α tr(PΣ)/F, what CABS would choose now, neither rounded nor clipped."""
        return self.noise.size

    @property
    def cabs_batch_size_per_second(self) -> float | None:
        """The same with the cost of a step, the most gain per second; None where either is not known."""
        if self.noise.size is None or self.cost is None:
            return None
        return rules.adaptive.per_cost(self.noise.size.value, *self.cost)

    @property
    def noise_share(self) -> Interval | None:
        """α tr(PΣ)/4mF at the present size."""
        return None if self.noise.size is None else self.noise.size.times(1 / (4 * self.batch_size))

    @cached_property
    def recommendation(self) -> Recommendation:
        """One size, and why."""
        return recommend(self)

    def rows(self) -> list[tuple[str, str, str]]:
        """The table: what, its value, and what to know about it."""
        noise, fits = self.noise, self.fits
        rows = [("largest that fits", f"{fits.size:,}", _BOUNDS[fits.bound]), *self._time_rows()]
        on = f"n = {noise.examples:,}"
        rows += [
            ("loss F", number(noise.loss.value), between(noise.loss)),
            ("tr Σ", number(noise.trace.value), f"{between(noise.trace)}, {on}"),
            ("noise scale tr Σ/‖∇F‖²", size(noise.noise_scale.value), between(noise.noise_scale, size)),
        ]
        cabs, share, faster = self.cabs_batch_size, self.noise_share, self.cabs_batch_size_per_second
        if cabs is None or share is None:
            return [*rows, ("CABS", "–", "cannot be told, see below")]
        rows.append(("CABS, per example", size(cabs.value), between(cabs, size)))
        if faster is not None:
            rows.append(("CABS, per second", size(faster), "with c₀, the cost of a step"))
        rows.append((f"noise share at m = {self.batch_size:,}", percent(share.value), between(share, percent)))
        return rows

    def _time_rows(self) -> list[tuple[str, str, str]]:
        timed = f"{self.times.measured[0][0]:,} to {self.times.fitted:,}"
        if self.cost is None or self.times.saturation is None or self.times.most is None:
            if (same := self.times.reckoned) is not None:
                return [("time of a step", seconds(same[0]), f"the same, m = {timed}")]
            return [("time of a step", "–", f"cannot be told, m = {timed}")]
        c0, c1 = self.cost
        fit = f"within {percent(max(0.001, self.times.misfit))}, m = {timed}"
        from_there = f"90% of it from m = {size(self.times.saturation)}"
        return [
            ("time of a step", f"{seconds(c0)} + {seconds(c1)} · m", fit),
            ("most throughput", f"{number(self.times.most)} examples/s", from_there),
        ]

    def notes(self) -> list[str]:
        """What a reader should know about how the numbers came about."""
        notes = []
        if self.filled:
            notes.append(
                f"{self.optimizer} has no P before its first step: P is that of {self.filled} gradients of batches of "
                f"{self.batch_size:,}, at these weights. It belongs to that size, and so does the size of CABS."
            )
        if not self.training:
            notes.append("The model is in evaluation mode, and was probed in it: call model.train() first.")
        if self.noise.penalized:
            notes.append("The loss has a penalty in it, which counts in F here; CABS wants F without it.")
        if self.times.misfit > 0.25:
            notes.append("The time of a step is no straight line here: trust its c₀ and c₁ only roughly.")
        if not self.after:
            notes.append("Gradients change fast in the beginning: probe again after some training (after=N).")
        return notes

    @property
    def title(self) -> str:
        """What was probed."""
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(self.learning_rates))
        when = f"after {self.after:,} examples" if self.after else "before training"
        return f"{self.optimizer}, lr {rates}, {when}, dataset of {self.dataset_size:,}"

    @property
    def headline(self) -> str:
        """The recommendation in a line."""
        found = self.recommendation
        if found.size is None:
            return "Recommended: no size can be told"
        near = f" (as good: {found.near[0]:,} to {found.near[1]:,})" if found.near else ""
        return f"Recommended: m = {found.size:,}{near}"

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        table = [f"  {what:<{widths[0]}}  {value:>{widths[1]}}  {about}" for what, value, about in rows]
        reasons = [f"  - {reason}" for reason in self.recommendation.reasons]
        notes = [f"  Note: {note}" for note in self.notes()]
        return "\n".join([f"Probe: {self.title}", "", *table, "", self.headline, *reasons, *notes])

    def __repr__(self) -> str:
        return f"<Report: {self.title}; {self.headline}>"

    def to_dict(self) -> dict[str, Any]:
        """All numbers, in plain values fit for JSON; what is infinite is None."""
        numbers = {
            **asdict(self),
            "cabs_batch_size_per_second": self.cabs_batch_size_per_second,
            "noise_share": None if self.noise_share is None else asdict(self.noise_share),
            "most_throughput": self.times.most,
            "saturation": self.times.saturation,
            "recommendation": asdict(self.recommendation),
            "notes": self.notes(),
        }
        return _finite(numbers)

    def picture(self, path: str | Path | IO[bytes]) -> None:
        """Draws throughput and gain over the batch size; needs ``pip install "torch-cabs[experiments]"``.

        Args:
            path: where to save it; a PNG, unless its name ends in .pdf or .svg.
        """
        try:
            from cabs.probe.picture import draw
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "cabs":
                raise
            raise ModuleNotFoundError(
                f'the picture needs {error.name}: pip install "torch-cabs[experiments]"', name=error.name
            ) from error
        draw(self, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
