"""For every coupling, the batch sizes of a loop over single examples with the optimizer's own state, to the integer."""

from __future__ import annotations

import copy

import pytest
from twin import KINDS, LEAST, Run, by_hand

STEPS = 300


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("name", KINDS)
def test_the_same_sizes_to_the_integer(name: str, groups: bool) -> None:
    expected = by_hand(KINDS[name], STEPS, groups)
    run = Run(KINDS[name], groups)
    assert [LEAST, *run.train(STEPS)] == expected
    assert len(set(expected)) > 5, "a trace that never moves shows nothing"


@pytest.mark.parametrize("name", KINDS)
def test_in_microbatches(name: str) -> None:
    expected = by_hand(KINDS[name], 60, groups=True)
    assert [LEAST, *Run(KINDS[name], groups=True, pieces=4).train(60)] == expected


@pytest.mark.parametrize("order", ["model optimizer scheduler loader", "scheduler loader model optimizer"])
@pytest.mark.parametrize("name", KINDS)
def test_after_a_resume(name: str, order: str) -> None:
    whole = Run(KINDS[name], groups=True)
    expected = whole.train(60)
    first = Run(KINDS[name], groups=True)
    sizes = first.train(33)
    second = Run(KINDS[name], groups=True)
    second.load(copy.deepcopy(first.state()), order.split())
    assert sizes + second.train(27) == expected
