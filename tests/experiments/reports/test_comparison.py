"""From runs to the choice of learning rates and the comparison of methods."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import made_up
import pytest
from reported import config

from cabs.experiments.problems import DIGITS, title_of
from cabs.experiments.reports.comparison import compare, curve
from cabs.experiments.reports.figures import draw_results
from cabs.experiments.reports.selection import best_parameters_only, by_method
from cabs.experiments.reports.tables import cells, headings
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.reader import find_runs


def test_methods_and_their_best_learning_rates(sweep: Path) -> None:
    methods = by_method(find_runs([sweep]).runs)
    assert [method.name for method in methods] == [
        "CABS",
        *(f"Competitor θ = {theta}" for theta in (0.6, 0.8, 1.0)),
        *(f"Constant {size}" for size in (16, 32, 64, 128, 256, 512)),
    ]
    for method in methods:
        assert [setting.lr for setting in method.settings] == [0.006, 0.01, 0.03, 0.06, 0.1, 0.3]
        assert all(len(setting.runs) == 2 for setting in method.settings)
        accuracies = {setting.lr: setting.score for setting in method.settings}
        assert method.best.lr == max(accuracies, key=lambda lr: accuracies[lr]) == 0.06
    smallest = next(method for method in methods if method.name == "Constant 16")
    assert not smallest.settings[-1].finished
    assert smallest.settings[-1].score == 0.0


def test_only_the_best_theta_is_compared(sweep: Path) -> None:
    methods = by_method(find_runs([sweep]).runs)
    competitors = [method for method in methods if method.kind.best_only]
    kept = [method for method in best_parameters_only(methods) if method.kind.best_only]
    assert kept == [max(competitors, key=lambda method: method.best.score)]
    assert len(best_parameters_only(methods)) == len(methods) - 2


def test_a_tie_goes_to_the_lower_loss(tmp_path: Path) -> None:
    for lr, loss in ((0.1, 0.5), (0.2, 0.4)):
        path = made_up.write_run(tmp_path / str(lr), config(lr=lr))
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        lines[-1] |= {"test_accuracy": 0.9, "train_loss": loss}
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [method] = by_method(find_runs([tmp_path]).runs)
    assert method.best.lr == 0.2


def test_repeated_runs_are_told_apart_by_directory(tmp_path: Path) -> None:
    for name in ("first", "second"):
        made_up.write_run(tmp_path / name / "run", config())
    assert [method.name for method in by_method(find_runs([tmp_path]).runs)] == ["CABS · first", "CABS · second"]


def test_problems_and_budgets_have_sections_of_their_own(tmp_path: Path) -> None:
    made_up.write_run(tmp_path / "a", config())
    made_up.write_run(tmp_path / "b", config(examples=20_000))
    made_up.write_run(tmp_path / "c", RunConfig.make(DIGITS, {"examples": 10_000}))
    made_up.write_run(tmp_path / "d", RunConfig.make(DIGITS, {"examples": 10_000, "optimizer": "adamw"}))
    titles = [section.title for section in compare(find_runs([tmp_path]).runs)]
    assert titles == [
        "Digits, 10k examples",
        "Digits, AdamW, 10k examples",
        "CIFAR-10, 10k examples",
        "CIFAR-10, 20k examples",
    ]


def test_unfinished_runs_are_left_out_and_counted(tmp_path: Path) -> None:
    made_up.write_run(tmp_path / "a", config())
    made_up.write_run(tmp_path / "b", config(lr=0.2), status="unfinished")
    made_up.write_run(tmp_path / "c", config(lr=0.3), status="interrupted")
    [section] = compare(find_runs([tmp_path]).runs)
    assert [setting.lr for setting in section.methods[0].settings] == [0.1]
    assert [run.path.name for run in section.unfinished] == ["b", "c"]


def test_targets_and_speed_ups(sweep: Path) -> None:
    [section] = compare(find_runs([sweep]).runs)
    assert section.reference == "Constant 128"
    rows = {row.name: row for row in section.rows}
    reference, cabs = rows["Constant 128"], rows["CABS"]
    assert section.target_score == reference.score
    assert section.target_loss == reference.loss
    assert reference.to_score is not None
    assert cabs.to_score is not None
    assert cabs.to_score.examples < reference.to_score.examples <= 400_000
    assert rows["Constant 512"].to_score is None
    text = dict(zip((row[0] for row in cells(section)), cells(section), strict=True))
    speed_up = reference.to_score.examples / cabs.to_score.examples
    assert text["CABS"][-1].startswith(f"{speed_up:.2f}×")
    assert text["Constant 128"][-1].startswith("1.00×")
    assert text["Constant 512"][-1] == "–"


def test_given_targets(sweep: Path) -> None:
    [section] = compare(find_runs([sweep]).runs, target_loss=0.5, target_scores={"accuracy": 0.8})
    assert "to loss 0.5" in headings(section)
    assert "to accuracy 80.00%" in headings(section)
    assert all(row.to_loss is not None for row in section.rows)
    for row, method in zip(section.rows, section.methods, strict=True):
        first = curve(method.best, "train_loss")
        reached = next(x for x, y in zip(first.examples, first.mean, strict=True) if y <= 0.5)
        assert row.to_loss is not None
        assert row.to_loss.examples == pytest.approx(reached, abs=10_000)


def test_curves_over_seeds_have_mean_and_range(sweep: Path) -> None:
    method = by_method(find_runs([sweep]).runs)[0]
    both = curve(method.best, "train_loss")
    assert both.low is not None
    assert both.high is not None
    assert all(low <= mean <= high for low, mean, high in zip(both.low, both.mean, both.high, strict=True))
    one = curve(replace(method.best, runs=method.best.runs[:1]), "train_loss")
    assert one.low is None
    assert len(one.examples) == 41


def test_a_method_that_always_diverges_is_in_the_table(tmp_path: Path) -> None:
    made_up.write_run(tmp_path / "a", config())
    made_up.write_run(tmp_path / "b", config(rule="constant", batch_size=16), status="diverged")
    [section] = compare(find_runs([tmp_path]).runs)
    assert cells(section)[1] == ["Constant 16", "–", "diverged", "–", "–", "–", "–", "–", "–"]
    assert section.reference is None
    draw_results(section, section.main)


def test_titles() -> None:
    assert title_of("cifar10") == "CIFAR-10"
    assert title_of("imagefolder:/a/birds/") == "birds"
    assert title_of("gone") == "gone"
