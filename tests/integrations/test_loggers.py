"""The numbers of steps in the logs that people look at."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, rules
from cabs.integrations.loggers import TensorBoard, log_to, scalars
from cabs.scheduler import Step

NAMES = {
    "cabs/batch_size",
    "cabs/raw_batch_size",
    "cabs/variance",
    "cabs/noise_share",
    "cabs/noise_scale",
    "cabs/loss_average",
    "cabs/examples",
    "cabs/clipped",
}


def train(steps: int, rule: rules.Rule | None = None, optimizer: Any = torch.optim.SGD) -> list[Step]:
    """The records of some steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    dataset = TensorDataset(torch.randn(100, 5), torch.randn(100, 1))
    loader = AdaptiveLoader(dataset, batch_size=4, seed=0, stream=True)
    step_with = optimizer(model.parameters(), lr=0.1)
    if rule is None:
        scheduler: BatchSizeScheduler = CABS(model, step_with, loader, min_batch_size=4, max_batch_size=50)
    else:
        scheduler = BatchSizeScheduler(model, step_with, loader, rule, min_batch_size=4)
    records = []
    for (inputs, targets), _ in zip(loader, range(steps), strict=False):
        loss = (model(inputs) - targets).square().mean()
        step_with.zero_grad()
        loss.backward()
        step_with.step()
        scheduler.step(loss)
        assert scheduler.last is not None
        records.append(scheduler.last)
    scheduler.close()
    return records


def test_scalars_are_those_of_the_step() -> None:
    (*_, last) = train(5)
    numbers = scalars(last)
    assert set(numbers) <= NAMES
    assert set(numbers) >= NAMES - {"cabs/noise_scale"}  # infinite at times
    assert all(type(number) is float for number in numbers.values())
    assert numbers["cabs/batch_size"] == last.batch_size
    assert numbers["cabs/examples"] == last.examples_total > last.examples
    assert numbers["cabs/variance"] == last.variance
    assert numbers["cabs/noise_share"] == last.noise_share


def test_every_name_is_there() -> None:
    (last,) = train(1)
    assert set(scalars(replace(last, noise_scale=3.0))) == NAMES


@pytest.mark.parametrize(("bound", "number"), [("min", -1.0), (None, 0.0), ("max", 1.0)])
def test_which_bound_clips(bound: Any, number: float) -> None:
    (last,) = train(1)
    assert scalars(replace(last, clipped=bound))["cabs/clipped"] == number


def test_what_is_not_known_is_left_out() -> None:
    (schedule_only,) = train(1, rules.Constant(8))
    assert set(scalars(schedule_only)) == {
        "cabs/batch_size", "cabs/raw_batch_size", "cabs/loss_average", "cabs/examples", "cabs/clipped"
    }  # fmt: skip
    (before_p_is_known,) = train(1, optimizer=torch.optim.AdamW)
    assert math.isnan(before_p_is_known.variance)
    assert "cabs/variance" not in scalars(before_p_is_known)
    assert "cabs/noise_scale" not in scalars(replace(schedule_only, noise_scale=math.inf))


def test_a_scheduler_before_its_first_step_is_refused() -> None:
    with pytest.raises(TypeError, match=r"scheduler.last after scheduler.step\(loss\), not None"):
        scalars(None)  # type: ignore[arg-type]


def test_log_to_a_function_with_a_step() -> None:
    seen: list[tuple[dict[str, float], int]] = []

    def log_metrics(metrics: dict[str, float], step: int) -> None:  # as mlflow's and wandb's
        seen.append((metrics, step))

    records = train(7)
    log = log_to(log_metrics, every=3)
    for record in records:
        log(record)
    assert seen == [(scalars(record), record.examples_total) for record in records[::3]]


def test_log_to_a_function_without_a_step() -> None:
    seen: list[dict[str, float]] = []
    (record,) = train(1)
    log_to(seen.append, step=None)(record)
    assert seen == [scalars(record)]
    assert seen[0]["cabs/examples"] == record.examples_total


def test_log_to_refuses_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="no function that takes a dict"):
        log_to({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every is 0"):
        log_to(print, every=0)


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory))
    read.Reload()
    return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_scalars_against_examples(tmp_path: Path, own: bool) -> None:
    from torch.utils.tensorboard import SummaryWriter

    records = train(6)
    writer = tmp_path if own else SummaryWriter(str(tmp_path))
    with TensorBoard(writer) as log:
        for record in records:
            log(record)
    found = events(tmp_path)
    sizes = [(record.examples_total, float(record.batch_size)) for record in records]
    assert found["cabs/batch_size"] == sizes
    assert [step for step, _ in found["cabs/variance"]] == [step for step, _ in sizes]
    if not own:
        writer.add_scalar("mine", 1.0)  # it is still open
        writer.close()


def test_tensorboard_refuses_what_it_cannot_write_to() -> None:
    with pytest.raises(TypeError, match="neither a directory nor"):
        TensorBoard(3)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_a_missing_package_says_what_installs_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "from cabs.integrations.loggers import TensorBoard\n"
        "try: TensorBoard('runs')\n"
        "except ImportError as error: print(error)"
    )
    assert run(code) == (
        'cabs.integrations.loggers needs tensorboard, which is not installed: pip install "torch-cabs[loggers]"\n'
    )


def test_nothing_is_imported_unless_used() -> None:
    code = (
        "import sys, cabs, cabs.integrations.loggers\n"
        "print(sorted({'tensorboard', 'wandb', 'mlflow', 'lightning', 'pytorch_lightning'} & set(sys.modules)))"
    )
    assert run(code) == "[]\n"
