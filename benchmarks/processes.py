"""What it costs several processes to agree on the batch size, and what all of cabs costs them.

    python benchmarks/processes.py benchmarks/results/processes [--rounds 40] [--processes 2] [--share 64]

Processes talk over gloo, each with one thread. In every round each contender makes the same number of steps on the
CIFAR-10 network of the paper, in an order that moves on from round to round; ratios are taken within rounds and given
as medians.

- plain: DistributedDataParallel and SGD, nothing else.
- agreed: with a scheduler as users get it (some examples at every fifth step), which adds up a few numbers over the
  processes at every step.
- apart: the same, but every process takes its own numbers for everybody's. agreed / apart is the cost of agreeing.
- … in backward: the loop with scheduler.backward(loss), which has the sum on its way while the backward pass runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader
from cabs.parallel import Replicas
from cabs_bench.measure import environment
from cabs_bench.networks import networks

STEPS = 10
"""Steps of a contender in a round: a multiple of the five that share a measurement."""

CONTENDERS = ("plain", "apart", "agreed", "apart in backward", "agreed in backward")


def numbers_of_one(team: Any, numbers: Tensor) -> Callable[[], Tensor]:
    """In the place of the sum over processes: as if the others had the same."""
    return lambda: numbers.double() * team.size


def contender(name: str, examples: int) -> Callable[[], None]:
    """A function that makes one step."""
    torch.manual_seed(0)
    network = networks()["cifar10"]
    model = DistributedDataParallel(network.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(network.inputs(4 * examples), network.targets(4 * examples))
    loader = AdaptiveLoader(data, batch_size=examples, shuffle=True, seed=0, stream=True)
    if name == "plain":
        loader.share(dist.get_rank(), dist.get_world_size())
        scheduler = None
    else:
        scheduler = CABS(model, optimizer, loader, min_batch_size=examples, max_batch_size=examples)
    if name.startswith("apart"):
        assert scheduler is not None
        team = scheduler._team
        assert isinstance(team, Replicas)
        team.start_sum = lambda numbers: numbers_of_one(team, numbers)  # type: ignore[method-assign]
    batches: Iterator[Any] = iter(loader)

    def step() -> None:
        inputs, targets = next(batches)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        if scheduler is not None and name.endswith("in backward"):
            scheduler.backward(loss)
            optimizer.step()
            scheduler.step()
        else:
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step(loss)

    return step


def work(rank: int, processes: int, share: int, rounds: int, store: str, results: Any) -> None:
    """One process; the first one reports the seconds of each contender in each round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    steps = {name: contender(name, processes * share) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(-1, rounds):  # the first round warms up
        turn = number % len(CONTENDERS)
        for name in CONTENDERS[turn:] + CONTENDERS[:turn]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            if number >= 0:
                times[name].append((time.perf_counter() - start) / STEPS)
        if rank == 0:
            print(f"round {number + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    if rank == 0:
        results.put({"times": times, "message": message_seconds()})
    else:
        message_seconds()
    dist.barrier()
    dist.destroy_process_group()


def message_seconds() -> float:
    """The median time of the sum alone, with nothing else to do."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        dist.all_reduce(torch.zeros(6, dtype=torch.float64))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ratio(times: dict[str, list[float]], name: str, base: str) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
    quarter = len(ratios) // 4
    return {
        "median": statistics.median(ratios),
        "lower quartile": ratios[quarter],
        "upper quartile": ratios[-1 - quarter],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where to write, without suffix")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--share", type=int, default=64, help="examples of each process")
    options = parser.parse_args()
    # An allocator that keeps its memory, as in `cabs bench`.
    os.environ.update(MALLOC_MMAP_THRESHOLD_="4294967296", MALLOC_TRIM_THRESHOLD_="4294967296")
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (options.processes, options.share, options.rounds, f"{directory}/store", results)
        torch.multiprocessing.spawn(work, arguments, nprocs=options.processes)
    got = results.get()
    times = got["times"]
    pairs = [("agreed", "apart"), ("agreed in backward", "apart in backward"), ("agreed", "plain")]
    report = {
        "command": shlex.join(["python", "benchmarks/processes.py", *sys.argv[1:]]),
        "environment": {**environment(), "threads": 1, "processes": options.processes},
        "examples a process": options.share,
        "n": options.rounds,
        "steps a round": STEPS,
        "step, ms": {name: round(1e3 * statistics.median(times[name]), 2) for name in CONTENDERS},
        "the sum alone, ms": round(1e3 * got["message"], 3),
        "ratios": {f"{a} / {b}": {k: round(v, 4) for k, v in ratio(times, a, b).items()} for a, b in pairs},
        "seconds": {name: [round(t, 5) for t in times[name]] for name in CONTENDERS},
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    options.out.with_suffix(".json").write_text(text + "\n")
    print(json.dumps({key: report[key] for key in ("step, ms", "the sum alone, ms", "ratios", "n")}, indent=1))


if __name__ == "__main__":
    main()
