"""``cabs probe``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cabs.experiments.commands.options import OPTIMIZER

_OWN, _TRY = "Problem", "What to try"


def probe(
    problem: Annotated[
        str,
        typer.Argument(
            help="One of the problems of cabs train, or package.module:function, where the function returns "
            "(model, dataset, loss, optimizer) and loss is a function of a batch.",
            metavar="PROBLEM | MODULE:FUNCTION",
        ),
    ] = "digits",
    optimizer: Annotated[
        str | None, typer.Option(help=f"{OPTIMIZER} (Default: the problem's.)", rich_help_panel=_OWN)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="The learning rate α. (Default: the problem's.)", rich_help_panel=_OWN)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Directory with data sets. (Default: $CABS_DATA, else a cache.)", rich_help_panel=_OWN),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default), cuda, mps, ...", rich_help_panel=_OWN)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="The batch size that training has at present. (Default: 32.)")
    ] = None,
    min_batch_size: Annotated[
        int | None, typer.Option(help="The smallest size to recommend. (Default: the problem's, else 16.)")
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option(help="The largest size to try and to recommend.", rich_help_panel=_TRY)
    ] = 2048,
    after: Annotated[
        str, typer.Option(help="Train on so many examples first, e.g. 20k, on a copy.", rich_help_panel=_TRY)
    ] = "0",
    examples: Annotated[
        str, typer.Option(help="Measure gradients on so many examples.", rich_help_panel=_TRY)
    ] = "1024",
    seconds: Annotated[
        float, typer.Option(help="About how long to try sizes, and to time steps.", rich_help_panel=_TRY)
    ] = 10.0,
    loss_floor: Annotated[
        float, typer.Option(help="A lower bound of the loss that training cannot get below.", rich_help_panel=_TRY)
    ] = 0.0,
    estimator: Annotated[
        str,
        typer.Option(help="exact, or microbatch: any model at all, with wider intervals.", rich_help_panel=_TRY),
    ] = "exact",
    assume_sgd: Annotated[
        bool,
        typer.Option("--assume-sgd", help="Take any optimizer for plain SGD.", rich_help_panel=_TRY),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Decides which examples are drawn, and a problem's weights.", rich_help_panel=_TRY)
    ] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads to compute with. (Default: all.)")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write probe.txt, probe.json and probe.png to this directory.")
    ] = None,
) -> None:
    """Find out what batch size is useful, before training: what fits, what a step costs, how noisy gradients are.

    [bold]cabs probe mnist --optimizer sgd --lr 0.1[/]

    [bold]cabs probe shakespeare --after 20k --out probes/shakespeare[/]

    [bold]cabs probe mypackage.training:parts --batch-size 64[/]
    """
    from rich.console import Console

    from cabs.experiments.counts import parse_count
    from cabs.experiments.errors import UsageError
    from cabs.experiments.runs.probes import parts_of, run, write

    own: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "data": data, "device": device}
    options = {
        "batch_size": batch_size,
        **({} if min_batch_size is None else {"min_batch_size": min_batch_size}),
        "max_batch_size": max_batch_size,
        "after": 0 if after == "0" else parse_count(after),
        "examples": parse_count(examples),
        "seconds": seconds,
        "loss_floor": loss_floor,
        "estimator": estimator,
        "assume_sgd": assume_sgd,
        "seed": seed,
    }
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; give a directory")
    console = Console(highlight=False)
    parts = parts_of(problem, own, seed, threads)
    report = run(parts, options, console)
    if out is not None:
        for path in write(report, out):
            console.print(f"  {path}", markup=False, soft_wrap=True)
