"""The grid of a sweep: rules × their parameters × learning rates × seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import yaml

from cabs.experiments.config import RULES, RunConfig, parse_count
from cabs.experiments.errors import UsageError
from cabs.experiments.problems import problem

_LISTS = {"rules": str, "lrs": float, "sizes": int, "thetas": float, "seeds": int, "estimators": str}
_COUNTS = ("examples", "eval_every", "log_every", "checkpoint_every")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to run. The defaults are the paper's.

    Attributes:
        problem: Name of the problem.
        rules: Rules for the batch size.
        lrs: Learning rates.
        sizes: Batch sizes of the rule ``constant``.
        thetas: Parameters θ of the rule ``norm-test``.
        seeds: Seeds; each point of the grid is run with each.
        estimators: Estimators of the variance, for the rules that need one.
        examples: The budget of a run; None for the problem's.
        eval_every: Examples between evaluations; likewise.
        log_every: Examples between step rows; likewise.
        checkpoint_every: Examples between checkpoints; likewise.
        min_batch_size: Bound for the adaptive rules.
        max_batch_size: Likewise.
        weight_decay: Strength of the L2-regularisation; None for the problem's.
        lipschitz: The constant L of the rule ``gain-per-cost``.
    """

    problem: str
    rules: tuple[str, ...] = ("cabs", "norm-test", "constant")
    lrs: tuple[float, ...] = (0.3, 0.1, 0.06, 0.03, 0.01, 0.006)
    sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    thetas: tuple[float, ...] = (0.6, 0.8, 1.0)
    seeds: tuple[int, ...] = (0,)
    estimators: tuple[str, ...] = ("exact",)
    examples: int | None = None
    eval_every: int | None = None
    log_every: int | None = None
    checkpoint_every: int | None = None
    min_batch_size: int | None = None
    max_batch_size: int | None = None
    weight_decay: float | None = None
    lipschitz: float | None = None

    def __post_init__(self) -> None:
        for name in _LISTS:
            if not getattr(self, name):
                raise UsageError(f"the grid has no {name}: nothing to run")
        for rule in self.rules:
            if rule not in RULES:
                raise UsageError(f"no rule is called {rule!r}; there are {', '.join(RULES)}")

    @classmethod
    def make(cls, name: str | None, from_file: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """A grid from a problem's name, the content of a file, and options, which override the file."""
        values = {**from_file, **{key: value for key, value in given.items() if value is not None}}
        if name is not None:
            values["problem"] = name
        if "problem" not in values:
            raise UsageError("which problem? name it, as in: cabs sweep mnist")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise UsageError(f"a grid has no {', '.join(map(str, unknown))}; it has {', '.join(sorted(known))}")
        return cls(**{key: _value(key, value) for key, value in values.items()})

    def configs(self, threads: int, data: str | None, device: str | None = None) -> list[RunConfig]:
        """All runs of the grid, every method with one learning rate before any with the next."""
        declared = problem(self.problem)
        shared = {name: getattr(self, name) for name in (*_COUNTS, "min_batch_size", "max_batch_size", "weight_decay")}
        shared |= {"threads": min(threads, declared.threads or threads), "data": data, "device": device}
        return [
            RunConfig.make(declared, {**shared, **method, "lr": lr, "seed": seed})
            for seed in self.seeds
            for lr in self.lrs
            for method in self._methods()
        ]

    def _methods(self) -> list[dict[str, Any]]:
        methods: list[dict[str, Any]] = []
        for rule in dict.fromkeys(self.rules):
            if rule == "constant":
                methods += [{"rule": rule, "batch_size": size} for size in self.sizes]
                continue
            variants: list[dict[str, Any]] = [{"rule": rule}]
            if rule == "norm-test":
                variants = [{"rule": rule, "theta": theta} for theta in self.thetas]
            elif rule == "gain-per-cost":
                variants = [{"rule": rule, "lipschitz": self.lipschitz}]
            methods += [{**variant, "estimator": name} for variant in variants for name in self.estimators]
        return methods


def _value(name: str, value: Any) -> Any:
    """A value from a file or an option in the type that the grid wants."""
    try:
        if name in _LISTS:
            items = value if isinstance(value, list | tuple) else str(value).split(",")
            return tuple(dict.fromkeys(_LISTS[name](str(item).strip()) for item in items))
        if name in _COUNTS:
            return parse_count(str(value))
        if name in ("weight_decay", "lipschitz"):
            return float(value)
        if name in ("min_batch_size", "max_batch_size"):
            return int(str(value))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} cannot be {value!r}: {error}") from error
    return str(value)


def read_grid(path: Path) -> dict[str, Any]:
    """The content of a YAML file that describes a grid.

    Raises:
        UsageError: If it cannot be read as one.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected lines like 'lrs: [0.1, 0.03]', with the names of a grid's parts")
    return content
