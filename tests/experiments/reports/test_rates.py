"""How much the learning rate matters: the loss at the end over all that were tried."""

from __future__ import annotations

import json
import math
from pathlib import Path

import made_up
import pytest
from reported import config, page_data

from cabs.experiments.reports.comparison import Section, compare
from cabs.experiments.reports.figures import draw_rates
from cabs.experiments.reports.page import render
from cabs.experiments.reports.rates import (
    at_the_edge,
    rate_cells,
    rate_explanation,
    rate_headings,
    tolerance,
    with_deviation,
)
from cabs.experiments.reports.tables import markdown
from cabs.experiments.runs.reader import find_runs


def write(path: Path, losses: dict[float, list[float] | None]) -> Section:
    """Runs of CABS whose losses at the end are given, one for each seed; None for a learning rate that diverged."""
    for lr, ends in losses.items():
        for seed, end in enumerate(ends or [math.inf]):
            status = "finished" if math.isfinite(end) else "diverged"
            made = made_up.write_run(path / f"{lr}-{seed}", config(lr=lr, seed=seed), status=status)
            lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
            if math.isfinite(end):
                lines[-1]["train_loss"] = end
            (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [section] = compare(find_runs([path]).runs)
    return section


def test_the_range_is_where_the_loss_crosses_a_tenth_more(tmp_path: Path) -> None:
    """log loss is linear in log α: from 1 to 1.21 the limit of 1.1 is half-way, on both sides."""
    section = write(tmp_path, {0.01: [1.21], 0.1: [1.0], 1.0: [1.21]})
    found = tolerance(section.methods[0])
    assert found is not None
    assert found.decades == pytest.approx(1.0)
    assert not found.open
    assert not at_the_edge(section)


def test_a_range_that_the_grid_ends_may_be_wider(tmp_path: Path) -> None:
    section = write(tmp_path, {0.01: [4.0], 0.1: [1.05], 1.0: [1.0]})
    found = tolerance(section.methods[0])
    assert found is not None
    assert found.open
    assert str(found).startswith("≥ 1.0")
    assert [method.name for method in at_the_edge(section)] == ["CABS"]
    assert "edge of the grid for CABS" in rate_explanation(section)


def test_a_learning_rate_that_diverged_ends_the_range(tmp_path: Path) -> None:
    section = write(tmp_path, {0.1: [1.02], 0.3: [1.0], 1.0: None})
    found = tolerance(section.methods[0])
    assert found is not None
    assert found.decades == pytest.approx(math.log10(3))
    assert rate_cells(section)[0][-2] == "diverged"


def test_one_learning_rate_has_no_range(tmp_path: Path) -> None:
    section = write(tmp_path, {0.1: [1.0]})
    assert tolerance(section.methods[0]) is None
    assert rate_cells(section) == [["CABS", "1", "–"]]
    assert draw_rates(section) is None
    assert page_data(render([section], "One"))[0]["rates"] == []


def test_means_deviations_and_seeds(tmp_path: Path) -> None:
    section = write(tmp_path, {0.1: [0.020, 0.022, 0.024], 0.3: [0.03, 0.05]})
    assert rate_headings(section) == ["training loss at the end", "α = 0.1", "α = 0.3", "decades of α within 10%"]
    [[_, first, second, _]] = rate_cells(section)
    assert first == "0.0220 ± 0.0020"
    assert second == "0.040 ± 0.014"
    assert rate_explanation(section).startswith("2 to 3 seeds, mean ± standard deviation; ")
    assert first in markdown([section])
    figure = draw_rates(section)
    assert figure is not None
    [line] = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 2 and line.get_marker() == "o"]
    assert list(line.get_ydata()) == pytest.approx([0.022, 0.04])
    [data] = page_data(render([section], "Rates"))
    assert data["rates"][0]["y"] == pytest.approx([0.022, 0.04])
    assert data["rates"][0]["below"] == pytest.approx([0.002, 0.01])


def test_bars_stay_where_a_logarithm_is(tmp_path: Path) -> None:
    """A deviation greater than the mean would go down to nothing."""
    section = write(tmp_path, {0.1: [0.001, 0.001, 1.0], 0.3: [0.03, 0.05, 0.04]})
    assert section.methods[0].settings[0].loss_deviation > section.methods[0].settings[0].loss
    [data] = page_data(render([section], "Rates"))
    rates = data["rates"][0]
    assert all(y - below > 0 for y, below in zip(rates["y"], rates["below"], strict=True))


@pytest.mark.parametrize(
    ("mean", "deviation", "expected"),
    [
        (0.0231, 0.00123, "0.0231 ± 0.0012"),
        (12.3, 0.4, "12.30 ± 0.40"),
        (123.0, 25.0, "123 ± 25"),
        (2.31496, 0.0062, "2.315 ± 0.006"),
        (2.30001, 2e-5, "2.300 ± <0.001"),
        (1.2e-6, 3e-7, "1.2e-06 ± 3e-07"),
        (0.5, None, "0.5"),
        (0.5, 0.0, "0.5"),
    ],
)
def test_digits_that_mean_something(mean: float, deviation: float | None, expected: str) -> None:
    assert with_deviation(mean, deviation) == expected
