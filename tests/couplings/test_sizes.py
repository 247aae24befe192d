"""For every coupling, the batch sizes of a loop over single examples with the optimizer's own state, to the integer."""

from __future__ import annotations

import copy
import functools

import pytest
from twin import KINDS, LEAST, Run, by_hand

STEPS = 300


@functools.lru_cache(maxsize=len(KINDS))
def expected(name: str) -> list[int]:
    """Sizes with two parameter groups."""
    return by_hand(KINDS[name], STEPS, groups=True)


@pytest.mark.parametrize("name", KINDS)
def test_the_same_sizes_to_the_integer(name: str) -> None:
    assert [LEAST, *Run(KINDS[name], groups=True).train(STEPS)] == expected(name)
    assert len(set(expected(name))) > 5, "a trace that never moves shows nothing"


@pytest.mark.parametrize("name", KINDS)
def test_one_group(name: str) -> None:
    assert [LEAST, *Run(KINDS[name]).train(40)] == by_hand(KINDS[name], 40, groups=False)


@pytest.mark.parametrize("name", KINDS)
def test_in_microbatches(name: str) -> None:
    assert [LEAST, *Run(KINDS[name], groups=True, microbatch_size=4).train(60)] == expected(name)[:61]


@pytest.mark.parametrize("name", KINDS)
def test_after_a_resume(name: str) -> None:
    # In either order: a scheduler does not mind that the optimizer's state is loaded after its own.
    order = ["model", "optimizer", "scheduler", "loader"]
    run = Run(KINDS[name], groups=True)
    sizes = run.train(33)
    for turned in (order, order[2:] + order[:2]):
        state = copy.deepcopy(run.state())
        run = Run(KINDS[name], groups=True)
        run.load(state, turned)
        sizes += run.train(20)
    assert [LEAST, *sizes] == expected(name)[:74]
