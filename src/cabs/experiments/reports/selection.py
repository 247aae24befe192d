"""The paper's choice of learning rates: for each method the one with the best score on the test set at the end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from cabs.experiments.problems.problem import Metric
from cabs.experiments.runs.kinds import RuleKind
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.runs.reader import Run
from cabs.experiments.runs.rules import RULES


@dataclass(frozen=True)
class Setting:
    """One method with one learning rate: its runs differ by seed alone."""

    runs: tuple[Run, ...]

    @property
    def lr(self) -> float:
        return self.runs[0].config.lr

    @property
    def metric(self) -> Metric:
        """What its runs are ranked by."""
        return self.runs[0].metric

    @property
    def score(self) -> float:
        """Mean final score over seeds; a seed that diverged counts as the worst there is."""
        return fmean(run.final_score for run in self.runs)

    @property
    def rank(self) -> tuple[float, float]:
        """The greater the better: by score, and of equals by training loss."""
        return self.metric.goodness(self.score), -self.loss

    @property
    def loss(self) -> float:
        """Mean final training loss over seeds; infinite if a seed diverged."""
        return fmean(run.final_loss for run in self.runs)

    @property
    def loss_deviation(self) -> float | None:
        """Standard deviation of the final training loss over seeds; None where it cannot be told."""
        return stdev(run.final_loss for run in self.runs) if self.finished and len(self.runs) > 1 else None

    @property
    def loss_range(self) -> tuple[float, float]:
        """The lowest and the highest final training loss of its seeds."""
        losses = [run.final_loss for run in self.runs]
        return min(losses), max(losses)

    @property
    def score_deviation(self) -> float | None:
        """Likewise of the final score."""
        return stdev(run.final_score for run in self.runs) if self.finished and len(self.runs) > 1 else None

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)


@dataclass(frozen=True)
class Method:
    """A method with all learning rates that were tried."""

    name: str
    settings: tuple[Setting, ...]

    @property
    def kind(self) -> RuleKind:
        """The rule for its batch size."""
        return self.settings[0].runs[0].config.kind

    @property
    def optimizer(self) -> str:
        """The name of its optimizer."""
        return self.settings[0].runs[0].config.optimizer

    @property
    def decays(self) -> bool:
        """Whether its learning rate falls while it trains."""
        return self.settings[0].runs[0].config.lr_decay != "none"

    @property
    def undecayed(self) -> str:
        """Its name but for the decay of its learning rate: methods that differ in that alone share a colour."""
        return self.name.replace(f", {self.settings[0].runs[0].config.lr_decay} decay", "")

    @property
    def best(self) -> Setting:
        """The setting with the best score; of equals the one with the lowest training loss."""
        return max(self.settings, key=lambda setting: setting.rank)


def by_method(runs: Iterable[Run]) -> list[Method]:
    """Group runs of one problem and budget: CABS first, constant sizes last and in order of size."""
    named: dict[str, dict[float, list[Run]]] = {}
    for name, run in _named(list(runs)):
        named.setdefault(name, {}).setdefault(run.config.lr, []).append(run)
    grouped = [
        Method(name, tuple(Setting(tuple(sorted(by_lr[lr], key=lambda run: run.config.seed))) for lr in sorted(by_lr)))
        for name, by_lr in named.items()
    ]
    return sorted(grouped, key=_order)


def _named(runs: list[Run]) -> list[tuple[str, Run]]:
    """Each run with the name of its method.

    The optimizer is part of it only where there are several. Where a method has been run twice with the same learning
    rate and seed, the two are not seeds of one setting (their bounds may differ, say), so the directories they came
    from tell them apart.
    """
    several = len({run.config.optimizer for run in runs}) > 1
    names = [run.config.method if several else run.config.sizes for run in runs]
    seen = Counter((name, run.config.lr, run.config.seed) for name, run in zip(names, runs, strict=True))
    repeated = {name for (name, _, _), count in seen.items() if count > 1}
    base = os.path.commonpath([run.path.absolute() for run in runs]) if runs else ""
    return [
        (f"{name} · {run.path.absolute().relative_to(base).parts[0]}" if name in repeated else name, run)
        for name, run in zip(names, runs, strict=True)
    ]


def _order(method: Method) -> tuple[int, int, tuple[tuple[bool, float, str], ...], str]:
    values = method.kind.values(vars(method.settings[0].runs[0].config))
    return (
        list(RULES).index(method.kind.name),
        list(OPTIMIZERS).index(method.optimizer),
        tuple(map(_sortable, values.values())),
        method.name,
    )


def _sortable(value: float | str | None) -> tuple[bool, float, str]:
    """What is left open first, then by value."""
    return value is not None, value if isinstance(value, int | float) else 0.0, str(value)


def best_parameters_only(methods: Iterable[Method]) -> list[Method]:
    """The same methods, with only the best parameter of rules of which just that is shown: the Competitor's θ."""
    methods = list(methods)
    best: dict[tuple[str, str], Method] = {}
    for method in methods:
        key = (method.kind.name, method.optimizer)
        if key not in best or method.best.rank > best[key].best.rank:
            best[key] = method
    return [
        method for method in methods if not method.kind.best_only or method is best[method.kind.name, method.optimizer]
    ]
