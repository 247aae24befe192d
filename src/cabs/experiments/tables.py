"""The table of a report: as cells for people, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io

from cabs.experiments.comparison import Reached, Row, Section
from cabs.experiments.display import duration
from cabs.experiments.style import short_count

NONE = "–"
SPEED_UP = "speed-up"
_COLUMNS = (
    *("problem", "examples", "method", "lr", "train_loss", "test_accuracy", "test_accuracy_deviation"),
    *("mean_batch_size", "target_loss", "examples_to_loss", "seconds_to_loss"),
    *("target_accuracy", "examples_to_accuracy", "seconds_to_accuracy"),
)


def headings(section: Section) -> list[str]:
    """The names of the columns."""
    loss, accuracy = f"{section.target_loss:.3g}", f"{section.target_accuracy:.2%}"
    to = "to" if section.times else "examples to"
    return [
        "method",
        "best α",
        "training loss",
        "test accuracy",
        "mean batch size",
        f"{to} loss {loss}",
        SPEED_UP,
        f"{to} accuracy {accuracy}",
        SPEED_UP,
    ]


def cells(section: Section) -> list[list[str]]:
    """The table as text, a list for each row."""
    reference = next((row for row in section.rows if row.name == section.reference), None)
    return [
        [
            row.name,
            NONE if row.lr is None else f"{row.lr:g}",
            "diverged" if row.loss is None else f"{row.loss:.3g}",
            _accuracy(row),
            NONE if row.batch_size is None else f"{row.batch_size:,.0f}",
            _reached(row.to_loss, section.times),
            _speed_up(row.to_loss, reference.to_loss if reference else None, section.times),
            _reached(row.to_accuracy, section.times),
            _speed_up(row.to_accuracy, reference.to_accuracy if reference else None, section.times),
        ]
        for row in section.rows
    ]


def _accuracy(row: Row) -> str:
    if row.accuracy is None:
        return NONE
    spread = f" ± {row.deviation * 100:.2f}" if row.deviation is not None else ""
    return f"{row.accuracy * 100:.2f}{spread}%"


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


def explanation(section: Section) -> str:
    """What the columns mean, in a sentence or two."""
    text = (
        "Each method has the learning rate that gave it the highest test accuracy at the end. "
        f"Losses are on a fixed sample of the training set{'; times are of training alone' if section.times else ''}."
    )
    if section.reference:
        text += f" Speed-ups{'' if section.times else ' in examples'} are relative to {section.reference}, "
        text += "the constant size with the highest test accuracy."
    return text


def markdown(sections: list[Section]) -> str:
    """The tables of all sections as Markdown."""
    parts = []
    for section in sections:
        lines = [headings(section), ["---"] + ["---:"] * (len(headings(section)) - 1), *cells(section)]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        parts.append(f"### {section.title}\n\n{table}\n\n{explanation(section)}\n")
    return "\n".join(parts)


def comma_separated(sections: list[Section]) -> str:
    """The numbers of all sections as CSV, unrounded."""
    times = all(section.times for section in sections)
    columns = [column for column in _COLUMNS if times or not column.startswith("seconds")]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for section in sections:
        for row in section.rows:
            numbers = {
                "problem": section.problem,
                "examples": section.budget,
                "method": row.name,
                "lr": row.lr,
                "train_loss": row.loss,
                "test_accuracy": row.accuracy,
                "test_accuracy_deviation": row.deviation,
                "mean_batch_size": row.batch_size,
                "target_loss": section.target_loss,
                "target_accuracy": section.target_accuracy,
            }
            for name, reached in (("loss", row.to_loss), ("accuracy", row.to_accuracy)):
                if reached:
                    numbers |= {f"examples_to_{name}": reached.examples, f"seconds_to_{name}": reached.seconds}
            writer.writerow(numbers)
    return buffer.getvalue()
