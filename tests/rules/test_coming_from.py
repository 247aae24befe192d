"""What docs/coming-from.md gives for each schedule of bs-scheduler has the sizes that its formula says, by hand.

The table is read from the page. An epoch has a thousand examples, and sizes are those at the beginning of each.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from test_schedules import driven, sizes

from cabs import rules

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
E = 1000


def table() -> dict[str, str]:
    """From what is said on the left to the code on the right."""
    section = PAGE.read_text("utf-8").split("## bs-scheduler")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| `(.+)` \|$", section, re.MULTILINE)
    return {re.sub(r"`", "", left): code for left, code in rows}


CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    # 10 · (1 + k/2)
    "LambdaBS(f)": ({"f": lambda k: 1 + k / 2}, [10, 15, 20, 25, 30]),
    # 10 · f(0), · f(1), …: the first call multiplies too
    "MultiplicativeBS(f)": ({"f": lambda k: 2 if k < 3 else 1}, [20, 40, 80, 80, 80]),
    "StepBS(step_size, gamma)": ({"step_size": 3, "gamma": 2.0}, [10, 10, 10, 20, 20, 20, 40]),
    # a milestone that is there twice counts twice
    "MultiStepBS(milestones, gamma)": ({"milestones": [2, 5, 5], "gamma": 2.0}, [10, 10, 20, 20, 20, 80, 80]),
    "the same, written out": ({}, [10, 10, 20, 20, 20, 80, 80]),
    "ConstantBS(factor, milestone)": ({"factor": 5.0, "milestone": 3}, [50, 50, 50, 10, 10]),
    "LinearBS(start_factor, end_factor, milestone)": (
        {"start_factor": 6.0, "end_factor": 1.0, "milestone": 5},
        [60, 50, 40, 30, 20, 10, 10, 10],
    ),
    # 10 · 1.1^k: 12.1, 13.3, 14.6, 16.1, 17.7, 19.5, 21.4, 23.6
    "ExponentialBS(gamma)": ({"gamma": 1.1}, [10, 11, 12, 13, 15, 16, 18, 19, 21, 24]),
    # factors 2 − k/(k + 1) = (k + 2)/(k + 1): the product is (k + 2)/2, until the fourth
    "PolynomialBS(total_iters, power)": ({"total_iters": 5, "power": 1.0}, [10, 15, 20, 25, 30, 30, 30]),
    # 10 + 90 · (1 − cos(πk/5))/2, up and down again
    "CosineAnnealingBS(total_iters)": (
        {"total_iters": 5, "most": 100},
        [10, 19, 41, 69, 91, 100, 91, 69, 41, 19, 10, 19],
    ),
    "the same, up and no more": ({"total_iters": 5, "most": 100}, [10, 19, 41, 69, 91, 100, 100]),
    # the largest size has an epoch of its own before the restart
    "CosineAnnealingBSWithWarmRestarts(t_0)": (
        {"t_0": 5, "most": 100},
        [10, 19, 41, 69, 91, 100, 10, 19, 41, 69, 91, 100, 10],
    ),
    "the same with factor; t lists the t_0, t_0 * factor, … of the cycles to come": (
        {"t": [2, 4, 8], "most": 100},
        [10, 55, 100, 10, 23, 55, 87, 100, 10, 13, 23, 38, 55, 72, 87, 97, 100],
    ),
    "CyclicBS(step_size_down, step_size_up)": (
        {"b": 100, "least": 20, "step_size_down": 4, "step_size_up": 2},
        [100, 80, 60, 40, 20, 60, 100, 80, 60, 40, 20, 60, 100],
    ),
    # half as deep in each cycle
    'the same with mode="triangular2"; cycle is the line above': (
        {"b": 100, "least": 20, "step_size_down": 4, "step_size_up": 4},
        [100, 80, 60, 40, 20, 40, 60, 80, 100, 90, 80, 70, 60, 70, 80, 90, 100, 95],
    ),
    # depths 20, 40, 60, 80, 60 times 1/2, 1/4, 1/8, 1/16, 1/32
    'the same with mode="exp_range"': (
        {"b": 100, "least": 20, "step_size_down": 4, "step_size_up": 4, "gamma": 0.5},
        [100, 90, 90, 93, 95, 98],
    ),
    # 100 to 20 by a cosine in three, then to 500 in seven
    "OneCycleBS(total_steps, …); first of them are on the way down": (
        {"b": 100, "least": 20, "most": 500, "total_steps": 10, "first": 3},
        [100, 80, 40, 20, 44, 110, 207, 313, 410, 476, 500, 500],
    ),
    "SequentialBS([x, y], [milestone])": (
        {
            "x": rules.Steps({0: 100, 4 * E: 10}),
            "y": rules.Geometric(11, 1.1, E, stairs=True),
            "milestone": 5,
        },
        [100, 100, 100, 100, 10, 11, 12, 13, 15],
    ),
    # (1, 1, 2, 2, 4, 4, 8 …) · (1, 1, 1, 3, 3, …) · 10
    "ChainedBSScheduler([x, y])": (
        {"x": rules.Geometric(10, 2, 2 * E, stairs=True), "y": rules.Steps({0: 10, 3 * E: 30})},
        [10, 10, 20, 60, 120, 120, 240],
    ),
}


def made(row: str, names: dict[str, Any]) -> Any:
    scope = {**vars(rules), "prod": math.prod, "E": E, "b": 10, **names}
    if "cycle" in table()[row]:
        scope["cycle"] = made("CyclicBS(step_size_down, step_size_up)", names)
    return eval(table()[row], scope)


@pytest.mark.parametrize("row", CASES)
def test_counterparts_have_the_sizes_of_the_formula(row: str) -> None:
    names, expected = CASES[row]
    assert sizes(made(row, names), *(k * E for k in range(len(expected)))) == expected


def test_a_plateau_counts_as_theirs_does() -> None:
    """Best at the second epoch; grown at the 4th (two bad ones), 7th and 10th (one to cool down, then two bad ones)."""
    code = table()["IncreaseBSOnPlateau(factor, patience, cooldown)"].replace("validation_loss", "next(losses)")
    losses = iter([5, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3])
    names = {"E": E, "b": 10, "factor": 2.0, "patience": 1, "cooldown": 1, "losses": losses}
    rule = eval(code, {**vars(rules), **names})
    assert driven(rule, [1.0] * 12, every=E) == [10, 10, 10, 20, 20, 20, 40, 40, 40, 80, 80, 80]


def test_a_schedule_by_steps() -> None:
    """The clock counts steps, however many examples each had."""
    rule = eval(table()["any schedule, stepped after every batch"], {**vars(rules), "schedule": rules.Ramp(10, 50, 4)})
    assert rule.first_batch_size() == 10
    assert driven(rule, [1.0] * 5, every=7) == driven(rule, [1.0] * 5, every=5000) == [20, 30, 40, 50, 50]


def test_every_row_is_tried() -> None:
    others = {"IncreaseBSOnPlateau(factor, patience, cooldown)", "any schedule, stepped after every batch"}
    assert table().keys() == CASES.keys() | others


def test_one_size_an_epoch() -> None:
    x = rules.Ramp(10, 50, 4 * E)
    stairs = rules.Function(lambda n: x.at(n // E * E))
    assert sizes(stairs, 0, 999, 1000, 1999, 4000) == [10, 10, 20, 20, 50]


def test_a_rampup_of_megatron() -> None:
    """256, and 128 more after each sixth of the samples, until 1024."""
    code = PAGE.read_text("utf-8").split("start, increment")[1].split("\n\n")[0]
    scope: dict[str, Any] = {"rules": rules}
    exec("start, increment" + code, scope)
    assert sizes(scope["rampup"], 0, 9_999, 10_000, 59_999, 60_000) == [256, 256, 384, 896, 1024]
