"""Options that come from the tables of rules, optimizers and problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from cabs.experiments.problems.table import NAMES
from cabs.experiments.runs.kinds import Parameter
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.runs.rules import PARAMETERS, RULES


def listed(names: Sequence[str], default: str | None = None) -> str:
    """Names as a sentence has them: ``a (default), b or c``."""
    *most, last = [f"{name} (default)" if name == default else name for name in names]
    return f"{', '.join(most)} or {last}"


PROBLEM = f"{listed(NAMES)}."
RULE = f"{listed(list(RULES), next(iter(RULES)))}."
OPTIMIZER = f"{listed(list(OPTIMIZERS))}."


def with_rule_parameters(panel: str, *, lists: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each parameter that a rule may have, in place of its ``**parameters``.

    Args:
        panel: The part of the help that they are shown in.
        lists: Whether the options take several values, as those of a grid do.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        # Annotations are resolved here: what typer makes of text depends on its version.
        signature = inspect.signature(command, eval_str=True)
        added = [_option(parameter, panel, lists) for parameter in PARAMETERS]
        own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        whole = signature.replace(parameters=[*own, *added])

        command.__signature__ = whole  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in whole.parameters.values()} | {"return": None}
        return command

    return decorate


def parsed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The values of such options, those that are written in a way of their own (100k) read."""
    kinds = {parameter.name: parameter.kind for parameter in PARAMETERS}
    return {
        name: kinds[name](value) if isinstance(value, str) and name in kinds else value
        for name, value in parameters.items()
    }


def _option(parameter: Parameter, panel: str, lists: bool) -> inspect.Parameter:
    kind: Any = (parameter.kind if parameter.kind in (int, float) and not lists else str) | None
    defaults = parameter.grid if lists else (() if parameter.default is None else (parameter.default,))
    text = f"{parameter.meaning}." + (f" (Default: {','.join(map(str, defaults))}.)" if defaults else "")
    return inspect.Parameter(
        parameter.plural if lists else parameter.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, typer.Option(help=text, rich_help_panel=panel)],
    )
