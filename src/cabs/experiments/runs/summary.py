"""The outcome of a run, as a file and in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cabs import hardware
from cabs._version import __version__
from cabs.experiments.problems import metric_of
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.crew import Crew
from cabs.experiments.runs.directory import PICTURE
from cabs.experiments.runs.metrics import read_metrics
from cabs.experiments.runs.training import Trainer
from cabs.experiments.wording import duration


def summarise(trainer: Trainer, status: str) -> dict[str, Any]:
    """The outcome of a run so far, from its metrics."""
    trainer.run.flush()
    rows = list(read_metrics(trainer.run.path))
    evaluations = [row for row in rows if "train_loss" in row]
    sizes = [row["batch_size"] for row in rows if "batch_size" in row]
    last = evaluations[-1] if evaluations else {}
    return {
        "status": status,
        "problem": trainer.config.problem,
        "method": trainer.config.method,
        "optimizer": trainer.config.optimizer,
        "lr": trainer.config.lr,
        "seed": trainer.config.seed,
        "examples": trainer.examples,
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 3),
        "input_share": round(trainer.input_seconds / trainer.seconds, 4) if trainer.seconds else None,
        "train_loss": last.get("train_loss"),
        "test_loss": last.get("test_loss"),
        **{metric.key: last.get(metric.key) for metric in trainer.problem.metrics},
        **{
            f"best_{metric.key}": max((row[metric.key] for row in evaluations), key=metric.goodness, default=None)
            for metric in trainer.problem.metrics
        },
        "mean_batch_size": round(trainer.examples / trainer.step, 2) if trainer.step else None,
        "last_batch_size": sizes[-1] if sizes else None,
        "max_batch_size": max(sizes, default=None),
        "environment": environment(trainer.config, trainer.crew),
    }


def environment(config: RunConfig, team: Crew) -> dict[str, Any]:
    """The versions and the machine that made the numbers."""
    return {
        "cabs": __version__,
        **hardware.describe(config.threads),
        "device": config.device,
        "processes": team.size,
    }


def print_summary(summary: dict[str, Any], config: RunConfig, path: Path, console: Console) -> None:
    """Show the outcome of a run."""
    metric = metric_of(config.problem)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    score, best = (metric.show(summary[key]) for key in (metric.key, f"best_{metric.key}"))
    table.add_row(f"test {metric.name}", f"{score}  (best {best})")
    table.add_row("training loss", f"{summary['train_loss']:.4g}")
    table.add_row(
        "batch size",
        f"{summary['last_batch_size']:,} at the end, {summary['mean_batch_size']:,.0f} on average",
    )
    table.add_row(
        "trained",
        f"{summary['examples']:,} examples in {summary['steps']:,} steps, {duration(summary['seconds'])} "
        f"({summary['input_share'] or 0:.0%} for inputs)",
    )
    table.add_row("run", escape(str(path)))
    table.add_row("picture", escape(str(path / PICTURE)))
    console.print(table, soft_wrap=not console.is_terminal)
