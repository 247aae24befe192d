"""The rules for the batch size that runs can have."""

from __future__ import annotations

from typing import Any, Literal

from cabs import rules
from cabs.experiments.errors import named
from cabs.experiments.runs.kinds import Parameter, RuleKind
from cabs.experiments.runs.schedules import SCHEDULES


def _cost(text: str) -> Literal["examples", "measured"] | tuple[float, float]:
    if text == "examples":
        return "examples"
    if text == "measured":
        return "measured"
    try:
        c0, c1 = map(float, text.split(":"))
    except ValueError:
        raise ValueError(f"cost is {text!r}: write examples, measured, or c0:c1, such as 0.02:0.0005") from None
    return c0, c1


def _cabs(cost: str = "examples", **options: Any) -> rules.Rule:
    return rules.CABS(cost=_cost(cost), **options)


def _horizon(examples: int, horizon: str | None = None, **options: Any) -> rules.Rule:
    return _cabs(budget=examples, horizon=None if horizon is None else _shares(horizon), **options)


def _shares(text: str) -> Literal["measured"] | rules.Horizon:
    if text == "measured":
        return "measured"
    try:
        start, until, end = map(float, text.split(":"))
    except ValueError:
        raise ValueError(f"horizon is {text!r}: write measured, or start:until:end, such as 0.6:0.6:0.125") from None
    return rules.Horizon(start, until, end)


_COST = Parameter(
    name="cost",
    kind=str,
    meaning="What a step costs, to the rules cabs and horizon: examples, measured (in seconds), or c0:c1",
    optional=True,
    label="cost {}",
    short="cost{}",
    plural="costs",
)


def _theta(default: float, grid: tuple[float, ...]) -> Parameter:
    return Parameter(
        name="theta",
        kind=float,
        meaning="θ of the rules norm-test (default: 1.0) and inner-product-test (default: 0.9)",
        hint="the paper tries --theta 0.6, 0.8 and 1.0",
        default=default,
        label="θ = {}",
        short="theta{}",
        plural="thetas",
        grid=grid,
    )


_KINDS = (
    RuleKind(
        name="cabs",
        label="CABS",
        meaning="The paper's rule: m = α·tr Σ/F, with learning rate α, variance of gradients tr Σ and loss F.",
        make=_cabs,
        parameters=(
            Parameter(
                name="noise_share",
                kind=float,
                meaning="ρ of the rule cabs, the share of the loss that may be noise: 0.25, 0.5 with --cost measured",
                optional=True,
                label="ρ = {}",
                short="rho{}",
                plural="noise_shares",
            ),
            _COST,
        ),
        role="ours",
        budget_aware="horizon",
        colours=("#d1495b", "#e88598", "#b5838d"),
    ),
    RuleKind(
        name="horizon",
        label="CABS, horizon",
        meaning="CABS for a run that knows its budget: more noise until 70% of it, then less and less.",
        make=_horizon,
        parameters=(
            Parameter(
                name="horizon",
                kind=str,
                meaning="How ρ of the rule horizon moves: measured, or start:until:end by examples; both by default",
                optional=True,
                label="{}",
                short="{}",
                plural="horizons",
            ),
            _COST,
        ),
        needs=("examples",),
        role="ours",
        budget_aware="horizon",
        colours=("#7a1f3d", "#a34a6b", "#5a2a3d"),
    ),
    RuleKind(
        name="gain-per-cost",
        label="Gain per cost",
        meaning="The size with the greatest expected gain per example, given how curved the loss is.",
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
        meaning="The norm test, called Competitor in the paper: m = tr Σ/(θ²·‖g‖²), whatever the learning rate.",
        make=rules.NormTest,
        parameters=(_theta(1.0, (0.6, 0.8, 1.0)),),
        role="rival",
        best_only=True,
        colours=("#e0992b", "#b8741a", "#f0c46c"),
    ),
    RuleKind(
        name="noise-scale",
        label="Noise scale",
        meaning="The gradient noise scale tr Σ/‖∇F‖².",
        make=rules.NoiseScale,
        role="rival",
        colours=("#8a8d1f", "#6b6e17", "#b4b75a"),
    ),
    RuleKind(
        name="inner-product-test",
        label="Inner product test",
        meaning="Batches so large that gradients point along the full one, with a given probability.",
        make=rules.InnerProductTest,
        parameters=(
            _theta(0.9, (0.9,)),
            Parameter(
                name="nu",
                kind=float,
                meaning="ν of the rule inner-product-test; the authors' is 5.84",
                optional=True,
                label="ν = {}",
                short="nu{}",
                plural="nus",
            ),
        ),
        role="rival",
        best_only=True,
        colours=("#c9622c", "#9d4a1f", "#e2996f"),
    ),
    *SCHEDULES,
    RuleKind(
        name="constant",
        label="Constant",
        meaning="One size throughout.",
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

PARAMETERS = tuple({parameter.name: parameter for kind in reversed(_KINDS) for parameter in kind.parameters}.values())
"""The parameters of all rules, each name once."""

PAPER_RULES = ("cabs", "norm-test", "constant")
"""What the paper compares, and a grid that names no rules."""


def rule_kind(name: str) -> RuleKind:
    """The rule of this name.

    Raises:
        UsageError: If there is none.
    """
    return named(name, RULES, "rule")
