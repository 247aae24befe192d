"""The grid of a sweep: rules × their parameters × optimizers × learning rates × seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import yaml

from cabs.experiments.counts import parse_count
from cabs.experiments.errors import UsageError
from cabs.experiments.problems import problem
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.optimizers import optimizer_kind
from cabs.experiments.runs.rules import PAPER_RULES, PARAMETERS, rule_kind

_LISTS: dict[str, Callable[[str], Any]] = {
    "rules": str,
    "optimizers": str,
    "lrs": float,
    "seeds": int,
    "estimators": str,
    "lr_decays": str,
    **{parameter.plural: parameter.kind for parameter in PARAMETERS},
}
_COUNTS = ("examples", "eval_every", "log_every", "checkpoint_every")
_SHARED = ("min_batch_size", "max_batch_size", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to run. The defaults are the paper's, and None stands for them.

    Attributes:
        problem: Name of the problem.
        rules: Rules for the batch size.
        optimizers: Optimizers; None for the problem's own.
        lrs: Learning rates; None for those that suit each optimizer, the paper's for SGD.
        sizes: Batch sizes of the rule ``constant``.
        thetas: Parameters θ of the rules ``norm-test`` and ``inner-product-test``.
        nus: Parameters ν of the latter.
        lipschitz: Constants L of the rule ``gain-per-cost``.
        noise_shares: Shares ρ of the rule ``cabs``.
        horizons: How ρ of the rule ``horizon`` moves.
        costs: What a step costs to the rules ``cabs`` and ``horizon``.
        schedules: Sizes by examples of the rule ``steps``.
        starts: First sizes of schedules.
        ends: Last sizes of the rule ``ramp``.
        overs: The examples that it takes.
        shapes: Its shapes.
        factors: Factors of the rules ``geometric`` and ``on-plateau``.
        intervals: The examples that ``geometric`` takes to multiply the size.
        patiences: The examples that ``on-plateau`` waits for.
        decays: The decays that the rule ``decay-to-batch`` replaces.
        lr_decays: Decays of the learning rate over the budget; each method is run with each.
        seeds: Seeds; each point of the grid is run with each.
        estimators: Estimators of the variance, for the rules that need one.
        measure: What these measure it on, ``all`` or ``auto``; None for all.
        examples: The budget of a run; None for the problem's.
        eval_every: Examples between evaluations; likewise.
        log_every: Examples between step rows; likewise.
        checkpoint_every: Examples between checkpoints; likewise.
        min_batch_size: Bound for the adaptive rules.
        max_batch_size: Likewise.
        weight_decay: Strength of the L2-regularisation; None for the problem's.
    """

    problem: str
    rules: tuple[str, ...] = PAPER_RULES
    optimizers: tuple[str, ...] | None = None
    lrs: tuple[float, ...] | None = None
    sizes: tuple[int, ...] | None = None
    thetas: tuple[float, ...] | None = None
    nus: tuple[float, ...] | None = None
    lipschitz: tuple[float, ...] | None = None
    noise_shares: tuple[float, ...] | None = None
    horizons: tuple[str, ...] | None = None
    costs: tuple[str, ...] | None = None
    schedules: tuple[str, ...] | None = None
    starts: tuple[int, ...] | None = None
    ends: tuple[int, ...] | None = None
    overs: tuple[int, ...] | None = None
    shapes: tuple[str, ...] | None = None
    factors: tuple[float, ...] | None = None
    intervals: tuple[int, ...] | None = None
    patiences: tuple[int, ...] | None = None
    decays: tuple[str, ...] | None = None
    lr_decays: tuple[str, ...] = ("none",)
    seeds: tuple[int, ...] = (0,)
    estimators: tuple[str, ...] = ("exact",)
    measure: str | None = None
    examples: int | None = None
    eval_every: int | None = None
    log_every: int | None = None
    checkpoint_every: int | None = None
    min_batch_size: int | None = None
    max_batch_size: int | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        for name in _LISTS:
            if getattr(self, name) == ():
                raise UsageError(f"the grid has no {name}: nothing to run")
        for rule in self.rules:
            rule_kind(rule)
        for optimizer in self.optimizers or ():
            optimizer_kind(optimizer)

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
        shared = {name: getattr(self, name) for name in (*_COUNTS, *_SHARED)}
        shared |= {"threads": min(threads, declared.threads or threads), "data": data, "device": device}
        methods = self._methods()
        return [
            RunConfig.make(
                declared, {**shared, **method, "optimizer": optimizer, "lr": lr, "lr_decay": decay, "seed": seed}
            )
            for seed in self.seeds
            for optimizer in self.optimizers or (declared.optimizer,)
            for lr in self.lrs or optimizer_kind(optimizer).lrs
            for method in methods
            for decay in self.lr_decays
        ]

    def _methods(self) -> list[dict[str, Any]]:
        """Every rule with every choice of its parameters."""
        methods: list[dict[str, Any]] = []
        for kind in map(rule_kind, dict.fromkeys(self.rules)):
            variants: list[dict[str, Any]] = [{"rule": kind.name}]
            for parameter in kind.parameters:
                values = getattr(self, parameter.plural) or parameter.grid or (None,)
                variants = [{**variant, parameter.name: value} for variant in variants for value in values]
            ways: list[dict[str, Any]] = [{"estimator": name, "measure": self.measure} for name in self.estimators]
            methods += [{**variant, **way} for variant in variants for way in (ways if kind.measures else [{}])]
        return methods


def _value(name: str, value: Any) -> Any:
    """A value from a file or an option in the type that the grid wants."""
    try:
        if name in _LISTS:
            items = value if isinstance(value, list | tuple) else str(value).split(",")
            return tuple(dict.fromkeys(_LISTS[name](str(item).strip()) for item in items))
        if name in _COUNTS:
            return parse_count(str(value))
        if name == "weight_decay":
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
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected lines like 'lrs: [0.1, 0.03]', with the names of a grid's parts")
    return content
