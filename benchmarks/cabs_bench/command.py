"""``cabs bench``."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from cabs.experiments.files import atomically, write_json
from cabs_bench.contenders import COMPILED, CONTENDERS, OPTIMIZERS, OURS
from cabs_bench.contenders import chosen as selection
from cabs_bench.measure import Result, as_json, measure
from cabs_bench.networks import networks
from cabs_bench.report import markdown

# The profiler, which finds the peaks of memory, talks.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def bench(
    network: Annotated[
        list[str] | None, typer.Option(help="Networks to time; may be repeated. All by default.")
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(help="Batch sizes, at least 2; may be repeated. 16, 64 and 256.", min=2)
    ] = None,
    contender: Annotated[list[str] | None, typer.Option(help="Contenders; may be repeated. All by default.")] = None,
    optimizer: Annotated[str, typer.Option(help="What everybody steps with: sgd, momentum or adamw.")] = "sgd",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the network: the default's compiled step against the plain one.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="Whether to run what is not ours.")] = True,
    seconds: Annotated[float, typer.Option(help="How long to time each network at each size.", min=0)] = 20.0,
    rounds: Annotated[int, typer.Option(help="The fewest rounds, however long they take.", min=1)] = 3,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.", min=1, max=1024)] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the results here, as .json and .md, as soon as each is there.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results that are there already.")] = False,
) -> None:
    """Time the gradient variance: ratios of step time and peak memory to a plain step.

    Everything is interleaved in one run, so that ratios hold on a busy machine too. BackPACK and Opacus take part
    where they are installed: pip install --no-deps backpack-for-pytorch opacus, with what these import. A contender
    that cannot run, or that needs more memory than there is, is listed with its reason.
    """
    console = Console(stderr=True)
    chosen = _choose("network", network, list(networks()))
    available = COMPILED if compile else list(CONTENDERS) if peers else OURS
    contenders = _choose("contender", contender, available)
    (chosen_optimizer,) = _choose("optimizer", [optimizer], list(OPTIMIZERS))
    selection["optimizer"] = chosen_optimizer
    _check_out(out, overwrite)
    _steady_allocator()
    _limit_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    results: list[Result] = []
    with console.status("…") as status:
        for name in chosen:
            for examples in size or [16, 64, 256]:
                settings = contenders, seconds, status.update, rounds, compile
                results.append(measure(name, networks()[name], examples, *settings))
                _print(console, results[-1], contenders)
                _write(results, out)
    if out is None:
        print(markdown(as_json(results, _command())))


def _steady_allocator() -> None:
    """Starts over with an allocator that keeps its memory.

    glibc gives large blocks back to the system and faults them in again, or does not, as it happens: up to a quarter of
    a step that one contender pays and the next does not.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
    if (
        sys.platform == "linux"
        and Path(sys.argv[0]).name in ("cabs", "__main__.py")
        and not settings.keys() & os.environ
    ):
        os.execve(sys.executable, [sys.executable, "-m", "cabs", *sys.argv[1:]], {**os.environ, **settings})


def _limit_memory() -> None:
    """Makes an allocation that would not fit fail, which one contender pays for, rather than the whole run."""
    if sys.platform != "linux":
        return
    import resource

    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = available * 9 // 10
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _check_out(out: Path | None, overwrite: bool) -> None:
    if out is None:
        return
    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is not a directory", param_hint="--out")
    for path in (out.with_suffix(".json"), out.with_suffix(".md")):
        if path.exists() and not overwrite:
            raise typer.BadParameter(f"{path} exists: choose another name, or pass --overwrite", param_hint="--out")


def _choose(kind: str, wanted: list[str] | None, available: list[str]) -> list[str]:
    for name in wanted or []:
        if name not in available:
            raise typer.BadParameter(f"no {kind} {name!r}: choose of {', '.join(available)}", param_hint=f"--{kind}")
    return wanted or available


def _command() -> str:
    return shlex.join(["cabs", *sys.argv[1:]])


def _write(results: list[Result], out: Path | None) -> None:
    if out is None:
        return
    report = as_json(results, _command())
    write_json(out.with_suffix(".json"), report)
    with atomically(out.with_suffix(".md")) as file:
        file.write(markdown(report).encode())


def _print(console: Console, result: Result, contenders: list[str]) -> None:
    table = Table(title=f"{result.network}, m = {result.examples}: plain step {result.plain_ms:.1f} ms", min_width=60)
    table.add_column("contender")
    table.add_column("time", justify="right")
    table.add_column("memory", justify="right")
    for name in contenders:
        if name in result.refused:
            table.add_row(name, "not installed" if result.refused[name] == "not installed" else "refused", "")
        elif name != "plain" and name in result.time:
            table.add_row(name, f"{result.time[name]:.3f}", f"{result.memory[name]:.2f}")
    console.print(table)
