"""Pictures of comparisons."""

from __future__ import annotations

import json
import re
from pathlib import Path

import made_up
import pytest
from matplotlib.figure import Figure
from reported import config, page_data

from cabs.experiments.reports.comparison import compare
from cabs.experiments.reports.figures import draw_results, draw_sensitivity
from cabs.experiments.reports.page import render
from cabs.experiments.reports.palette import colours, sensitivity_families, shades
from cabs.experiments.runs.reader import find_runs
from cabs.experiments.runs.style import loss_axis
from cabs.pictures import plain_number


def test_figures_show_every_method_in_a_colour_of_its_own(sweep: Path) -> None:
    [section] = compare(find_runs([sweep]).runs)
    assert len(set(colours(section.methods).values())) == len(section.methods)
    figure = draw_results(section, section.main)
    loss, accuracy, size = figure.axes
    assert len(loss.lines) == len(accuracy.lines) == len(section.main) == 5
    assert len(size.lines) == 5
    assert loss.get_yscale() == "log"
    assert figure.legends[0].texts[0].get_text() == "CABS, α = 0.06"


def test_sensitivity_has_a_panel_for_each_kind_and_a_curve_for_each_rate(sweep: Path) -> None:
    [section] = compare(find_runs([sweep]).runs)
    families = sensitivity_families(section)
    assert [method.kind.name for method in families] == ["cabs", "norm-test", "constant"]
    figure = draw_sensitivity(section)
    assert figure is not None
    assert [len(axes.lines) for axes in figure.axes] == [6, 6, 6]
    assert len({shade for _, shade in shades(families[0], "#d1495b")}) == 6


def test_learning_rates_that_diverged_are_named(tmp_path: Path) -> None:
    for lr, status in ((0.03, "finished"), (0.1, "finished"), (0.3, "diverged")):
        path = made_up.write_run(tmp_path / str(lr), config(lr=lr), status=status)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["train_loss"] = 1e12
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made_up.write_run(tmp_path / "again", config(lr=0.1, seed=1), status="diverged")
    sections = compare(find_runs([tmp_path]).runs)
    figure = draw_sensitivity(sections[0])
    assert figure is not None
    [axes] = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["α = 0.03", "α = 0.1, diverged (1 of 2)", "α = 0.3, diverged"]
    low, high = axes.get_ylim()
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [float(line.get_xdata()[0]) for line in crosses] == [lines[-1]["examples"]] * 2  # type: ignore[index]
    assert all(low < float(line.get_ydata()[0]) < high < 10 for line in crosses)  # type: ignore[index]
    [section] = page_data(render(sections, "title"))
    [family] = section["families"]
    assert [curve["label"] for curve in family["curves"]] == names
    assert ["end" in curve for curve in family["curves"]] == [False, True, True]
    assert section["lossRange"][1] < 1


def test_losses_are_labelled_with_plain_numbers(sweep: Path) -> None:
    [section] = compare(find_runs([sweep]).runs)
    figure = draw_sensitivity(section)
    assert figure is not None
    for axes in [*figure.axes, draw_results(section, section.main).axes[0]]:
        low, high = axes.get_ylim()
        shown = [tick for tick in axes.get_yticks() if low <= tick <= high]
        assert len(shown) >= 3
        labels = [axes.yaxis.get_major_formatter()(tick) for tick in shown]
        assert [float(text) for text in labels] == pytest.approx(shown)
        assert all(re.fullmatch(r"[0-9.]+", text) for text in labels)
    assert [plain_number(value) for value in (1e-5, 0.3, 1.0, 20.0)] == ["0.00001", "0.3", "1", "20"]


@pytest.mark.parametrize("ends", [(1.2, 1.9), (0.4, 2.3), (0.01, 2.3), (1e-7, 2.3)])
def test_every_loss_axis_has_some_labels_and_not_too_many(ends: tuple[float, float]) -> None:
    axes = Figure().subplots()
    axes.plot([0, 1], ends)
    loss_axis(axes)
    low, high = axes.get_ylim()
    assert 3 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 10


def test_one_learning_rate_has_no_sensitivity(tmp_path: Path) -> None:
    made_up.write_run(tmp_path / "a", config())
    [section] = compare(find_runs([tmp_path]).runs)
    assert draw_sensitivity(section) is None
