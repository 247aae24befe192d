"""The configuration of a run: everything that its numbers depend on, checked where it is made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from cabs._version import __version__
from cabs.experiments.counts import parse_count
from cabs.experiments.errors import UsageError
from cabs.experiments.problems import Problem, optimizer_of
from cabs.experiments.runs.kinds import RuleKind
from cabs.experiments.runs.optimizers import OPTIMIZERS, optimizer_kind
from cabs.experiments.runs.rules import PARAMETERS, RULES, rule_kind
from cabs.experiments.runs.schedules import DECAYS
from cabs.hardware import cores
from cabs.rules.adaptive import UNTOLD

__all__ = ["RunConfig", "parse_count"]

FORMAT = 1
# More would not fit the address space of many machines, and PyTorch crashes when it cannot have what it was promised.
MOST_THREADS = 1024
ESTIMATORS = ("exact", "paper")
MEASURES = ("all", "auto")
LR_DECAYS = ("none", *DECAYS)
_ADDED = (
    *("optimizer", "nu", "noise_share", "cost", "schedule", "start", "end", "over", "shape", "factor", "every"),
    *("patience", "decay", "lr_decay", "horizon"),
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. All schedules count training examples.

    Attributes:
        problem: Name of the problem.
        rule: The rule for the batch size, a key of `RULES`.
        optimizer: The optimizer, a key of `OPTIMIZERS`.
        lr: The learning rate α.
        batch_size: The batch size of the rule ``constant``, else None.
        theta: The parameter θ of the rules ``norm-test`` and ``inner-product-test``, else None.
        nu: The parameter ν of the rule ``inner-product-test``; None for its authors'.
        lipschitz: The constant L of the rule ``gain-per-cost``, else None.
        noise_share: The share ρ of the rule ``cabs``; None for the library's.
        horizon: How ρ of the rule ``horizon`` moves; None for the library's default.
        cost: What a step costs to the rules ``cabs`` and ``horizon``; None for its examples.
        schedule: The sizes of the rule ``steps``, else None.
        start: The first size of a schedule.
        end: The last size of the rule ``ramp``.
        over: The examples that it takes; None for the budget.
        shape: Its shape; None for a line.
        factor: What the rules ``geometric`` and ``on-plateau`` multiply the size by.
        every: The examples that ``geometric`` takes for it.
        patience: The examples without improvement that ``on-plateau`` waits for.
        decay: The decay of the learning rate that the rule ``decay-to-batch`` replaces.
        lr_decay: How the learning rate falls over the budget, one of `LR_DECAYS`.
        estimator: How the gradient variance is measured, one of `ESTIMATORS`.
        measure: What it is measured on, one of `MEASURES`: ``all`` examples of every step, as in the paper, or
            ``auto``, that where it costs next to nothing and less elsewhere.
        min_batch_size: The least batch size of an adaptive rule, and its first.
        max_batch_size: The greatest.
        smoothing: μ of the moving averages.
        weight_decay: Strength of the L2-regularisation of weights.
        examples: The budget: a run ends with the first step that reaches it.
        seed: Decides initial weights, order of examples, and augmentation.
        eval_every: Examples between evaluations.
        log_every: Examples between step rows in the metrics.
        checkpoint_every: Examples between checkpoints.
        device: Where the network is: ``cpu``, ``cuda``, ...
        threads: Threads of PyTorch; results depend on it in the last digits.
        data: Directory with data sets, if not the usual one.
    """

    # What may differ when a run is resumed; anything else would make it another run.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"examples", "data"})

    problem: str
    rule: str = "cabs"
    optimizer: str = "sgd"
    lr: float
    batch_size: int | None = None
    theta: float | None = None
    nu: float | None = None
    lipschitz: float | None = None
    noise_share: float | None = None
    horizon: str | None = None
    cost: str | None = None
    schedule: str | None = None
    start: int | None = None
    end: int | None = None
    over: int | None = None
    shape: str | None = None
    factor: float | None = None
    every: int | None = None
    patience: int | None = None
    decay: str | None = None
    lr_decay: str = "none"
    estimator: str = "exact"
    measure: str = "all"
    min_batch_size: int = 16
    max_batch_size: int = 2048
    smoothing: float = 0.95
    weight_decay: float = 0.0
    examples: int
    seed: int = 0
    eval_every: int
    log_every: int
    checkpoint_every: int
    device: str = "cpu"
    threads: int
    data: str | None = None

    def __post_init__(self) -> None:
        rule_kind(self.rule)
        optimizer_kind(self.optimizer)
        _require(self.estimator in ESTIMATORS, f"--estimator {self.estimator}: there are {', '.join(ESTIMATORS)}")
        _require(self.measure in MEASURES, f"--measure {self.measure}: there are {', '.join(MEASURES)}")
        _require(self.lr_decay in LR_DECAYS, f"--lr-decay {self.lr_decay}: there are {', '.join(LR_DECAYS)}")
        _require(0 < self.lr < math.inf, f"--lr {self.lr}: a learning rate is a positive number")
        _require(0 <= self.smoothing < 1, f"--smoothing {self.smoothing}: μ is at least 0 and below 1")
        _require(0 <= self.weight_decay < math.inf, f"--weight-decay {self.weight_decay}: must not be negative")
        for name in ("examples", "eval_every", "log_every", "checkpoint_every", "threads"):
            _require(getattr(self, name) >= 1, f"{_option(name)} {getattr(self, name)}: must be at least 1")
        _require(self.threads <= MOST_THREADS, f"--threads {self.threads}: must be at most {MOST_THREADS}")
        _require(0 <= self.seed < 2**32, f"--seed {self.seed}: must be a whole number from 0 to 2^32 - 1")
        low, high = self.min_batch_size, self.max_batch_size
        _require(low >= 2, f"--min-batch-size {low}: the variance of gradients needs at least 2 examples")
        _require(high >= low, f"--max-batch-size {high}: must not be less than --min-batch-size {low}")
        self._check_rule()

    def _check_rule(self) -> None:
        own = {parameter.name for parameter in self.kind.parameters}
        for name in (parameter.name for parameter in PARAMETERS if parameter.name not in own):
            theirs = [kind.name for kind in RULES.values() if name in {parameter.name for parameter in kind.parameters}]
            message = f"{_option(name)} goes with --rule {' or '.join(theirs)}, not with --rule {self.rule}"
            _require(getattr(self, name) is None, message)
        for parameter in self.kind.parameters:
            parameter.check(self.rule, getattr(self, parameter.name))
        try:
            rule = self.kind.rule(vars(self))
        except (TypeError, ValueError) as error:
            raise UsageError(f"--rule {self.rule}: {error}") from error
        first = rule.first_batch_size()
        _require(
            first is None or self.batch_size is not None or self.min_batch_size <= first <= self.max_batch_size,
            f"--rule {self.rule}: the first size, {first}, is outside of the bounds, {self.min_batch_size} to "
            f"{self.max_batch_size}; see --min-batch-size and --max-batch-size",
        )

    @classmethod
    def make(cls, problem: Problem, given: dict[str, Any]) -> Self:
        """A configuration from the options that were given; the problem, rule and optimizer provide the others."""
        given = {name: value for name, value in given.items() if value is not None}
        examples = given.setdefault("examples", problem.examples)
        rule = rule_kind(given.setdefault("rule", next(iter(RULES))))
        optimizer = optimizer_kind(given.setdefault("optimizer", problem.optimizer))
        defaults: dict[str, Any] = {
            "lr": problem.lr if optimizer.name == problem.optimizer else optimizer.lr,
            "weight_decay": problem.weight_decay,
            "min_batch_size": problem.min_batch_size if rule.measures or rule.role == "baseline" else 2,
            "eval_every": max(1, examples // problem.evaluations),
            "log_every": max(1, examples // 2000),
            "checkpoint_every": max(1, examples // 20),
            "threads": min(cores(), problem.threads or 64),
        }
        defaults |= {parameter.name: parameter.default for parameter in rule.parameters}
        return cls(problem=problem.name, **{**defaults, **given})

    @property
    def kind(self) -> RuleKind:
        """The rule's entry in the table of rules."""
        return RULES[self.rule]

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest batch size."""
        return (self.batch_size, self.batch_size) if self.batch_size else (self.min_batch_size, self.max_batch_size)

    @property
    def first_batch_size(self) -> int:
        """The least; where the cost of steps is to be measured, what a step has until it is known."""
        low, high = self.bounds
        return max(low, min(UNTOLD, high)) if self.kind.rule(vars(self)).times_steps else low

    @property
    def variant(self) -> str | None:
        """The optimizer, if it is not the problem's own."""
        return None if self.optimizer == optimizer_of(self.problem) else self.optimizer

    @property
    def sizes(self) -> str:
        """Where sizes come from, and what the learning rate does meanwhile: the method but for its optimizer."""
        note = " (paper's estimator)" if self.estimator == "paper" and self.kind.measures else ""
        decay = "" if self.lr_decay == "none" else f", {self.lr_decay} decay"
        return self.kind.method(vars(self)) + note + decay

    @property
    def method(self) -> str:
        """The method's name in pictures and tables: what the paper calls it, without the learning rate."""
        return self.sizes + (f", {OPTIMIZERS[self.variant].label}" if self.variant else "")

    def to_json(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        return {"format": FORMAT, "cabs": __version__, **asdict(self)}

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The configuration in the content of a ``config.json``.

        Raises:
            ValueError: If it is not one, or one of a later version.
        """
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            raise ValueError("not the configuration of a run")
        if content["format"] != FORMAT:
            raise ValueError(f"written by cabs {content.get('cabs')} in format {content['format']}, not {FORMAT}")
        names = {field.name for field in fields(cls)}
        content = {**added_since(), **content}
        if missing := names - content.keys():
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
        for field in fields(cls):
            if not _fits(content[field.name], str(field.type)):
                raise ValueError(f"has a value that cannot be: {field.name} is no {field.type}")
        try:
            return cls(**{name: content[name] for name in names})
        except (TypeError, ValueError, UsageError) as error:
            raise ValueError(f"has a value that cannot be: {error}") from error

    def resumed(self, given: dict[str, Any]) -> Self:
        """This configuration for resuming a run, with the options given then.

        A larger budget and another place of the data are fine; whatever else differs would make it another run.

        Raises:
            UsageError: If an option contradicts the run.
        """
        given = {name: value for name, value in given.items() if value is not None}
        other = given.pop("problem", self.problem)
        _require(
            other == self.problem,
            f"{other}: the run is of {self.problem}; resume it without naming a problem, or choose another --out",
        )
        for name in sorted(given.keys() - self.MAY_CHANGE):
            was, now = getattr(self, name), given[name]
            _require(
                was == now,
                f"{_option(name)} {now}: the run was started with{f' {was}' if was is not None else 'out'}; "
                "resume it without the option",
            )
        examples = given.get("examples", self.examples)
        _require(examples >= self.examples, f"--examples {examples:,}: the run was started with {self.examples:,}")
        return replace(self, examples=examples, data=given.get("data", self.data))


def added_since() -> dict[str, Any]:
    """What earlier versions had no choice of, as it was then."""
    return {field.name: field.default for field in fields(RunConfig) if field.name in _ADDED}


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value from a file is of the type that a field has."""
    if value is None:
        return annotation.endswith("None")
    if annotation.startswith("str"):
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if annotation.startswith("int") else int | float):
        return False
    return -(2**53) < value < 2**53


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
