"""A model in shards makes the run of one process."""

from __future__ import annotations

import pytest
import torch

import sharded
from gloo import Processes
from sharded import Setting

SETTINGS = {
    "whole batches": Setting(),
    "in microbatches": Setting(microbatch_size=2),
    "parameters kept whole": Setting(reshard=False, microbatch_size=3),
    "clipped, held": Setting(clip=0.05, options={"measure_every": 2}),
    "AdamW": Setting(optimizer="adamw"),
    "AdamW in microbatches, clipped": Setting(optimizer="adamw", microbatch_size=2, clip=0.05, reshard=False),
    "Adagrad": Setting(optimizer="adagrad", least=5),
    "paper": Setting(least=5, options={"estimator": "paper"}),
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_shards_make_the_run_of_one_process(processes: Processes, name: str, count: int) -> None:
    setting = SETTINGS[name]
    sizes, numbers, weights = sharded.train(setting)
    outcomes = processes(sharded.train, count, setting)
    rtol = 1e-8
    for their_sizes, their_numbers, their_weights in outcomes:
        assert their_sizes == sizes
        close = {"rtol": rtol, "atol": rtol / 100, "equal_nan": True}
        torch.testing.assert_close(torch.tensor(their_numbers), torch.tensor(numbers), **close)
        # The bias of keys has a gradient of nothing but rounding, of which these make a step.
        atol = rtol / 100 if setting.optimizer == "sgd" else 1e-7
        torch.testing.assert_close(their_weights, weights, rtol=rtol, atol=atol)
        torch.testing.assert_close(
            torch.tensor(their_numbers), torch.tensor(outcomes[0][1]), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("hidden", "cannot be seen"),
        ("penalty", "weight_decay"),
        ("plain", "call scheduler.backward"),
        ("estimator", "estimator='exact'"),
        ("fine", "nothing"),
    ],
)
def test_what_will_not_do_is_refused(processes: Processes, kind: str, message: str) -> None:
    assert all(message in answer for answer in processes(sharded.complaint, 2, kind))


def test_auto_agrees_on_a_size(processes: Processes) -> None:
    assert processes(sharded.found_size, 2) == [32, 32]


def test_the_sizes_move_in_these_settings() -> None:
    assert len(set(sharded.train(SETTINGS["whole batches"])[0])) > 1
