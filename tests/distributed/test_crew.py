"""Several processes make a training run of one process, whatever its number of processes was before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import crewed
from cabs.experiments.problems.augment import Share, Standardised
from cabs.experiments.runs.crew import Crew
from cabs.experiments.runs.metrics import read_metrics
from gloo import Processes


def same_runs(one: Path, other: Path) -> None:
    """The metrics are the same: sizes and counts all the way, what is measured to rounding."""
    rows, others = (list(read_metrics(path)) for path in (one, other))
    assert [row.get("batch_size") for row in rows] == [row.get("batch_size") for row in others]
    for row, twin in zip(rows, others, strict=True):
        assert row.keys() == twin.keys()
        for name in row.keys() - {"seconds"}:
            assert twin[name] == (None if row[name] is None else pytest.approx(row[name], rel=1e-4)), name


def same_states(state: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("examples", "step", "loader"):
        assert other[name] == state[name]
    assert torch.equal(other["random"]["augmentation"], state["random"]["augmentation"])
    assert other["network"].keys() == state["network"].keys()
    for name, weights in state["network"].items():
        torch.testing.assert_close(other["network"][name], weights, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "given", [{}, {"rule": "constant", "batch_size": 2, "examples": 60}, {"weight_decay": 0.01, "examples": 250}]
)
def test_any_number_of_them_makes_the_same_run(processes: Processes, tmp_path: Path, given: dict[str, Any]) -> None:
    settings = crewed.config(**given)
    end, state = crewed.train(tmp_path / "1", settings)
    assert end == "finished"
    if not given:
        assert len({row["batch_size"] for row in read_metrics(tmp_path / "1") if "loss" in row}) > 5
    for count in (2, 3):
        for end, other in processes(crewed.train, count, tmp_path / f"{count}", settings):
            assert end == "finished"
            same_states(state, other)
        same_runs(tmp_path / "1", tmp_path / f"{count}")


def test_a_run_goes_on_with_another_number_of_processes(processes: Processes, tmp_path: Path) -> None:
    settings = crewed.config()
    _, state = crewed.train(tmp_path / "whole", settings)
    run = tmp_path / "run"
    assert crewed.train(run, settings, until=3)[0] == "stopped"
    for count, until in ((2, 8), (3, 13)):
        for end, other in processes(crewed.train, count, run, settings, until):
            assert (end, other["step"]) == ("stopped", until)
    end, other = crewed.train(run, settings)
    assert end == "finished"
    same_states(state, other)
    same_runs(tmp_path / "whole", run)


def test_all_notice_that_the_run_diverges(processes: Processes, tmp_path: Path) -> None:
    settings = crewed.config(rule="constant", batch_size=3, lr=1e12, eval_every=10_000)
    ends = [end for end, _ in processes(crewed.train, 2, tmp_path / "run", settings)]
    assert "diverged" in ends[0]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("failing", "heard"),
    [
        ([], ["nothing"] * 3),
        ([0, 1, 2], ["no good in 0", "no good in 1", "no good in 2"]),
        ([2], ["process 2: no good in 2"] * 3),
        ([0], ["no good in 0"] * 3),
    ],
)
def test_an_error_of_one_is_everybodys(processes: Processes, failing: list[int], heard: list[str]) -> None:
    code = 2 if failing else 0
    assert processes(crewed.complaint, 3, failing) == [(message, code) for message in heard]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("first", "examples"), [(0, 7), (4, 7), (11, 2), (5, 1)])
def test_each_example_is_distorted_as_in_one_process(size: int, first: int, examples: int) -> None:
    images = torch.randint(0, 256, (examples, 3, 32, 32), dtype=torch.uint8)
    inputs = Standardised(crop=24, distort=True)
    generator = torch.Generator().manual_seed(3)
    whole = inputs.train(images, generator)
    for rank in range(size):
        mine = [row for row in range(examples) if (first + row) % size == rank]
        again = torch.Generator().manual_seed(3)
        share = Share.of_rank(rank, size, first, examples)
        result = inputs.train(images[mine or [0]], again, share)
        assert torch.equal(again.get_state(), generator.get_state())
        assert torch.equal(result, whole[mine or [0]])


def test_threads_are_shared_out() -> None:
    assert Crew().threads(4) == 4
    assert Crew(1, 4, 1, 2).threads(5) == 2
    assert Crew(1, 4, 1, 4).threads(2) == 1


def test_other_errors_are_not_taken_for_a_lost_worker() -> None:
    with pytest.raises(RuntimeError, match="shapes"), Crew(0, 2).in_contact():
        raise RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="Connection closed"), Crew().in_contact():
        raise RuntimeError("Connection closed by peer")
