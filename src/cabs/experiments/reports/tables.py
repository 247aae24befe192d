"""The table of a report: as cells for people, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from cabs.experiments.problems.problem import Metric
from cabs.experiments.reports.comparison import Reached, Row, Section, far_apart, tracks_of
from cabs.experiments.reports.rates import rate_cells, rate_explanation, rate_headings, with_deviation
from cabs.experiments.reports.selection import Method
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.wording import duration, short_count

NONE = "–"
SPEED_UP = "speed-up"


def headings(section: Section) -> list[str]:
    """The names of the columns."""
    loss, metric = f"{section.target_loss:.3g}", section.metric
    to = "to" if section.times else "examples to"
    return [
        "method",
        "best α",
        "training loss",
        f"test {metric.name}",
        "mean batch size",
        f"{to} loss {loss}",
        SPEED_UP,
        f"{to} {metric.name} {metric.show(section.target_score)}",
        SPEED_UP,
    ]


def cells(section: Section) -> list[list[str]]:
    """The table as text, a list for each row."""
    reference = next((row for row in section.rows if row.name == section.reference), None)
    return [
        [
            row.name,
            NONE if row.lr is None else f"{row.lr:g}",
            "diverged" if row.loss is None else with_deviation(row.loss, row.loss_deviation),
            _score(row, section.metric),
            NONE if row.batch_size is None else f"{row.batch_size:,.0f}",
            _reached(row.to_loss, section.times),
            _speed_up(row.to_loss, reference.to_loss if reference else None, section.times),
            _reached(row.to_score, section.times),
            _speed_up(row.to_score, reference.to_score if reference else None, section.times),
        ]
        for row in section.rows
    ]


def _score(row: Row, metric: Metric) -> str:
    if row.score is None:
        return NONE
    if row.deviation is None:
        return metric.show(row.score)
    score, deviation = metric.show(row.score), format(row.deviation, metric.spread)
    unit = "%" if score.endswith("%") else ""
    return f"{score.removesuffix(unit)} ± {deviation.removesuffix(unit)}{unit}"


def _reached(reached: Reached | None, times: bool) -> str:
    if reached is None:
        return NONE
    examples = short_count(round(reached.examples, -2))
    return f"{examples} in {duration(reached.seconds)}" if times else examples


def _speed_up(reached: Reached | None, reference: Reached | None, times: bool) -> str:
    """Against the best constant size: in examples, and in seconds if these are told."""
    if reached is None or reference is None or reached.examples == 0:
        return NONE
    by_examples = reference.examples / reached.examples
    by_seconds = f", {reference.seconds / reached.seconds:.2f}× in time" if times and reached.seconds > 0 else ""
    return f"{by_examples:.2f}×{by_seconds}"


def seeds_of(methods: Sequence[Method]) -> str:
    """How many seeds the curves of methods are of, in words; nothing if there is but one of each."""
    counts = {len(method.best.runs) for method in methods}
    if max(counts) == 1:
        return ""
    return f"{'up to ' if len(counts) > 1 else ''}{max(counts)} seeds"


def caption(section: Section) -> str:
    """How to read the curves of a section's figures."""
    finished = [method for method in section.methods if method.best.finished]
    roles = {method.kind.role == "baseline" for method in finished}
    seeds = seeds_of(finished)
    text = f"Curves are means of {seeds}, and the shaded bands are their range. " if seeds else ""
    if any(method.decays for method in finished):
        text += "Learning rates of dashed curves decay. "
    if len(roles) == 2:
        above = "" if far_apart(section.main) else "; larger ones lie above the panel"
        text += f"Dotted lines among the batch sizes are constant sizes{above}. "
    if any(tracks_of(method.best, "noise_share") for method in finished):
        text += (
            "The noise share is how much of the loss is there because gradients are noisy, α·tr(PΣ)/(4mF); "
            "CABS keeps it at a quarter."
        )
    return text.strip()


def explanation(section: Section) -> str:
    """What the columns mean, in a sentence or two."""
    best = f"the {'highest' if section.metric.higher_is_better else 'lowest'} test {section.metric.name}"
    text = (
        f"Each method has the learning rate that gave it {best} at the end. "
        f"Losses are on a fixed sample of the training set{'; times are of training alone' if section.times else ''}. "
        f"The optimizer is {OPTIMIZERS[section.optimizer].label}."
    )
    if section.reference:
        text += f" Speed-ups{'' if section.times else ' in examples'} are relative to {section.reference}, "
        text += f"the constant size with {best}."
    return text


def markdown(sections: list[Section]) -> str:
    """The tables of all sections as Markdown."""
    parts = []
    for section in sections:
        table = _lines(headings(section), cells(section))
        rates = _lines(rate_headings(section), rate_cells(section))
        parts.append(
            f"### {section.title}\n\n{table}\n\n{explanation(section)}\n\n{rates}\n\n{rate_explanation(section)}\n"
        )
    return "\n".join(parts)


def _lines(names: list[str], rows: list[list[str]]) -> str:
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def comma_separated(sections: list[Section]) -> str:
    """The numbers of all sections as CSV, unrounded."""
    times = all(section.times for section in sections)
    rows = [_numbers(section, row, times) for section in sections for row in section.rows]
    columns = dict.fromkeys(name for row in rows for name in row)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _numbers(section: Section, row: Row, times: bool) -> dict[str, Any]:
    metric = section.metric
    numbers: dict[str, Any] = {
        "problem": section.problem,
        "optimizer": section.optimizer,
        "examples": section.budget,
        "method": row.name,
        "lr": row.lr,
        "train_loss": row.loss,
        "train_loss_deviation": row.loss_deviation,
        metric.key: row.score,
        f"{metric.key}_deviation": row.deviation,
        "mean_batch_size": row.batch_size,
    }
    targets = (("loss", section.target_loss, row.to_loss), (metric.name, section.target_score, row.to_score))
    for name, target, reached in targets:
        numbers[f"target_{name}"] = target
        numbers[f"examples_to_{name}"] = reached.examples if reached else None
        if times:
            numbers[f"seconds_to_{name}"] = reached.seconds if reached else None
    return numbers
