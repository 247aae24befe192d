"""``cabs report``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer


def report(
    directories: Annotated[
        list[Path], typer.Argument(help="Directories with runs, in them or below.", metavar="DIR...")
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write. (Default: DIR/report.)")] = None,
    title: Annotated[str | None, typer.Option(help="The title of the page.")] = None,
    loss: Annotated[
        float | None,
        typer.Option(help="The training loss to reach, for the table. (Default: that of the best constant size.)"),
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(help="The test accuracy to reach, e.g. 0.98. (Default: that of the best constant size.)"),
    ] = None,
    perplexity: Annotated[
        float | None, typer.Option(help="The test perplexity to reach, for texts. (Default: likewise.)")
    ] = None,
    examples_only: Annotated[
        bool,
        typer.Option("--examples-only", help="Leave out all times: for runs on a machine that had other work to do."),
    ] = False,
) -> None:
    """Draw the paper's figures from runs: PNG and PDF, tables, and one interactive page that needs no network.

    For each problem and budget: training loss, test accuracy (or perplexity) and batch size against examples accessed,
    each method with its best learning rate; the sensitivity to the learning rate; and how fast each method gets where.

    [bold]cabs report runs/sweep-mnist[/]
    """
    from rich.console import Console

    from cabs.experiments.errors import UsageError
    from cabs.experiments.reports.report import default_out, write_report
    from cabs.experiments.wording import counted

    if loss is not None and not 0 < loss < math.inf:
        raise UsageError(f"--loss {loss}: must be a positive number")
    if accuracy is not None and not 0 < accuracy <= 1:
        raise UsageError(f"--accuracy {accuracy}: must be above 0 and at most 1 (98 % is 0.98)")
    if perplexity is not None and not 1 <= perplexity < math.inf:
        raise UsageError(f"--perplexity {perplexity}: must be at least 1")
    scores = {"accuracy": accuracy, "perplexity": perplexity}
    made = write_report(
        directories,
        out or default_out(directories),
        title=title,
        target_loss=loss,
        target_scores={name: value for name, value in scores.items() if value is not None},
        examples_only=examples_only,
    )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for section in made.sections:
        left_out = f", {counted(len(section.unfinished), 'unfinished run')} left out" if section.unfinished else ""
        methods, runs = counted(len(section.methods), "method"), counted(len(section.runs), "run")
        console.print(f"{section.title}: {methods}, {runs}{left_out}")
    for path in made.files:
        console.print(f"  {path}")
    if made.damaged:
        notes = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        notes.print(f"cabs: note: {counted(len(made.damaged), 'damaged run')} left out and left alone:")
        for reason in made.damaged.values():
            notes.print(f"  {reason}")
