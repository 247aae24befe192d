"""One size from given numbers, with reasons that are true."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cabs.probe.intervals import Interval
from cabs.probe.noise import Noise
from cabs.probe.recommending import per_second
from cabs.probe.report import Report
from cabs.probe.timing import Fits, Times, straight
from cabs.rules.adaptive import per_cost

LINE = (0.004, 0.0001)


def times(line: tuple[float, float] | None = LINE, sizes: tuple[int, ...] = (2, 16, 128, 1024)) -> Times:
    c0, c1 = line or (0.001, 0.0)
    return Times(tuple((m, c0 + c1 * m) for m in sizes), line, 5, sizes[-1])


def made(cabs: float | None = 50.0, scale: float = 100.0, **change: Any) -> Report:
    def about(x: float) -> Interval:
        return Interval(x, 0.9 * x, 1.1 * x)

    size = None if cabs is None else about(cabs)
    noise = Noise(
        examples=1024,
        batches=32,
        loss=about(1.0),
        trace=about(10.0),
        noise_scale=about(scale),
        coupled=size,
        size=size,
        penalized=False,
    )
    given = {
        "optimizer": "SGD",
        "learning_rates": (0.1,),
        "batch_size": 32,
        "min_batch_size": 16,
        "max_batch_size": 2048,
        "dataset_size": 60_000,
        "after": 0,
        "filled": 0,
        "fits": Fits(1024, "max_batch_size"),
        "times": times(),
        "noise": noise,
        "loss_floor": 0.0,
        "estimator": "exact",
        "training": True,
    }
    return Report(**{**given, **change})


@pytest.mark.parametrize("cabs", [20.0, 50.0, 500.0])
def test_it_is_the_size_with_the_most_gain_per_second(cabs: float) -> None:
    report = made(cabs)
    best = max(range(16, 2049), key=lambda m: per_second(m, cabs, LINE))
    assert report.cabs_batch_size_per_second == pytest.approx(per_cost(cabs, *LINE))
    assert abs(report.recommendation.size - best) <= 1
    good = [m for m in range(16, 2049) if per_second(m, cabs, LINE) >= 0.9 * per_second(best, cabs, LINE)]
    assert report.recommendation.near == pytest.approx((good[0], good[-1]), abs=1)


def test_bounds_are_kept_and_named() -> None:
    small, large = made(0.2, times=times((0.0, 0.1))), made(1e6)
    assert small.recommendation.size == 16
    assert "min_batch_size" in str(small)
    assert large.recommendation.size == 2048
    assert "2,048 is the most that max_batch_size allows" in str(large)
    few = made(1e6, dataset_size=700)
    assert few.recommendation.size == 700
    assert "the dataset allows" in str(few)


def test_what_does_not_fit_is_made_of_microbatches() -> None:
    """A microbatch pays c₀ again, so that only the gain per example asks for more than fits."""
    memory = Fits(64, "memory")
    large, middling = made(500.0, fits=memory), made(50.0, fits=memory)
    assert large.recommendation.size == 500
    assert "max_microbatch_size=64" in str(large)
    assert middling.cabs_batch_size_per_second > 64
    assert middling.recommendation.size == 64
    assert "64 is the most that fits at a time." in str(middling)


def test_where_time_does_not_grow_examples_are_free() -> None:
    report = made(50.0, times=times(None))
    assert report.recommendation.size == 1024
    assert report.recommendation.near[0] < 1024
    assert report.recommendation.near[1] == 1024
    assert "Steps of 2 to 1,024 examples take the same time" in str(report)


def test_where_times_make_no_sense_examples_count() -> None:
    report = made(50.0, times=Times(((2, 0.1), (16, 0.01), (128, 0.1)), None, 5, 16))
    assert report.recommendation.size == 50
    assert "could not be told" in str(report)


def test_large_batches_that_are_slower_are_noted() -> None:
    measured = ((2, 0.0042), (16, 0.0056), (64, 0.0104), (512, 0.2))
    assert straight(measured) == 64
    text = str(made(times=Times(measured, LINE, 5, 64)))
    assert "Throughput was greatest at m = 64; at 512 it was 42% of that" in text
    assert "6,154 examples/s  90% of it from m = 50" in text
    assert "within 0.1%, m = 2 to 64" in text


def test_a_line_that_is_none_is_noted() -> None:
    bent = Times(((2, 0.004), (64, 0.006), (512, 0.05)), (0.0035, 0.0001), 5, 512)
    assert "no straight line" in str(made(times=bent))


@pytest.mark.parametrize(
    ("scale", "words"),
    [(5.0, "above the noise scale"), (1e4, "below the noise scale"), (65.0, "about the noise scale")],
)
def test_the_noise_scale_has_its_place(scale: float, words: str) -> None:
    assert words in str(made(50.0, scale))


@pytest.mark.parametrize(
    ("present", "words"),
    [
        (20, "At your m = 20 a step gains nothing"),
        (32, "Your m = 32 gains"),
        (100, "Your m = 100 is as good"),
        (1500, "Your m = 1,500 gains"),
    ],
)
def test_the_present_size_has_its_place(present: int, words: str) -> None:
    assert words in str(made(50.0, batch_size=present))


@pytest.mark.parametrize(
    ("present", "words"), [(4, "more than the quarter"), (50, "about the quarter"), (900, "less than the quarter")]
)
def test_the_noise_share_is_judged(present: int, words: str) -> None:
    assert words in str(made(50.0, batch_size=present))


def test_without_a_size_it_says_so() -> None:
    report = made(None)
    assert report.recommendation.size is None
    assert "no P for all of its parameters" in str(report)


def test_what_is_infinite_is_written_so() -> None:
    noise = made().noise
    endless = made(noise=Noise(**{**vars(noise), "noise_scale": Interval(math.inf, 400.0, math.inf)}))
    assert "above 400" in str(endless)
    assert endless.to_dict()["noise"]["noise_scale"] == {"value": None, "low": 400.0, "high": None}
