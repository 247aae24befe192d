"""The paper's choice of learning rates: for each method the one with the highest final test accuracy."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from cabs.experiments.runs import Run


@dataclass(frozen=True)
class Setting:
    """One method with one learning rate: its runs differ by seed alone."""

    runs: tuple[Run, ...]

    @property
    def lr(self) -> float:
        return self.runs[0].config.lr

    @property
    def accuracy(self) -> float:
        """Mean final test accuracy over seeds; a seed that diverged counts as 0."""
        return fmean(run.final_accuracy for run in self.runs)

    @property
    def loss(self) -> float:
        """Mean final training loss over seeds; infinite if a seed diverged."""
        return fmean(run.final_loss for run in self.runs)

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)


@dataclass(frozen=True)
class Method:
    """A method with all learning rates that were tried."""

    name: str
    rule: str
    settings: tuple[Setting, ...]

    @property
    def best(self) -> Setting:
        """The setting with the highest accuracy; of equals the one with the lowest training loss."""
        return max(self.settings, key=lambda setting: (setting.accuracy, -setting.loss))


def by_method(runs: Iterable[Run]) -> list[Method]:
    """Group runs of one problem and budget: CABS first, constant sizes last and in order of size."""
    named: dict[str, dict[float, list[Run]]] = {}
    for name, run in _named(list(runs)):
        named.setdefault(name, {}).setdefault(run.config.lr, []).append(run)
    grouped = [
        Method(
            name,
            next(iter(by_lr.values()))[0].config.rule,
            tuple(Setting(tuple(sorted(by_lr[lr], key=lambda run: run.config.seed))) for lr in sorted(by_lr)),
        )
        for name, by_lr in named.items()
    ]
    return sorted(grouped, key=_order)


def _named(runs: list[Run]) -> list[tuple[str, Run]]:
    """Each run with the name of its method.

    Where a method has been run twice with the same learning rate and seed, the two are not seeds of one setting
    (their bounds may differ, say), so the directories they came from tell them apart.
    """
    seen = Counter((run.config.method, run.config.lr, run.config.seed) for run in runs)
    repeated = {method for (method, _, _), count in seen.items() if count > 1}
    base = os.path.commonpath([run.path.absolute() for run in runs]) if runs else ""
    return [
        (
            f"{run.config.method} · {run.path.absolute().relative_to(base).parts[0]}"
            if run.config.method in repeated
            else run.config.method,
            run,
        )
        for run in runs
    ]


def _order(method: Method) -> tuple[int, int, float, str]:
    config = method.best.runs[0].config
    rank = ("cabs", "gain-per-cost", "norm-test", "constant").index(method.rule)
    return rank, config.batch_size or 0, config.theta or 0.0, method.name


def best_competitor_only(methods: Iterable[Method]) -> list[Method]:
    """The same methods with only the best-performing θ of the Competitor, as the paper reports it."""
    methods = list(methods)
    competitors = [method for method in methods if method.rule == "norm-test"]
    best = max(competitors, key=lambda method: (method.best.accuracy, -method.best.loss), default=None)
    return [method for method in methods if method.rule != "norm-test" or method is best]
