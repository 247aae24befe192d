"""What a report compares: the methods of one problem, optimizer and budget, each with its best learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from cabs.experiments.problems import PROBLEMS, metric_of, optimizer_of, title_of
from cabs.experiments.problems.problem import Metric
from cabs.experiments.reports.selection import Method, Setting, best_parameters_only, by_method
from cabs.experiments.runs.naming import file_name
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.runs.reader import SETTLED, Run
from cabs.experiments.wording import short_count

_GRID_POINTS = 200
# The constant sizes that the paper shows in its main figures; the others are in its supplements.
_MAIN_SIZES = (32, 128, 512)


@dataclass(frozen=True)
class Curve:
    """A quantity against examples accessed: the mean over seeds, and the range of the seeds if there are several."""

    examples: list[float]
    mean: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


def tracks_of(setting: Setting, name: str) -> list[tuple[list[float], list[float]]]:
    """Examples, and a quantity in the metrics at each, as they were measured: one track for each seed that has any."""
    tracks = []
    for run in setting.runs:
        rows = [row for row in (*run.steps, *run.evaluations) if row.get(name) is not None]
        tracks.append(([float(row["examples"]) for row in rows], [float(row[name]) for row in rows]))
    return [(x, y) for x, y in tracks if x]


def curve(setting: Setting, name: str) -> Curve:
    """The curve of a quantity in the metrics, such as ``train_loss`` or ``batch_size``."""
    tracks = tracks_of(setting, name)
    if not tracks:
        return Curve([], [])
    if len(tracks) == 1:
        return Curve(*tracks[0])
    # Seeds are evaluated at slightly different counts, a batch more or less.
    grid = np.linspace(max(x[0] for x, _ in tracks), min(x[-1] for x, _ in tracks), _GRID_POINTS)
    values = np.stack([np.interp(grid, x, y) for x, y in tracks])
    return Curve(grid.tolist(), values.mean(axis=0).tolist(), values.min(axis=0).tolist(), values.max(axis=0).tolist())


def far_apart(methods: Sequence[Method]) -> bool:
    """Whether the batch sizes of methods are too different for an axis that is not logarithmic."""
    largest = [max(curve(method.best, "batch_size").mean, default=0.0) for method in methods]
    return min(largest, default=0.0) > 0 and max(largest) > 10 * min(largest)


def diverged(setting: Setting) -> tuple[Curve, float] | None:
    """The training loss of the first seed to diverge and the examples it got to; None if no seed did."""
    ends = [(_last(run), run) for run in setting.runs if not run.finished]
    if not ends:
        return None
    end, run = min(ends, key=lambda pair: pair[0])
    return curve(Setting((run,)), "train_loss"), end


def _last(run: Run) -> float:
    return max((float(row["examples"]) for row in (*run.steps, *run.evaluations)), default=0.0)


@dataclass(frozen=True)
class Reached:
    """How much it took to get to a given loss or score."""

    examples: float
    seconds: float


def reach(setting: Setting, name: str, reached: Callable[[float], bool]) -> Reached | None:
    """The first evaluation at which the mean over seeds of a quantity is where it should be."""
    for rows in zip(*(run.evaluations for run in setting.runs), strict=False):
        if reached(fmean(row[name] for row in rows)):
            return Reached(fmean(row["examples"] for row in rows), fmean(row["seconds"] for row in rows))
    return None


@dataclass(frozen=True)
class Row:
    """A line of the table: a method with its best learning rate.

    Attributes:
        name: The method.
        lr: Its best learning rate; None if every learning rate diverged.
        loss: Training loss at the budget.
        loss_deviation: Its standard deviation over seeds, if there are several.
        score: What the problem's metric says of the test set at the budget.
        deviation: Its standard deviation likewise.
        batch_size: Mean batch size.
        to_loss: What it took to reach the target loss.
        to_score: What it took to reach the target score.
    """

    name: str
    lr: float | None
    loss: float | None = None
    loss_deviation: float | None = None
    score: float | None = None
    deviation: float | None = None
    batch_size: float | None = None
    to_loss: Reached | None = None
    to_score: Reached | None = None


@dataclass(frozen=True)
class Section:
    """One problem with one optimizer and one budget.

    Attributes:
        problem: The problem's name.
        optimizer: The optimizer's name.
        budget: Examples of each run.
        methods: The methods compared; of the Competitor just the best θ.
        main: Those of them that are in the main figure.
        target_loss: The training loss that the table asks for.
        target_score: The score on the test set that the table asks for.
        rows: The table.
        reference: Name of the best constant size, which speed-ups are relative to.
        unfinished: Runs that are left out because they are not finished.
        runs: All runs.
        times: Whether seconds are told; those of runs on a busy machine mean nothing.
    """

    problem: str
    optimizer: str
    budget: int
    methods: list[Method]
    main: list[Method]
    target_loss: float
    target_score: float
    rows: list[Row]
    reference: str | None
    unfinished: list[Run]
    runs: list[Run]
    times: bool = True

    @property
    def title(self) -> str:
        """What a reader calls it."""
        own = self.optimizer == optimizer_of(self.problem)
        variant = "" if own else f", {OPTIMIZERS[self.optimizer].label}"
        return f"{title_of(self.problem)}{variant}, {short_count(self.budget)} examples"

    @property
    def stem(self) -> str:
        """The beginning of the names of its files."""
        variant = "" if self.optimizer == optimizer_of(self.problem) else f"-{self.optimizer}"
        return f"{file_name(self.problem)}{variant}-{short_count(self.budget)}"

    @property
    def metric(self) -> Metric:
        """What methods are ranked by."""
        return metric_of(self.problem)


def compare(
    runs: Iterable[Run],
    target_loss: float | None = None,
    target_scores: Mapping[str, float] | None = None,
    *,
    times: bool = True,
) -> list[Section]:
    """Sort runs into sections and compare the methods in each.

    Args:
        runs: Runs of any problems and budgets.
        target_loss: The training loss that the tables ask for; by default what the best constant size ends with.
        target_scores: Likewise the score on the test set, by the name of the metric.
        times: Whether the tables tell seconds.

    Returns:
        A section for each problem, optimizer and budget that has finished runs.
    """
    grouped: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.config.problem, run.config.optimizer, run.config.examples), []).append(run)
    sections = []
    for (name, optimizer, budget), members in sorted(grouped.items(), key=lambda item: _place(*item[0])):
        settled = [run for run in members if run.status in SETTLED]
        methods = best_parameters_only(by_method(settled))
        finished = [method for method in methods if method.best.finished]
        if not finished:
            continue
        reference = _best_baseline(finished)
        model = reference or min(finished, key=lambda method: method.best.rank)
        loss = model.best.loss if target_loss is None else target_loss
        score = (target_scores or {}).get(metric_of(name).name, model.best.score)
        sections.append(
            Section(
                problem=name,
                optimizer=optimizer,
                budget=budget,
                methods=methods,
                main=_main(methods),
                target_loss=loss,
                target_score=score,
                rows=[_row(method, loss, score) for method in methods],
                reference=reference.name if reference else None,
                unfinished=[run for run in members if run.status not in SETTLED],
                runs=members,
                times=times,
            )
        )
    return sections


def _place(problem: str, optimizer: str, budget: int) -> tuple[int, str, int, int]:
    """Where a section comes: problems and optimizers in the order of their tables, from the easiest on."""
    known = list(PROBLEMS)
    place = known.index(problem) if problem in known else len(known)
    return place, problem, list(OPTIMIZERS).index(optimizer), budget


def _best_baseline(methods: list[Method]) -> Method | None:
    baselines = [method for method in methods if method.kind.role == "baseline"]
    return max(baselines, key=lambda method: method.best.rank, default=None)


def _main(methods: list[Method]) -> list[Method]:
    """All that adapt, and three constant sizes as in the paper; with and without a decay of α the best of each."""
    baselines = [method for method in methods if method.kind.role == "baseline"]
    decays = {method.best.runs[0].config.lr_decay for method in baselines}
    if len(decays) > 1:
        of_each = [[m for m in baselines if m.best.runs[0].config.lr_decay == decay] for decay in sorted(decays)]
        chosen = [max(kin, key=lambda method: method.best.rank) for kin in of_each]
        return [method for method in methods if method.kind.role != "baseline" or method in chosen]
    shown = [method for method in baselines if method.best.runs[0].config.batch_size in _MAIN_SIZES]
    if len(baselines) <= 3 or len(shown) < 2:
        shown = baselines[:3] if len(baselines) <= 3 else baselines[:: max(1, len(baselines) // 3)][:3]
    return [method for method in methods if method.kind.role != "baseline" or method in shown]


def _row(method: Method, loss: float, score: float) -> Row:
    best = method.best
    if not best.finished:
        return Row(method.name, None)
    steps = [run.evaluations[-1] for run in best.runs]
    return Row(
        name=method.name,
        lr=best.lr,
        loss=best.loss,
        loss_deviation=best.loss_deviation,
        score=best.score,
        deviation=best.score_deviation,
        batch_size=fmean(row["examples"] / max(row["step"], 1) for row in steps),
        to_loss=reach(best, "train_loss", lambda value: value <= loss),
        to_score=reach(best, best.metric.key, best.metric.reached(score)),
    )
