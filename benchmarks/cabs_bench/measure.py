"""Times and peaks of contenders, everything interleaved in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from cabs import hardware
from cabs._version import __version__
from cabs.scheduler import auto_every
from cabs_bench.contenders import CONTENDERS, Step, installed, quiet
from cabs_bench.networks import Network

QUICK = 0.15
"""A plain step of fewer seconds than this is timed several at a time, after one that warms the caches."""

REASONABLE = 12.0
"""A contender slower than this many plain steps is timed once only."""


@dataclass
class Result:
    """One network at one batch size.

    Attributes:
        plain_ms: the median of the plain step, in milliseconds.
        time: the median ratio of each contender's step to the plain step of the same round.
        memory: the ratio of peak tensor memory, parameters and gradients included.
        rounds: how many rounds were timed.
        refused: why a contender does not run; if that is the plain step, there is nothing else.
    """

    network: str
    examples: int
    plain_ms: float
    plain_mib: float
    time: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def measure(
    name: str,
    network: Network,
    examples: int,
    contenders: list[str],
    seconds: float,
    tell: Callable[[str], None],
    least_rounds: int = 3,
    compiled: bool = False,
) -> Result:
    """Times one network at one batch size for about so many seconds, and some rounds at least.

    Every round makes a step or some of each contender, in an order that moves on by one from round to round; ratios are
    taken within rounds, so that whatever slows the machine for a while slows both sides.
    """
    torch.manual_seed(0)
    if compiled:
        torch.compiler.reset()  # else sizes that were timed before make it compile for any size
    inputs, targets = network.inputs(examples), network.targets(examples)
    result = Result(name, examples, 0.0, 0.0)
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    once = 0.0
    for contender in ["plain", *(c for c in contenders if c != "plain")]:
        if not installed(contender):
            result.refused[contender] = "not installed"
            continue
        tell(f"{name}, m = {examples}: {contender}")
        try:
            step, peaks[contender], took = _prepare(network, contender, inputs, targets, compiled)
        except Exception as error:  # a contender may refuse a network in any way
            result.refused[contender] = _why(error)
            if contender == "plain":
                return result
            continue
        if contender == "plain":
            once = took
        if took > REASONABLE * once:
            result.time[contender] = took / once
        else:
            steps[contender] = step
    try:
        times = _rounds(steps, inputs, targets, seconds, least_rounds, once < QUICK, tell, result)
    except Exception as error:  # of the plain step, without which there are no ratios
        result.refused["plain"] = _why(error)
        return result
    result.plain_ms = 1e3 * statistics.median(times["plain"])
    result.plain_mib = peaks["plain"] / 2**20
    for contender, taken in times.items():
        result.time[contender] = statistics.median(a / b for a, b in zip(taken, times["plain"], strict=True))
    result.memory = {c: peak / peaks["plain"] for c, peak in peaks.items() if c not in result.refused}
    return result


def _why(error: Exception) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:160]


def _prepare(
    network: Network, contender: str, inputs: Tensor, targets: Tensor, compiled: bool
) -> tuple[Step, int, float]:
    torch.manual_seed(1)
    model = network.build()
    if compiled:
        model = torch.compile(model)  # type: ignore[assignment]
    with quiet():
        step = CONTENDERS[contender][0](network, model)
        step(inputs, targets)
        begun = time.perf_counter()
        step(inputs, targets)
        took = time.perf_counter() - begun
        count = auto_every(len(inputs)) if contender == "default" else 1
        peak = max(peak_bytes(lambda: step(inputs, targets), model) for _ in range(count))
    return step, peak, took


def _rounds(
    steps: dict[str, Step],
    inputs: Tensor,
    targets: Tensor,
    seconds: float,
    least_rounds: int,
    quick: bool,
    tell: Callable[[str], None],
    result: Result,
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {contender: [] for contender in steps}
    order = list(steps)
    until = time.perf_counter() + seconds
    while result.rounds < least_rounds or time.perf_counter() < until:
        tell(f"{result.network}, m = {result.examples}: round {result.rounds + 1}")
        for contender in list(order):
            try:
                times[contender].append(_time(contender, steps[contender], inputs, targets, quick))
            except Exception as error:  # of memory, say
                if contender == "plain":
                    raise
                result.refused[contender] = _why(error)
                order.remove(contender)
                del times[contender]
        order = order[1:] + order[:1]
        result.rounds += 1
    return times


def _time(contender: str, step: Step, inputs: Tensor, targets: Tensor, quick: bool) -> float:
    count = auto_every(len(inputs)) if quick or contender == "default" else 1
    with quiet():
        if quick:
            _warm_up(contender, step, inputs, targets)
        begun = time.perf_counter()
        for _ in range(count):
            step(inputs, targets)
        return (time.perf_counter() - begun) / count


def _warm_up(contender: str, step: Step, inputs: Tensor, targets: Tensor) -> None:
    # The default measures at one step of a few: a round must begin where the last one began.
    for _ in range(auto_every(len(inputs)) if contender == "default" else 1):
        step(inputs, targets)


def peak_bytes(step: Callable[[], Any], model: nn.Module) -> int:
    """The most memory that tensors take during a step: parameters, and what the step allocates.

    Old gradients go first, for the profiler sees nobody free what was there before it.
    """
    model.zero_grad(set_to_none=True)
    held = sum(p.nbytes for p in model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return held + most


def environment() -> dict[str, Any]:
    """What a result must carry to mean something."""
    versions = {"cabs": __version__, "torch": torch.__version__}
    for package in ("backpack-for-pytorch", "opacus"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        **hardware.describe(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def as_json(results: list[Result], command: str) -> dict[str, Any]:
    return {"command": command, **environment(), "results": [asdict(result) for result in results]}
