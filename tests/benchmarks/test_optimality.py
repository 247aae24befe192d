"""Whether the benchmark of the best size finds the best size, where it is known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

import optimality
import optimality_report


def test_a_control_of_known_expectation_narrows_the_error_and_keeps_the_mean() -> None:
    chance = random.Random(0)
    luck = [chance.gauss(3, 1) for _ in range(400)]
    found = [2 * x + chance.gauss(0, 0.1) for x in luck]
    mean, error = optimality.controlled(found, luck, 3.0)
    assert error < 0.01  # 0.1 without it
    assert abs(mean - 6.0) < 4 * error


def test_the_best_size_of_a_known_curve() -> None:
    """A gain of A - B/m has its greatest value per example at 2B/A."""
    curve = [(m, (1 - 40 / m) / m, 1e-4) for m in (16.0, 32.0, 64.0, 128.0, 256.0)]
    best, height = optimality_report.best(curve)
    assert best == pytest.approx(80)
    assert height == pytest.approx((1 - 40 / 80) / 80, rel=0.1)
    low, high = optimality_report.interval(curve)
    assert 50 < low < best < high < 130
    part, _ = optimality_report.share(curve, 80.0)
    assert 0.85 < part <= 1.0
    assert optimality_report.share(curve, 20.0)[0] < 0
    assert math.isnan(optimality_report.share(curve, 1.0)[0])
    assert optimality_report.best(curve[3:])[0] == 128  # at the end of the sizes


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_it_measures_draws_and_goes_on(tmp_path: Path, optimizer: str) -> None:
    words = ["digits", str(tmp_path), "--optimizer", optimizer, "--lrs", "0.01", "--sizes", "8,32", "--draws", "4"]
    words += ["--population", "200", "--sample", "100", "--steps", "2" if optimizer == "adamw" else "1"]
    optimality.main([*words, "--at", "300"])
    path = tmp_path / f"digits-{optimizer}.json"
    [first] = json.loads(path.read_text())["points"]
    assert set(first["marks"]) == {"CABS, in the run", "CABS", "norm test, θ = 1", "noise scale"}
    assert all(math.isfinite(size) and size > 0 for size in first["marks"].values())
    optimality.main([*words, "--at", "300,600"])
    points = json.loads(path.read_text())["points"]
    assert points[0] == first
    assert [point["asked"] for point in points] == [300, 600]
    assert path.with_suffix(".png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="other settings"):
        optimality.main([*words, "--at", "300", "--seed", "1"])
