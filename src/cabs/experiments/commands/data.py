"""``cabs data``: lists, fetches and checks data sets."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from cabs.experiments.commands.options import PROBLEM, listed
from cabs.experiments.problems.data.sources import SOURCES

_DATA = typer.Option(help="Directory with data sets. (Default: $CABS_DATA, else a cache.)")
DataOption = Annotated[Path | None, _DATA]

app = typer.Typer(name="data", help="List, fetch and check the data sets of the experiments.", no_args_is_help=True)


@app.command("list")
def list_data(data: DataOption = None) -> None:
    """Show the data sets, and where they are."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from cabs.experiments.errors import DataError
    from cabs.experiments.problems.data.store import data_root, locate

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "data set", "download", "where"):
        table.add_column(heading, overflow="fold")
    table.add_row("digits", "UCI digits, 8×8", "none", "in this package")
    for source in SOURCES.values():
        try:
            where = escape(str(locate(source, data)[0].parent))
        except DataError:
            where = f"[dim]not here; cabs data fetch {source.name}[/]"
        table.add_row(source.name, source.title, f"{source.size / 1e6:.0f} MB", where)
    console = Console()
    console.print(table, soft_wrap=not console.is_terminal)
    console.print(f"\nlooked in {data_root(data)}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(help=f"{listed(list(SOURCES))}.", metavar="NAME...")],
    data: DataOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that have other contents.")] = False,
) -> None:
    """Download the official files, resuming an earlier attempt, and verify them."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from cabs.experiments.problems.data import fetch as transfer
    from cabs.experiments.problems.data.store import data_root

    for name in names:
        _check_name(name)
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    for source in (SOURCES[name] for name in names):
        directory = data_root(data) / source.name
        for download in source.downloads:
            if transfer.is_fetched(source, download, directory):
                console.print(f"{download.name}: already there", markup=False, highlight=False)
                continue
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
                task = progress.add_task(download.name, total=download.size)
                transfer.fetch(
                    source,
                    download,
                    directory,
                    lambda done, progress=progress, task=task: progress.update(task, completed=done),  # type: ignore[misc]
                    force=force,
                )
            console.print(f"{download.name}: fetched and verified", markup=False, highlight=False)
        console.print(f"{source.title} is in {directory}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help=PROBLEM)],
    data: DataOption = None,
) -> None:
    """Read a data set and say what is in it, and whether it is the official one."""
    from cabs.experiments.problems import problem

    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        content = problem(name).load(data)
    first, *more = content.summary()
    print("\n".join((f"{name}: {first}", *more)))
    for remark in remarks:
        print(f"note: {remark.message}")


def _check_name(name: str) -> None:
    from cabs.experiments.errors import UsageError, named
    from cabs.experiments.problems import DIGITS

    if name == DIGITS.name:
        raise UsageError(f"{name} comes with the package; there is nothing to fetch")
    named(name, SOURCES, "data set")
