"""Clocks: the same at the same examples, whatever the sizes."""

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel

from cabs.clocks import ByExamples, average_by_examples, half_life, keep_half_lives
from cabs.rules import DecayToBatch

Make = Callable[[Optimizer], LRScheduler]

SCHEDULERS: dict[str, Make] = {
    "cosine": lambda o: CosineAnnealingLR(o, 40),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 7, 2),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=5),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "steps": lambda o: MultiStepLR(o, [3, 11], 0.5),
    "one cycle": lambda o: OneCycleLR(o, 0.3, 41),
    "polynomial": lambda o: PolynomialLR(o, 40, 2),
    "warm-up": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1, 10), CosineAnnealingLR(o, 30)], [10]),
}


def clock_of(make: Make, every: int = 1) -> ByExamples:
    clock = ByExamples(make(optimizer()), every)
    clock.scheduler.optimizer.step()  # as torch wants it
    return clock


def optimizer(kind: Callable[..., Optimizer] = SGD, **options: object) -> Optimizer:
    weight = torch.zeros(3, requires_grad=True)
    weight.grad = torch.ones(3)
    made = kind([weight], lr=0.1, **options)
    made.step()
    return made


def rates(clock: ByExamples, sizes: list[int]) -> dict[int, float]:
    """The learning rate by the examples seen."""
    result = {}
    for total in itertools.accumulate(sizes):
        clock.step(total)
        result[total] = clock.scheduler.optimizer.param_groups[0]["lr"]
        assert clock.get_last_lr() == [result[total]]
    return result


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_rates_depend_on_examples_alone(make: Make) -> None:
    every = 25
    plain = make(optimizer())
    expected = [plain.get_last_lr()[0]]
    for _ in range(40):
        plain.optimizer.step()
        plain.step()
        expected.append(plain.get_last_lr()[0])
    for sizes in ([1000], [25] * 40, [10] * 100, [7, 300, 1, 1, 500, 191], [999, 1]):
        clock = clock_of(make, every)
        for total, rate in rates(clock, sizes).items():
            assert rate == pytest.approx(expected[total // every], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_clock_resumes(make: Make) -> None:
    through = clock_of(make, 25)
    before = clock_of(make, 25)
    rates(through, [130, 60])
    rates(before, [130, 60])
    state, groups = copy.deepcopy(before.state_dict()), copy.deepcopy(before.scheduler.optimizer.state_dict())
    after = clock_of(make, 25)
    after.scheduler.optimizer.load_state_dict(groups)
    after.load_state_dict(state)
    for total in (195, 200, 400, 810):
        through.step(total)
        after.step(total)
        assert after.get_last_lr() == through.get_last_lr()
    with pytest.raises(ValueError, match="25 examples a step"):
        clock_of(make, 10).load_state_dict(state)


def test_a_plateau_counts_examples() -> None:
    clock = clock_of(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=2), 100)
    for total in (150, 199, 320, 410, 430):
        clock.step(total, 1.0)
    assert clock.get_last_lr() == [0.05]


def test_clocks_refuse_nonsense() -> None:
    clock = clock_of(SCHEDULERS["exponential"], 10)
    clock.step(50)
    with pytest.raises(ValueError, match="fewer than the 50 before"):
        clock.step(49)
    with pytest.raises(ValueError, match="every is 0"):
        ByExamples(ExponentialLR(optimizer(), 0.9), 0)
    with pytest.raises(TypeError, match="no learning-rate scheduler"):
        ByExamples(object())  # type: ignore[arg-type]


def test_decay_to_batch_leaves_the_root_to_the_learning_rate() -> None:
    rule = DecayToBatch(lambda n: 0.5 ** (n // 100), 16, optimizer="adam")
    clock = clock_of(lambda o: LambdaLR(o, rule.learning_rate_factor))
    assert rates(clock, [99, 1, 100, 50]) == pytest.approx({99: 0.1, 100: 0.1 / math.sqrt(2), 200: 0.05, 250: 0.05})


def test_half_lives() -> None:
    assert half_life(0.9, 64, 64) == 0.9
    assert half_life(0.9, 128, 64) == pytest.approx(0.81)
    assert half_life(0.81, 32, 64) == pytest.approx(0.9)
    assert half_life(0.0, 32, 64) == 0
    for beta, m, reference in ((1.1, 1, 1), (-0.1, 1, 1), (0.9, 0, 1), (0.9, 1, 0)):
        with pytest.raises(ValueError):
            half_life(beta, m, reference)


@pytest.mark.parametrize(
    ("kind", "options", "name", "expected"),
    [
        (SGD, {"momentum": 0.9}, "momentum", 0.81),
        (RMSprop, {"alpha": 0.99}, "alpha", 0.9801),
        (RMSprop, {"momentum": 0.5}, "momentum", 0.25),
        (Adadelta, {"rho": 0.9}, "rho", 0.81),
        (Adam, {"betas": (0.9, 0.99)}, "betas", (0.81, 0.9801)),
        (AdamW, {"betas": (0.0, 0.5)}, "betas", (0.0, 0.25)),
    ],
)
def test_optimizers_keep_their_half_lives(
    kind: Callable[..., Optimizer], options: dict[str, object], name: str, expected: object
) -> None:
    made = optimizer(kind, **options)
    set_for = keep_half_lives(made, 32)
    assert made.param_groups[0][name] == pytest.approx(options[name])
    for m in (7, 100, 64):
        set_for(m)
    assert made.param_groups[0][name] == pytest.approx(expected)  # no drift: always from the first
    made.step()
    resumed = optimizer(kind, **options)
    resumed.load_state_dict(made.state_dict())
    keep_half_lives(resumed, 32)
    assert resumed.param_groups[0][name] == pytest.approx(options[name])


def test_momentum_forgets_by_examples() -> None:
    """What is left of a gradient after 640 examples is the same in steps of 32, of 64, and mixed."""
    left = []
    for sizes in ([32] * 20, [64] * 10, [32, 96, 256, 64, 128, 64]):
        weight = torch.zeros(1, requires_grad=True)
        made = SGD([weight], lr=1.0, momentum=0.9)
        set_for = keep_half_lives(made, 32)
        weight.grad = torch.ones(1)
        made.step()
        weight.grad = torch.zeros(1)
        for m in sizes:
            set_for(m)
            made.step()
        left.append(float(made.state[weight]["momentum_buffer"]))
    assert left == pytest.approx([0.9**20] * 3, rel=1e-5)


def test_nothing_to_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="SGD keeps no averages"):
        keep_half_lives(optimizer(), 32)
    with pytest.raises(ValueError, match="reference batch size is 0"):
        keep_half_lives(optimizer(Adam), 0)


def test_weights_are_averaged_by_examples() -> None:
    """The average of weights that stand at 1 after having been 0: 1 − β^(examples / m_ref)."""
    for sizes in ([10] * 8, [20] * 4, [40, 10, 30]):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for tensor in model.state_dict().values():
            tensor.zero_()
        size = [0]
        update = average_by_examples(0.9, 10, lambda size=size: size[0])
        average = AveragedModel(model, multi_avg_fn=update, use_buffers=True)
        average.update_parameters(model)
        for tensor in model.state_dict().values():
            tensor.fill_(1)
        for size[0] in sizes:
            average.update_parameters(model)
        for name, tensor in average.module.state_dict().items():
            expected = 1.0 if name.endswith("num_batches_tracked") else 1 - 0.9**8
            assert torch.allclose(tensor.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5), name
    with pytest.raises(ValueError, match="beta is 2"):
        average_by_examples(2.0, 10, lambda: 1)
