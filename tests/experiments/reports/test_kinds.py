"""Reports of other kinds than images with plain SGD: a text with its perplexity, and several optimizers."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import made_up
import pytest
from reported import config, page_data

from cabs.experiments.problems import SHAKESPEARE
from cabs.experiments.reports.comparison import compare
from cabs.experiments.reports.figures import draw_results
from cabs.experiments.reports.page import render
from cabs.experiments.reports.palette import colours, on_dark
from cabs.experiments.reports.selection import best_parameters_only, by_method
from cabs.experiments.reports.tables import caption, cells, comma_separated, explanation, headings
from cabs.experiments.runs.reader import find_runs


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    made_up.write_sweep(
        path, SHAKESPEARE, examples=50_000, sizes=(16, 32), lrs=(0.3, 0.1, 0.03), thetas=(1.0,), seeds=(0, 1)
    )
    return path


def test_perplexity_is_better_the_lower_it_is(text: Path) -> None:
    [section] = compare(find_runs([text]).runs)
    cabs = section.methods[0]
    scores = {setting.lr: setting.score for setting in cabs.settings}
    assert cabs.best.score == min(scores.values())
    assert section.reference == min(section.methods[-2:], key=lambda method: method.best.score).name
    rows = {row.name: row for row in section.rows}
    to_score = rows["CABS"].to_score
    assert to_score is not None
    assert to_score.examples < 50_000
    assert "to perplexity " in headings(section)[7]
    assert headings(section)[3] == "test perplexity"
    assert "±" in cells(section)[0][3]
    assert "%" not in cells(section)[0][3]
    assert "lowest test perplexity" in explanation(section)
    assert "The optimizer is AdamW." in explanation(section)


def test_a_run_that_diverged_is_the_worst(text: Path) -> None:
    smallest = next(m for m in by_method(find_runs([text]).runs) if m.name == "Constant 16")
    assert smallest.settings[-1].score == math.inf
    assert smallest.best.finished


def test_the_panel_and_the_page_say_perplexity(text: Path) -> None:
    [section] = compare(find_runs([text]).runs)
    _, score, _ = draw_results(section, section.main).axes
    assert score.get_title(loc="left") == "Test perplexity"
    low, high = score.get_ylim()
    assert low < section.rows[0].score < high
    assert score.yaxis.get_major_formatter()(5.0) == "5"
    page = render([section], "Text")
    assert page_data(page)[0]["metric"]["title"] == "Test perplexity"
    assert "accuracy" not in page[: page.index("<script")]


def test_the_table_in_numbers(text: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(compare(find_runs([text]).runs)))))
    assert {"test_perplexity", "target_perplexity", "examples_to_perplexity"} <= rows[0].keys()
    assert "test_accuracy" not in rows[0]


def test_a_given_perplexity_is_for_texts_alone(text: Path) -> None:
    [section] = compare(find_runs([text]).runs, target_scores={"perplexity": 7.5, "accuracy": 0.5})
    assert section.target_score == 7.5
    assert "perplexity 7.5" in headings(section)[7]


def test_bands_and_dotted_lines_are_explained(text: Path, tmp_path: Path) -> None:
    [section] = compare(find_runs([text]).runs)
    words = "Curves are means of 2 seeds, and the shaded bands are their range."
    assert words in caption(section)
    assert "Dotted lines" in caption(section)
    assert words in render([section], "Text")
    legend = draw_results(section, section.main).legends[0]
    labels = [entry.get_text() for entry in legend.get_texts()]
    assert labels[-2:] == ["range of 2 seeds", "constant batch size"]
    made_up.write_run(tmp_path / "one", config())
    [alone] = compare(find_runs([tmp_path]).runs)
    assert caption(alone) == ""
    assert len(draw_results(alone, alone.main).legends[0].get_texts()) == 1


def test_optimizers_are_told_apart(tmp_path: Path) -> None:
    for optimizer in ("sgd", "momentum", "adamw"):
        for theta in (0.6, 1.0):
            made_up.write_run(
                tmp_path / f"norm-{optimizer}-{theta}", config(optimizer=optimizer, rule="norm-test", theta=theta)
            )
        made_up.write_run(tmp_path / f"cabs-{optimizer}", config(optimizer=optimizer))
        made_up.write_run(
            tmp_path / f"constant-{optimizer}", config(optimizer=optimizer, rule="constant", batch_size=32)
        )
    methods = by_method(find_runs([tmp_path]).runs)
    assert [method.name for method in methods][:3] == ["CABS", "CABS, SGD with momentum 0.9", "CABS, AdamW"]
    best = [method for method in best_parameters_only(methods) if method.kind.best_only]
    assert [method.optimizer for method in best] == ["sgd", "momentum", "adamw"]
    sections = compare(find_runs([tmp_path]).runs)
    assert [section.optimizer for section in sections] == ["sgd", "momentum", "adamw"]
    assert [section.title for section in sections][1:] == [
        "CIFAR-10, SGD with momentum 0.9, 10k examples",
        "CIFAR-10, AdamW, 10k examples",
    ]
    assert len({section.stem for section in sections}) == 3
    for section in sections:
        assert [method.name for method in section.methods][::2] == ["CABS", "Constant 32"]
    assert "The optimizer is AdamW." in explanation(sections[-1])


def test_horizon_schedules_and_noise_shares(tmp_path: Path) -> None:
    """Each has a name and a colour of its own; a panel of noise shares where somebody has measured them."""
    runs = {
        "cabs": {},
        "horizon": {"rule": "horizon"},
        "ramp": {"rule": "ramp", "start": 16, "end": 64},
        "wide": {"rule": "ramp", "start": 16, "end": 128, "shape": "cosine"},
        "steps": {"rule": "steps", "schedule": "0:16 1k:32"},
        "constant": {"rule": "constant", "batch_size": 32},
        "cosine": {"rule": "constant", "batch_size": 32, "lr_decay": "cosine"},
    }
    for name, given in runs.items():
        made_up.write_run(tmp_path / name, config(**given))
    [section] = compare(find_runs([tmp_path]).runs)
    names = [method.name for method in section.methods]
    assert names[:2] == ["CABS", "CABS, horizon"]
    assert names[-2:] == ["Constant 32", "Constant 32, cosine decay"]
    palette = colours(section.methods)
    assert palette.pop("Constant 32, cosine decay") == palette["Constant 32"]  # the one is dashed
    assert len(set(palette.values())) == len(set(map(on_dark, palette.values()))) == len(names) - 1
    assert len(draw_results(section, section.main).axes) == 3
    for name in ("cabs", "horizon"):
        path = tmp_path / name / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        told = [{**row, "noise_share": 0.3 if row["examples"] else None} if "loss" in row else row for row in lines]
        path.write_text("".join(json.dumps(row) + "\n" for row in told))
    [section] = compare(find_runs([tmp_path]).runs)
    figure = draw_results(section, section.main)
    assert [axes.get_title(loc="left") for axes in figure.axes][-1] == "Noise share of the loss"
    assert len(figure.axes) == 4
    [data] = page_data(render([section], "Shares"))
    shares = {method["name"]: method["share"]["y"] for method in data["methods"]}
    assert set(shares["CABS"]) == {0.3}
    assert shares["Constant 32"] == []
