"""`cabs probe`: the parts of a problem or of a function of one's own, probed, shown and written."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

import cabs
from cabs import probe
from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.files import atomically, write_json, writing
from cabs.experiments.problems import problem
from cabs.experiments.problems.table import FOLDER_PREFIX
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.crew import usable_device
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.runs.session import use_threads
from cabs.probe import Report
from cabs.probe.requirements import needed

_PACKAGE = Path(cabs.__file__).parent
_RETURNS = "it must return (model, dataset, loss, optimizer)"


@dataclass(frozen=True)
class Parts:
    """What is probed.

    Attributes:
        title: its name for people.
        arguments: model, dataset, loss and optimizer.
        threads: to compute with; None for as many as there are.
        min_batch_size: the smallest size of a problem's runs.
    """

    title: str
    arguments: tuple[Any, Any, Any, Any]
    threads: int | None
    min_batch_size: int = 16


def parts_of(name: str, own: Mapping[str, Any], seed: int, threads: int | None) -> Parts:
    """The parts of a problem, or those that a function returns.

    Args:
        name: a problem's, or ``module:function``.
        own: options that only a problem has: ``optimizer``, ``lr``, ``data`` and ``device``.
        seed: decides a problem's initial weights.
        threads: to compute with.

    Raises:
        UsageError: There is no such problem or function, or it returns something else.
    """
    if ":" not in name or name.startswith(FOLDER_PREFIX):
        return _of_problem(name, own, seed, threads)
    if given := [f"--{option}" for option, value in own.items() if value is not None]:
        raise UsageError(f"{', '.join(given)}: {name} makes model, data and optimizer itself; say it there")
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads}: must be at least 1")
    return Parts(name, _of_function(name), threads)


def _of_problem(name: str, own: Mapping[str, Any], seed: int, threads: int | None) -> Parts:
    found = problem(name)
    data = own["data"]
    given = {**own, "data": None if data is None else str(data.absolute()), "seed": seed, "threads": threads}
    config = RunConfig.make(found, given)
    device = usable_device(config.device)
    dataset = found.load(data).train.dataset()
    model = found.network(seed).to(device)
    optimizer = OPTIMIZERS[config.optimizer].optimizer(model, config.lr, config.weight_decay)

    def loss(batch: Any) -> torch.Tensor:
        examples, targets = batch
        # Augmentation draws from torch's own generator, which the probe puts back.
        inputs = found.inputs.train(examples.to(device), torch.default_generator)
        return found.loss(model(inputs), targets.to(device))

    return Parts(found.title, (model, dataset, loss, optimizer), config.threads, found.min_batch_size)


def _of_function(name: str) -> tuple[Any, Any, Any, Any]:
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UsageError(f"{name}: there is no module {error.name} here or among the installed ones") from error
        raise UsageError(f"{name}: {module_name} needs {error.name}, which is not installed") from error
    except (TypeError, ValueError) as error:  # an empty name, a relative one
        raise UsageError(f"{name}: {module_name!r} is no name of a module; say package.module:function") from error
    except Exception as error:
        raise _own_error(f"importing {module_name}", error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "has no function" if function is None else "has something else than a function called"
        raise UsageError(f"{name}: {module_name} {what} {function_name!r}")
    if needed(function):
        raise UsageError(f"{name} needs arguments, and is called without any: {_RETURNS}")
    try:
        returned = function()
    except Exception as error:
        raise _own_error(name, error) from error
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        what = type(returned).__name__
        if isinstance(returned, tuple | list):
            what = f"{what} of {len(returned)}"
        raise UsageError(f"{name} returned a {what}: {_RETURNS}")
    model, dataset, loss, optimizer = returned
    return model, dataset, loss, optimizer


def _own_error(what: str, error: Exception) -> CommandError:
    """What to say of an error: words of ours as they are, others with the line of the user's code they are from."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)]
    ours = [path.is_relative_to(_PACKAGE) for path in frames]
    if ours[-1]:
        return CommandError(f"{what}: {error}")
    theirs = [
        f" ({path}, line {line})"
        for path, line, own in zip(frames, lines, ours, strict=True)
        if not own and path.is_file() and "site-packages" not in path.parts
    ]
    return CommandError(f"{what}: {type(error).__name__}: {error}{theirs[-1] if theirs else ''}")


def run(parts: Parts, options: Mapping[str, Any], console: Console) -> Report:
    """Probe, with a word on what is going on, and show what was found.

    Raises:
        CommandError: It cannot be probed; the message says why.
    """
    with console.status("…") as status, nullcontext() if parts.threads is None else use_threads(parts.threads):
        try:
            given = {"min_batch_size": parts.min_batch_size, **options}
            report = probe(*parts.arguments, **given, tell=lambda what: status.update(f"{what} …"))
        except (MemoryError, OSError):
            raise
        except Exception as error:
            raise _own_error(parts.title, error) from error
    show(report, parts.title, console)
    return report


def show(report: Report, title: str, console: Console) -> None:
    """A report in a terminal."""
    console.print(f"[bold]{escape(title)}[/] · {escape(report.title)}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="dim")
    for row in report.rows():
        table.add_row(*map(escape, row))
    console.print(Padding(table, (1, 0, 1, 2)))
    console.print(f"[bold green]{escape(report.headline)}[/]")
    for mark, lines in (("•", report.recommendation.reasons), ("Note:", report.notes())):
        for line in lines:
            grid = Table.grid(padding=(0, 1))
            grid.add_row(mark, escape(line), style="dim" if mark == "Note:" else "")
            console.print(Padding(grid, (0, 0, 0, 2)))


def write(report: Report, out: Path) -> list[Path]:
    """Write text, numbers and picture to a directory; returns the files."""
    text, numbers, picture = (out / f"probe.{kind}" for kind in ("txt", "json", "png"))
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with atomically(text) as file:
        file.write(f"{report}\n".encode())
    write_json(numbers, report.to_dict())
    with atomically(picture) as file:
        report.picture(file)
    return [text, numbers, picture]
