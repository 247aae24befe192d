"""What options, names, tables and pictures need to know of a rule for the batch size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cabs import rules
from cabs.experiments.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What a rule needs to be told; rules may share one by its name.

    Attributes:
        name: Its name in a run's configuration; the option is called the same.
        kind: Its type; of a number of examples it is `count`.
        meaning: What it is, for the help of options.
        hint: What to say when it is missing.
        default: Its value if none is given.
        optional: Whether it may be left open, which then is no part of names either.
        least: The least value that makes sense; any positive one if None.
        label: How it follows the rule's name in tables, with ``{}`` for the value.
        short: How it is part of a run's name, likewise.
        plural: Its name in a grid of runs, where it has several values.
        grid: Its values in a grid that names none.
    """

    name: str
    kind: Callable[[str], Any]
    meaning: str
    hint: str = ""
    default: float | str | None = None
    optional: bool = False
    least: float | None = None
    label: str
    short: str
    plural: str
    grid: tuple[float | str, ...] = ()

    def check(self, rule: str, value: Any) -> None:
        """See that a value makes sense.

        Raises:
            UsageError: If it does not.
        """
        option = "--" + self.name.replace("_", "-")
        if value is None:
            if not self.optional:
                raise UsageError(f"--rule {rule} needs {option}: {self.hint}")
            return
        if isinstance(value, str):
            return
        if self.least is not None and value < self.least:
            raise UsageError(f"{option} {value}: must be at least {self.least}")
        if not 0 < value < math.inf:
            raise UsageError(f"{option} {value}: must be a positive number")


@dataclass(frozen=True, kw_only=True)
class RuleKind:
    """A rule for the batch size.

    Attributes:
        name: The name used on the command line and in a run's configuration.
        label: The name used in tables and pictures: what the paper calls it.
        meaning: What it does, in a sentence for whoever reads a report.
        make: Makes the rule, given its parameters by name, and what it ``needs``.
        parameters: What it needs to be told.
        needs: Other parts of a run's configuration that it depends on.
        role: ``ours``; a ``rival``, which adapts the size too; or a ``baseline``, which has one size throughout.
        budget_aware: The rule that ``--budget-aware`` makes of it, if any.
        measures: Whether it looks at the gradient variance.
        best_only: Whether comparisons show only the best of its parameters.
        colours: For its methods in turn, the last for all further ones; for a baseline a ramp from small to large.
    """

    name: str
    label: str
    meaning: str
    make: Callable[..., rules.Rule]
    parameters: tuple[Parameter, ...] = ()
    needs: tuple[str, ...] = ()
    role: Literal["ours", "rival", "baseline"]
    budget_aware: str | None = None
    measures: bool = True
    best_only: bool = False
    colours: tuple[str, ...]

    def rule(self, values: Mapping[str, Any]) -> rules.Rule:
        """The rule itself, for a run's configuration."""
        given = {name: value for name, value in self.values(values).items() if value is not None}
        return self.make(**given, **{name: values[name] for name in self.needs})

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the values that are this rule's parameters."""
        return {parameter.name: values[parameter.name] for parameter in self.parameters}

    def method(self, values: Mapping[str, Any]) -> str:
        """The method's name in tables and pictures."""
        return " ".join((self.label, *self._parts(values, lambda parameter: parameter.label)))

    def short(self, values: Mapping[str, Any]) -> str:
        """The method as part of a file name."""
        parts = self._parts(values, lambda parameter: parameter.short)
        return re.sub(r"[^\w.-]+", "_", "-".join((self.name, *parts)))

    def _parts(self, values: Mapping[str, Any], form: Callable[[Parameter], str]) -> list[str]:
        given = [(parameter, values[parameter.name]) for parameter in self.parameters]
        return [form(parameter).format(value) for parameter, value in given if value is not None]
