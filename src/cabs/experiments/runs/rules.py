"""The rules for the batch size: all that options, names, tables and pictures need to know of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cabs import rules
from cabs.experiments.errors import named


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A number that a rule needs.

    Attributes:
        name: Its name in a run's configuration; the option is called the same.
        kind: Its type.
        meaning: What it is, for the help of options.
        hint: What to say when it is missing.
        default: Its value if none is given.
        least: The least value that makes sense; any positive one if None.
        label: How it follows the rule's name in tables, with ``{}`` for the value.
        short: How it is part of a run's name, likewise.
        plural: Its name in a grid of runs, where it has several values.
        grid: Its values in a grid that names none.
    """

    name: str
    kind: type[int] | type[float]
    meaning: str
    hint: str
    default: float | None = None
    least: float | None = None
    label: str
    short: str
    plural: str
    grid: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RuleKind:
    """A rule for the batch size.

    Attributes:
        name: The name used on the command line and in a run's configuration.
        label: The name used in tables and pictures: what the paper calls it.
        make: Makes the rule, given its parameters by name.
        parameters: The numbers that it needs.
        role: ``ours``; a ``rival``, which adapts the size too; or a ``baseline``, which has one size throughout.
        measures: Whether it looks at the gradient variance.
        best_only: Whether comparisons show only the best of its parameters.
        colours: For its methods in turn, the last for all further ones; for a baseline a ramp from small to large.
    """

    name: str
    label: str
    make: Callable[..., rules.Rule]
    parameters: tuple[Parameter, ...] = ()
    role: Literal["ours", "rival", "baseline"]
    measures: bool = True
    best_only: bool = False
    colours: tuple[str, ...]

    def rule(self, values: Mapping[str, Any]) -> rules.Rule:
        """The rule itself, with the parameters of a run's configuration."""
        return self.make(**self.values(values))

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the values that are this rule's parameters."""
        return {parameter.name: values[parameter.name] for parameter in self.parameters}

    def method(self, values: Mapping[str, Any]) -> str:
        """The method's name in tables and pictures."""
        parts = (parameter.label.format(values[parameter.name]) for parameter in self.parameters)
        return " ".join((self.label, *parts))

    def short(self, values: Mapping[str, Any]) -> str:
        """The method as part of a file name."""
        parts = (parameter.short.format(values[parameter.name]) for parameter in self.parameters)
        return "-".join((self.name, *parts))


_KINDS = (
    RuleKind(
        name="cabs",
        label="CABS",
        make=rules.CABS,
        role="ours",
        colours=("#d1495b", "#e88598", "#b5838d"),
    ),
    RuleKind(
        name="gain-per-cost",
        label="Gain per cost",
        make=rules.GainPerCost,
        parameters=(
            Parameter(
                name="lipschitz",
                kind=float,
                meaning="L of the rule gain-per-cost",
                hint="the rule needs the Lipschitz constant of the gradient",
                label="L = {}",
                short="L{}",
                plural="lipschitz",
            ),
        ),
        role="rival",
        colours=("#96703c", "#6f5228", "#b99262"),
    ),
    RuleKind(
        name="norm-test",
        label="Competitor",
        make=rules.NormTest,
        parameters=(
            Parameter(
                name="theta",
                kind=float,
                meaning="θ of the rule norm-test",
                hint="the paper tries --theta 0.6, 0.8 and 1.0",
                default=1.0,
                label="θ = {}",
                short="theta{}",
                plural="thetas",
                grid=(0.6, 0.8, 1.0),
            ),
        ),
        role="rival",
        best_only=True,
        colours=("#e0992b", "#b8741a", "#f0c46c"),
    ),
    RuleKind(
        name="constant",
        label="Constant",
        make=rules.Constant,
        parameters=(
            Parameter(
                name="batch_size",
                kind=int,
                meaning="The batch size of the rule constant",
                hint="say how large the batches are, e.g. --batch-size 128",
                least=2,
                label="{}",
                short="m{}",
                plural="sizes",
                grid=(16, 32, 64, 128, 256, 512),
            ),
        ),
        role="baseline",
        measures=False,
        colours=("#45b39d", "#2e9cca", "#3b7dd8", "#5a63c8", "#7b57b8", "#8f4f9f"),
    ),
)

RULES = {kind.name: kind for kind in _KINDS}
"""The rules by name, in the order in which comparisons show them."""

PARAMETERS = tuple(parameter for kind in _KINDS for parameter in kind.parameters)
"""The parameters of all rules."""

PAPER_RULES = ("cabs", "norm-test", "constant")
"""What the paper compares, and a grid that names no rules."""


def rule_kind(name: str) -> RuleKind:
    """The rule of this name.

    Raises:
        UsageError: If there is none.
    """
    return named(name, RULES, "rule")
