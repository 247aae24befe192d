"""What the integrations take for a scheduler: the arguments of ``cabs.CABS``, or any rule and the other arguments."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from cabs import rules
from cabs.scheduler import CABS, BatchSizeScheduler

_OF_SCHEDULER = set(list(inspect.signature(BatchSizeScheduler).parameters)[4:])
_OF_RULE = set(list(inspect.signature(CABS).parameters)[3:]) - _OF_SCHEDULER


def rule_and_options(
    who: str, rule: rules.Rule | None, options: Mapping[str, Any], given: Collection[str]
) -> tuple[rules.Rule, dict[str, Any]]:
    """The rule, and what else the scheduler is made with.

    Args:
        who: what has been given the options, for messages.
        rule: one of ``cabs.rules``; None for CABS with those of the options that are about it.
        options: by the names of ``cabs.CABS``.
        given: arguments of the scheduler that the framework says, and nobody else may.

    Raises:
        TypeError: there is no such option, or it is not for users to say.
    """
    for name in options:
        if name in given:
            raise TypeError(f"{who} takes no {name}: it is known from the framework")
        if name not in _OF_RULE | _OF_SCHEDULER:
            raise TypeError(f"{who} takes no {name}, but rule and what cabs.CABS takes: {_names(given)}")
        if rule is not None and name in _OF_RULE:
            raise TypeError(f"{name} is about the rule CABS, and rule is {rule!r}: leave out one of them")
    if rule is None:
        about = {name: value for name, value in options.items() if name in _OF_RULE}
        rule = rules.CABS(about.pop("loss_floor", 0.0), **about)
    if not isinstance(rule, rules.Rule):
        raise TypeError(f"rule is {rule!r}: it must be one of cabs.rules, or a subclass of cabs.rules.Rule")
    return rule, {name: value for name, value in options.items() if name in _OF_SCHEDULER}


def _names(given: Collection[str]) -> str:
    return ", ".join(sorted(_OF_RULE | _OF_SCHEDULER - set(given)))
