"""The schedules that runs can have: batch sizes by the examples seen, and learning rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cabs import rules
from cabs.experiments.counts import parse_count
from cabs.experiments.runs.kinds import Parameter, RuleKind
from cabs.experiments.runs.optimizers import optimizer_kind

DECAYS = ("cosine", "linear")
"""How learning rates fall over a budget, and batches grow where they would."""


def decay(name: str, examples: int, budget: int) -> float:
    """What is left of a learning rate after so many examples of a budget."""
    if name not in DECAYS:
        raise ValueError(f"no decay is called {name!r}; there are {', '.join(DECAYS)}")
    spent = min(1.0, examples / budget)
    return (1 + math.cos(math.pi * spent)) / 2 if name == "cosine" else 1 - spent


def learning_rate_factor(rule: rules.Rule, lr_decay: str, examples: int, budget: int) -> float:
    """What the learning rate is multiplied by after so many examples: its own decay, and what a rule leaves to it."""
    own = 1.0 if lr_decay == "none" else decay(lr_decay, examples, budget)
    return own * (rule.learning_rate_factor(examples) if isinstance(rule, rules.DecayToBatch) else 1.0)


def _steps(schedule: str) -> rules.Rule:
    return rules.Steps(schedule)


def _ramp(start: int, end: int, examples: int, over: int | None = None, shape: Any = "linear") -> rules.Rule:
    return rules.Ramp(start, end, over or examples, shape)


class _Falling:
    """A decay over a budget as a function of examples, equal to any other of the same."""

    def __init__(self, name: str, budget: int) -> None:
        self.name, self.budget = name, budget

    def __call__(self, examples: int) -> float:
        return decay(self.name, examples, self.budget)


def _decay_to_batch(start: int, decay: str, examples: int, optimizer: str) -> rules.Rule:
    return rules.DecayToBatch(_Falling(decay, examples), start, optimizer=optimizer_kind(optimizer).scaling)


_START = Parameter(
    name="start",
    kind=int,
    meaning="The first batch size of a schedule",
    hint="say how large the first batches are, e.g. --start 16",
    least=2,
    label="{}",
    short="{}",
    plural="starts",
)
_FACTOR = Parameter(
    name="factor",
    kind=float,
    meaning="What the rules geometric and on-plateau multiply the size by",
    default=2.0,
    label="× {:g}",
    short="x{:g}",
    plural="factors",
)


SCHEDULES = (
    RuleKind(
        name="steps",
        label="Steps",
        meaning="Sizes set by hand, from some number of examples on.",
        make=_steps,
        parameters=(
            Parameter(
                name="schedule",
                kind=str,
                meaning="Sizes of the rule steps from some number of examples on, e.g. '0:32 100k:64'",
                hint="say from which examples on which size, e.g. --schedule '0:32 100k:64 1M:256'",
                label="{}",
                short="{}",
                plural="schedules",
            ),
        ),
        role="rival",
        measures=False,
        colours=("#4f7f5c", "#37603f", "#86ab8f"),
    ),
    RuleKind(
        name="ramp",
        label="Ramp",
        meaning="From one size to another over a number of examples.",
        make=_ramp,
        parameters=(
            replace(_START, label="{} to", short="{}"),
            Parameter(
                name="end",
                kind=int,
                meaning="The last batch size of the rule ramp",
                hint="say how large the last batches are, e.g. --end 512",
                least=2,
                label="{}",
                short="{}",
                plural="ends",
            ),
            Parameter(
                name="over",
                kind=parse_count,
                meaning="The examples that the rule ramp takes. By default the budget",
                optional=True,
                label="over {:,}",
                short="over{}",
                plural="overs",
            ),
            Parameter(
                name="shape",
                kind=str,
                meaning="The shape of the rule ramp: linear, cosine or geometric",
                optional=True,
                label="{}",
                short="{}",
                plural="shapes",
            ),
        ),
        needs=("examples",),
        role="rival",
        measures=False,
        colours=("#2f7f86", "#215c61", "#79b3b8"),
    ),
    RuleKind(
        name="geometric",
        label="Geometric",
        meaning="The size is multiplied every so many examples.",
        make=rules.Geometric,
        parameters=(
            _START,
            _FACTOR,
            Parameter(
                name="every",
                kind=parse_count,
                meaning="How many examples the rule geometric takes to multiply the size",
                hint="say in how many examples the size is multiplied once, e.g. --every 100k",
                label="every {:,}",
                short="every{}",
                plural="intervals",
            ),
        ),
        role="rival",
        measures=False,
        colours=("#557a95", "#3d5a70", "#8fabc0"),
    ),
    RuleKind(
        name="on-plateau",
        label="On plateau",
        meaning="The size is multiplied when the loss stops falling.",
        make=rules.OnPlateau,
        parameters=(
            _START,
            _FACTOR,
            Parameter(
                name="patience",
                kind=parse_count,
                meaning="How many examples without a better loss make a plateau for the rule on-plateau",
                default=10_000,
                label="after {:,}",
                short="after{}",
                plural="patiences",
            ),
        ),
        role="rival",
        measures=False,
        colours=("#9a5b8f", "#74426b", "#c08fb7"),
    ),
    RuleKind(
        name="decay-to-batch",
        label="Decay to batch",
        meaning="Batches grow where a decay of the learning rate would have it fall; beyond the largest size it falls.",
        make=_decay_to_batch,
        parameters=(
            _START,
            Parameter(
                name="decay",
                kind=str,
                meaning=f"The decay of the learning rate that the rule decay-to-batch replaces: {' or '.join(DECAYS)}",
                default="cosine",
                label="{}",
                short="{}",
                plural="decays",
            ),
        ),
        needs=("examples", "optimizer"),
        role="rival",
        measures=False,
        colours=("#4f516b", "#a3a5bf", "#7d7f9f"),
    ),
)
"""Rules that look at nothing but the examples seen, and for on-plateau the loss."""
