"""From runs to comparison, tables, figures and page."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made_up
import pytest
from matplotlib.figure import Figure

from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.problems import CIFAR10, DIGITS, title_of
from cabs.experiments.reports.comparison import compare, curve
from cabs.experiments.reports.figures import draw_results, draw_sensitivity
from cabs.experiments.reports.page import render
from cabs.experiments.reports.palette import colours, sensitivity_families, shades
from cabs.experiments.reports.report import default_out, write_report
from cabs.experiments.reports.selection import best_parameters_only, by_method
from cabs.experiments.reports.tables import cells, comma_separated, headings, markdown
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.reader import find_runs
from cabs.experiments.runs.style import loss_axis, plain_number


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep")
    made_up.write_sweep(path, examples=400_000, seeds=(0, 1))
    return path


def config(**given: Any) -> RunConfig:
    return RunConfig.make(CIFAR10, {"examples": 10_000, "threads": 1, **given})


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
    titles = [section.title for section in compare(find_runs([tmp_path]).runs)]
    assert titles == ["CIFAR-10, 10k examples", "CIFAR-10, 20k examples", "Digits, 10k examples"]


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


def test_without_times(sweep: Path, tmp_path: Path) -> None:
    [section] = write_report([sweep], tmp_path, examples_only=True).sections
    assert headings(section)[5].startswith("examples to loss")
    text = dict(zip((row[0] for row in cells(section)), cells(section), strict=True))
    assert text["Constant 128"][5:] == ["400k", "1.00×", "400k", "1.00×"]
    assert "seconds" not in (tmp_path / "table.csv").read_text()
    parser = Parser()
    parser.feed((tmp_path / "report.html").read_text())
    for content in (parser.text, (tmp_path / "table.md").read_text()):
        assert "examples to accuracy" in content
        assert not re.search(r"\btimes?\b|seconds|\d s\b|\d min", content)
    with_times = compare(find_runs([sweep]).runs)
    assert " in " in cells(with_times[0])[0][5]
    assert "seconds_to_loss" in comma_separated(with_times)


def test_one_learning_rate_has_no_sensitivity(tmp_path: Path) -> None:
    made_up.write_run(tmp_path / "a", config())
    [section] = compare(find_runs([tmp_path]).runs)
    assert draw_sensitivity(section) is None


def test_csv_has_the_numbers(sweep: Path) -> None:
    sections = compare(find_runs([sweep]).runs)
    rows = list(csv.DictReader(io.StringIO(comma_separated(sections))))
    assert len(rows) == 8
    assert float(rows[0]["test_accuracy"]) == sections[0].rows[0].score
    assert rows[-1]["examples_to_accuracy"] == ""


def test_all_files_are_written_and_written_the_same(sweep: Path, tmp_path: Path) -> None:
    written = write_report([sweep], tmp_path / "one").files
    names = sorted(path.name for path in written)
    assert names == sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"report.html", "table.md", "table.csv", "cifar10-400k-results.png", "cifar10-400k-more.pdf"} <= set(names)
    write_report([sweep], tmp_path / "two")
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


class Parser(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


def page_data(page: str) -> list[dict[str, Any]]:
    """The numbers in a page."""
    data = re.search(r'id="sections">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    sections: list[dict[str, Any]] = json.loads(data[1])
    return sections


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp; $x^2$ @js@ </script>"


def test_names_from_runs_are_text_and_nothing_else(tmp_path: Path) -> None:
    hostile = replace(config(), problem=f"imagefolder:/data/{HOSTILE.replace('/', '')}")
    for name in ("a", "b"):
        made_up.write_run(tmp_path / (name + HOSTILE.replace("/", "_")), hostile)
    write_report([tmp_path], tmp_path / "out", title=HOSTILE)
    page = (tmp_path / "out" / "report.html").read_text()
    parser = Parser()
    parser.feed(page)
    assert "img" not in parser.tags
    assert parser.tags.count("script") == 3
    assert parser.links == ["data:,"]
    assert HOSTILE in parser.text
    [section] = page_data(page)
    assert all("<" not in method["label"] for method in section["methods"])
    assert "script" in section["methods"][0]["label"]


def test_markdown_cells_do_not_break_the_table(tmp_path: Path) -> None:
    for name in ("a|b", "c"):
        made_up.write_run(tmp_path / name, config())
    text = markdown(compare(find_runs([tmp_path]).runs))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


@pytest.mark.parametrize(
    ("prepare", "error", "expected"),
    [
        (lambda d: None, UsageError, "no run in it or below it"),
        (lambda d: made_up.write_run(d / "a", config(), status="unfinished"), UsageError, "no finished run"),
        (
            lambda d: (made_up.write_run(d / "a", config()) / "config.json").write_text("{}"),
            CommandError,
            "not the configuration of a run",
        ),
        (
            lambda d: (made_up.write_run(d / "a", config()) / "summary.json").write_text("[]"),
            CommandError,
            "not the summary of a run",
        ),
        (
            lambda d: (made_up.write_run(d / "a", config()) / "metrics.jsonl").write_text(""),
            CommandError,
            "rows were lost",
        ),
    ],
)
def test_directories_that_cannot_be_reported(tmp_path, prepare, error, expected) -> None:
    prepare(tmp_path)
    with pytest.raises(error, match=expected):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_directory_and_a_file_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        write_report([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        write_report([tmp_path], tmp_path / "file")


def test_where_a_report_goes(tmp_path: Path) -> None:
    assert default_out([tmp_path]) == tmp_path / "report"
    assert default_out([tmp_path, tmp_path / "b"]) == Path("report")


def test_titles() -> None:
    assert title_of("cifar10") == "CIFAR-10"
    assert title_of("imagefolder:/a/birds/") == "birds"
    assert title_of("gone") == "gone"
