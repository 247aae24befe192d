"""``cabs sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cabs.experiments.commands.options import OPTIMIZER, PROBLEM, with_rule_parameters
from cabs.experiments.runs.rules import PAPER_RULES

_GRID, _RUNS, _RAY = "Grid (lists are written 0.1,0.03)", "Runs", "Runs on a Ray cluster"


@with_rule_parameters(_GRID, lists=True)
def sweep(
    problem: Annotated[str | None, typer.Argument(help=PROBLEM, show_default=False)] = None,
    grid: Annotated[
        Path | None, typer.Option(help="A YAML file with parts of the grid, by the names of these options.")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(help=f"Rules for the batch size. (Default: {','.join(PAPER_RULES)}.)", rich_help_panel=_GRID),
    ] = None,
    optimizers: Annotated[
        str | None, typer.Option(help=f"{OPTIMIZER} (Default: the problem's.)", rich_help_panel=_GRID)
    ] = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Learning rates. (Default: the paper's, or what suits the optimizer.)", rich_help_panel=_GRID
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds. (Default: 0.)", rich_help_panel=_GRID)] = None,
    lr_decays: Annotated[
        str | None, typer.Option(help="none, cosine, linear: how α falls. (Default: none.)", rich_help_panel=_GRID)
    ] = None,
    estimators: Annotated[
        str | None, typer.Option(help="exact, paper, or both. (Default: exact.)", rich_help_panel=_GRID)
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(help="all or auto: what the variance is measured on. (Default: all.)", rich_help_panel=_GRID),
    ] = None,
    examples: Annotated[
        str | None,
        typer.Option(help="The budget of a run, e.g. 400k. (Default: the problem's.)", rich_help_panel=_GRID),
    ] = None,
    eval_every: Annotated[str | None, typer.Option(help="Examples between evaluations.", rich_help_panel=_GRID)] = None,
    min_batch_size: Annotated[
        int | None, typer.Option(help="The smallest batch size. (Default: the problem's.)", rich_help_panel=_GRID)
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="The largest batch size. (Default: 2048.)", rich_help_panel=_GRID)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the runs. (Default: runs/sweep-PROBLEM.)", rich_help_panel=_RUNS)
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs at a time. (Default: one for each core, or what fits the cluster.)", rich_help_panel=_RUNS
        ),
    ] = None,
    retries: Annotated[int, typer.Option(help="How often to resume a run that crashes.", rich_help_panel=_RUNS)] = 2,
    data: Annotated[Path | None, typer.Option(help="Directory with data sets.", rich_help_panel=_RUNS)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the runs.", rich_help_panel=_RUNS)] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT. Data sets are looked for on the disks of "
            "its nodes, in --data or their $CABS_DATA.",
            rich_help_panel=_RAY,
        ),
    ] = None,
    cpus_per_run: Annotated[
        float | None, typer.Option(help="Cores, and threads to compute with. (Default: 1.)", rich_help_panel=_RAY)
    ] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(help="GPUs, e.g. 1 or 0.5; runs then use CUDA. (Default: 0.)", rich_help_panel=_RAY)
    ] = None,
    memory_per_run: Annotated[
        str | None, typer.Option(help="Memory, e.g. 2G. (Default: not counted.)", rich_help_panel=_RAY)
    ] = None,
    **parameters: Any,
) -> None:
    """Train with every rule, optimizer, learning rate and seed of a grid, and name each method's best learning rate.

    Finished runs are skipped, interrupted runs are resumed, and runs that diverge are recorded as such: the same
    command may be stopped and run again. The default grid is the paper's.

    [bold]cabs sweep mnist --examples 300k --lrs 0.1,0.03,0.01 --sizes 32,128 --thetas 1.0[/]

    [bold]cabs report runs/sweep-mnist[/]

    [bold]cabs sweep cifar10 --ray ray://head:10001 --gpus-per-run 0.5 --data /data[/]
    """
    from rich.console import Console

    from cabs.experiments.errors import UsageError
    from cabs.experiments.sweeps.connection import Resources, check_address, parse_memory
    from cabs.experiments.sweeps.grid import Grid, read_grid
    from cabs.experiments.sweeps.sweep import run_sweep

    given: dict[str, Any] = {
        **parameters,
        "rules": rules,
        "optimizers": optimizers,
        "lrs": lrs,
        "seeds": seeds,
        "estimators": estimators,
        "measure": measure,
        "lr_decays": lr_decays,
        "examples": examples,
        "eval_every": eval_every,
        "min_batch_size": min_batch_size,
        "max_batch_size": max_batch_size,
    }
    wanted = Grid.make(problem, {} if grid is None else read_grid(grid), given)
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: must be at least 1")
    if retries < 0:
        raise UsageError(f"--retries {retries}: must not be negative")
    memory = None if memory_per_run is None else parse_memory(memory_per_run)
    asked: dict[str, Any] = {"cpus": cpus_per_run, "gpus": gpus_per_run, "memory": memory}
    asked = {name: value for name, value in asked.items() if value is not None}
    if ray is not None:
        check_address(ray)
    elif asked:
        raise UsageError(f"--{next(iter(asked))}-per-run goes with --ray: it is about the nodes of a cluster")
    run_sweep(
        wanted,
        out,
        Console(),
        slots=jobs,
        retries=retries,
        data=None if data is None else str(data.absolute()),
        dry_run=dry_run,
        ray=ray,
        resources=Resources(**asked),
    )
