"""Several processes make the run of one process: the same sizes, losses, variances and weights."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import training
from gloo import Processes
from training import Setting


def drawn(seed: int) -> Setting:
    """A setting at random, the same at every run."""
    draw = random.Random(seed)
    microbatch_size = draw.choice([None, 1, 2, 5, 16])
    return Setting(
        microbatch_size=microbatch_size,
        length=draw.choice([23, 60]),
        stream=draw.random() < 0.6,
        least=draw.choice([2, 3, 8]),
        weighs_itself=microbatch_size is None and draw.random() < 0.6,
        groups=draw.random() < 0.3,
        options={"measure_every": draw.choice([1, 2, 3]), "estimator": draw.choice(["exact", "paper"])},
    )


SETTINGS = {
    "plain loop": Setting(weighs_itself=True),
    "odd sizes, short epochs": Setting(weighs_itself=True, length=23, stream=False, least=2, steps=14),
    "in microbatches": Setting(microbatch_size=3),
    "in microbatches of one": Setting(microbatch_size=1, steps=4),
    "clipped, scaled, held": Setting(microbatch_size=4, clip=0.1, scaler=True, options={"measure_every": 2}),
    "scaled plain loop": Setting(weighs_itself=True, scaler=True, clip=0.1),
    "two learning rates": Setting(groups=True, weighs_itself=True),
    "constant": Setting(rule="constant", steps=4),
    "momentum": Setting(optimizer="momentum", weighs_itself=True),
    "AdamW": Setting(optimizer="adamw", weighs_itself=True),
    "AdamW in microbatches, two learning rates": Setting(optimizer="adamw", microbatch_size=3, groups=True),
    "RMSprop, clipped, scaled, held": Setting(
        optimizer="rmsprop", microbatch_size=4, clip=0.1, scaler=True, options={"measure_every": 2}
    ),
    "Adagrad, paper": Setting(optimizer="adagrad", options={"estimator": "paper"}),
    **{f"rule {name}": Setting(rule=name, microbatch_size=4) for name in training.RULES if name != "measured"},
    "compiled": Setting(weighs_itself=True, compiled="module", options={"max_examples": 40}),
    "compiled, in microbatches": Setting(microbatch_size=4, compiled="module", options={"max_examples": 40}),
    "compiled as a whole": Setting(weighs_itself=True, compiled="whole", options={"max_examples": 40}),
    "even shapes": Setting(weighs_itself=True, options={"multiple_of": 6}),
    **{f"drawn {seed}": drawn(seed) for seed in range(6)},
}


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, count) for name in SETTINGS for count in (2, 3) if count == 2 or not name.startswith("rule ")],
)
def test_processes_make_the_run_of_one_process(processes: Processes, name: str, count: int) -> None:
    setting = SETTINGS[name]
    alone = training.train(setting)
    outcomes = processes(training.train, count, setting)
    for outcome in outcomes:
        assert outcome.sizes == alone.sizes
        numbers, expected = torch.tensor(outcome.numbers), torch.tensor(alone.numbers)
        torch.testing.assert_close(numbers, expected, rtol=1e-8, atol=1e-10, equal_nan=True)
        torch.testing.assert_close(outcome.weights, alone.weights, rtol=1e-8, atol=1e-10)
        first = torch.tensor(outcomes[0].numbers)
        torch.testing.assert_close(numbers, first, rtol=0, atol=0, equal_nan=True, msg="ranks agree to the last bit")


def test_the_sizes_move_and_are_odd_in_these_settings() -> None:
    sizes = {size for setting in SETTINGS.values() for size in training.train(replace(setting, steps=6)).sizes}
    assert len(sizes) > 5
    assert any(size % 2 for size in sizes)
    assert any(size % 3 for size in sizes)


def test_processes_agree_on_what_a_step_costs(processes: Processes) -> None:
    """Times differ between processes; sizes and costs must not."""
    setting = Setting(rule="measured", steps=60, weighs_itself=True)
    first, second = processes(training.train, 2, setting)
    assert first.sizes == second.sizes
    assert first.numbers == second.numbers
    assert len(set(first.sizes)) > 2, "other sizes are tried"


def test_gradients_of_processes_are_compared(processes: Processes) -> None:
    """With several processes the estimator microbatch compares theirs, and needs no others."""
    setting = Setting(weighs_itself=True, options={"estimator": "microbatch"}, least=12)
    first, second = processes(training.train, 2, setting)
    assert first.numbers == second.numbers
    # As if the shares were the microbatches of one process: unbiased, so only of the same kind as the exact one.
    exact = training.train(replace(setting, options={}))
    ratio = first.numbers[0][1] / exact.numbers[0][1]
    assert 0.1 < ratio < 10


def test_a_penalty_is_refused(processes: Processes) -> None:
    assert all("weight_decay" in message for message in processes(training.penalized, 2))


def test_a_second_scheduler_takes_over(processes: Processes) -> None:
    first, second, after = processes(training.second_scheduler, 2)[0]
    assert first == pytest.approx(second, rel=1e-12)
    assert after != pytest.approx(first, rel=1e-6), "closed: the plain mean of shares of 3 and 2 examples"


def test_monitoring_leaves_loaders_and_training_alone(processes: Processes) -> None:
    """Each process keeps its own loader, size, order and examples, and the weights are those of a run without."""
    plain, watched = processes(training.monitored, 2, False), processes(training.monitored, 2, True)
    for rank in range(2):
        sizes, loader, examples, weights, counted = watched[rank]
        assert sizes == [5 + rank] * 4
        assert loader == [5 + rank, 1, -(-30 // (5 + rank))]
        assert (sizes, loader, examples) == plain[rank][:3]
        assert weights == pytest.approx(plain[rank][3], rel=1e-9)
        assert counted == [11] * 4, "of both processes"
    assert watched[0][2] != watched[1][2]


def test_a_hook_of_the_users_is_not_replaced(processes: Processes) -> None:
    assert all("communication hook of its own" in message for message in processes(training.foreign_hook, 2))


def test_auto_agrees_on_a_size(processes: Processes) -> None:
    (first, loss), (second, other) = processes(training.found_size, 2)
    assert first == second == 64
    assert loss == other
