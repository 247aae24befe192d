"""``cabs train``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cabs.experiments.commands.options import OPTIMIZER, PROBLEM, RULE, parsed, with_rule_parameters

_RULE, _SCHEDULE, _RUN = "Batch size", "Schedule, in training examples", "Run"


@with_rule_parameters(_RULE)
def train(
    problem: Annotated[str | None, typer.Argument(help=f"{PROBLEM} (Default: digits.)", show_default=False)] = None,
    rule: Annotated[str | None, typer.Option(help=RULE, rich_help_panel=_RULE)] = None,
    budget_aware: Annotated[
        bool,
        typer.Option(
            "--budget-aware",
            help="The same as --rule horizon: CABS that knows where the budget ends, with more noise on the way and "
            "less at the end.",
            rich_help_panel=_RULE,
        ),
    ] = False,
    optimizer: Annotated[str | None, typer.Option(help=f"{OPTIMIZER} (Default: the problem's.)")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate α. (Default: the problem's.)")] = None,
    lr_decay: Annotated[
        str | None, typer.Option(help="none (default), cosine or linear: how α falls over the budget, by examples.")
    ] = None,
    estimator: Annotated[
        str | None,
        typer.Option(
            help="exact (default), or paper: the position-wise variance of convolutions that the paper's curves show.",
            rich_help_panel=_RULE,
        ),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            help="What to measure it on: all examples of every step (default), as in the paper, or auto: some of them "
            "where all are costly, which takes less time and gives noisier batch sizes.",
            rich_help_panel=_RULE,
        ),
    ] = None,
    min_batch_size: Annotated[
        int | None,
        typer.Option(help="The smallest batch size, and the first. (Default: the problem's.)", rich_help_panel=_RULE),
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="The largest batch size. (Default: 2048.)", rich_help_panel=_RULE)
    ] = None,
    smoothing: Annotated[
        float | None, typer.Option(help="μ of the moving averages. (Default: 0.95.)", rich_help_panel=_RULE)
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="L2-regularisation of weights. (Default: the problem's.)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides weights, order and augmentation. (Default: 0.)")] = None,
    examples: Annotated[
        str | None,
        typer.Option(help="The budget, e.g. 400k or 1.5M. (Default: the problem's.)", rich_help_panel=_SCHEDULE),
    ] = None,
    eval_every: Annotated[
        str | None,
        typer.Option(help="Examples between evaluations. (Default: part of the budget.)", rich_help_panel=_SCHEDULE),
    ] = None,
    log_every: Annotated[
        str | None,
        typer.Option(help="Examples between step rows. (Default: budget / 2000.)", rich_help_panel=_SCHEDULE),
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(help="Examples between checkpoints. (Default: budget / 20.)", rich_help_panel=_SCHEDULE),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's directory. (Default: runs/PROBLEM-RULE-....)", rich_help_panel=_RUN),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.", rich_help_panel=_RUN)] = False,
    from_previous: Annotated[
        bool,
        typer.Option(
            "--from-previous",
            help="With --resume: use the checkpoint before the newest, e.g. if that is damaged.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.", rich_help_panel=_RUN)] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Directory with data sets. (Default: $CABS_DATA, else a cache.)", rich_help_panel=_RUN),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default), cuda, mps, ...", rich_help_panel=_RUN)] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads to compute with. (Default: all.)", rich_help_panel=_RUN)
    ] = None,
    **parameters: Any,
) -> None:
    """Train a network, with the batch size coupled to the learning rate.

    Writes config.json, metrics.jsonl, checkpoints, summary.json and picture.png to the run's directory.
    A run can be stopped at any time, by Ctrl-C or otherwise, and resumed with --resume.

    [bold]cabs train[/]  shows CABS at work, in less than a minute

    [bold]cabs train cifar10 --lr 0.1 --examples 400k --out runs/c10[/]

    [bold]cabs train cifar10 --rule constant --batch-size 128 --lr 0.03[/]

    [bold]cabs train mnist --budget-aware --examples 90k[/]

    [bold]cabs train mnist --rule steps --schedule '0:32 30k:128'[/]

    [bold]cabs train shakespeare --optimizer sgd --lr 0.3[/]

    [bold]cabs train --out runs/c10 --resume[/]

    [bold]torchrun --nproc-per-node 2 -m cabs train cifar10 --out runs/c10[/]  shares every batch among two processes
    """
    from rich.console import Console

    from cabs.experiments.errors import UsageError
    from cabs.experiments.problems import DIGITS, full_name
    from cabs.experiments.problems import problem as find_problem
    from cabs.experiments.runs import session
    from cabs.experiments.runs.config import RunConfig, parse_count
    from cabs.experiments.runs.naming import default_directory

    counts = {
        "examples": examples,
        "eval_every": eval_every,
        "log_every": log_every,
        "checkpoint_every": checkpoint_every,
    }
    given: dict[str, Any] = {
        **{name: None if text is None else parse_count(text) for name, text in counts.items()},
        **parsed(parameters),
        "rule": horizon_of(rule) if budget_aware else rule,
        "lr_decay": lr_decay,
        "optimizer": optimizer,
        "lr": lr,
        "estimator": estimator,
        "measure": measure,
        "min_batch_size": min_batch_size,
        "max_batch_size": max_batch_size,
        "smoothing": smoothing,
        "weight_decay": weight_decay,
        "seed": seed,
        "data": None if data is None else str(data.absolute()),
        "device": device,
        "threads": threads,
    }
    console = Console()
    if resume and force:
        raise UsageError("--resume continues a run, --force replaces it; choose one")
    if from_previous and not resume:
        raise UsageError("--from-previous says which checkpoint to resume from; it goes with --resume")
    if not resume and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise UsageError("torchrun has restarted the processes, which would start the run over; use --resume")
    if resume:
        if out is None:
            raise UsageError("--resume needs --out, the directory of the run to resume")
        named = None if problem is None else full_name(problem)
        session.resume(out, {**given, "problem": named}, console, from_previous=from_previous)
        return
    config = RunConfig.make(find_problem(problem or DIGITS.name), given)
    session.train(config, out or default_directory(config), console, force=force)


def horizon_of(rule: str | None) -> str:
    """The rule that ``--budget-aware`` stands for."""
    from cabs.experiments.errors import UsageError
    from cabs.experiments.runs.rules import RULES, rule_kind

    kind = rule_kind(rule or next(iter(RULES)))
    if kind.budget_aware is None:
        raise UsageError(f"--budget-aware is for CABS, and --rule {rule} is another; choose one")
    return kind.budget_aware
