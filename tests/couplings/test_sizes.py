"""For every coupling, the batch sizes of a loop over single examples with the optimizer's own state, to the integer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from twin import KINDS, LEAST, Run, by_hand

from gloo import Processes

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
    assert [LEAST, *Run(KINDS[name], groups=True, microbatch_size=4).train(STEPS)] == expected(name)


@pytest.mark.parametrize("name", KINDS)
def test_after_a_resume(name: str) -> None:
    # In either order: a scheduler does not mind that the optimizer's state is loaded after its own.
    order = ["model", "optimizer", "scheduler", "loader"]
    run = Run(KINDS[name], groups=True)
    sizes = run.train(33)
    for turned, steps in ((order, 20), (order[2:] + order[:2], STEPS - 53)):
        state = copy.deepcopy(run.state())
        run = Run(KINDS[name], groups=True)
        run.load(state, turned)
        sizes += run.train(steps)
    assert [LEAST, *sizes] == expected(name)


def shared(name: str, microbatch_size: int | None) -> list[int]:
    """The sizes of processes that share every batch, resumed on the way."""
    wrap = torch.nn.parallel.DistributedDataParallel
    run = Run(KINDS[name], groups=True, microbatch_size=microbatch_size, wrap=wrap)
    sizes = run.train(70)
    state = copy.deepcopy(run.state())
    run = Run(KINDS[name], groups=True, microbatch_size=microbatch_size, wrap=wrap)
    run.load(state, list(state))
    return sizes + run.train(STEPS - 70)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    some = Processes(2)
    yield some
    some.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_with_two_processes(processes: Processes, name: str) -> None:
    microbatch_size = None if list(KINDS).index(name) % 2 else 3
    for sizes in processes(shared, 2, name, microbatch_size):
        assert [LEAST, *sizes] == expected(name)
