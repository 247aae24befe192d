"""What a change costs: step times of two source trees, as ratios to a plain step, everything interleaved.

    git worktree add ../before COMMIT
    python benchmarks/compare.py ../before . --out benchmarks/results/compare

Each tree runs in a process of its own. In every round both processes make some steps of each contender, one process at
a time, and ratios are taken within a round and a process, so that whatever slows the machine slows both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cabs import hardware

CONTENDERS = ["default", "exact"]
NETWORKS = ["mnist", "cifar10", "resnet18", "gpt"]
SIZES = [16, 64, 256]
TOGETHER = 5
"""Steps timed together; of the default as many as share a measurement."""
SIDES = ("before", "after")

SIDE = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
try:
    from cabs_bench.contenders import CONTENDERS
    from cabs_bench.measure import peak_bytes
    from cabs_bench.networks import networks
except ModuleNotFoundError:  # in older trees it was in the package
    from cabs.bench.contenders import CONTENDERS
    from cabs.bench.measure import peak_bytes
    from cabs.bench.networks import networks

try:
    from cabs.scheduler import auto_every
except ImportError:  # in older trees it was five
    auto_every = lambda examples: 5

network, examples = networks()[sys.argv[1]], int(sys.argv[2])
torch.manual_seed(0)
inputs, targets = network.inputs(examples), network.targets(examples)
steps, peaks = {}, {}
for contender in sys.argv[3:]:
    torch.manual_seed(1)
    model = network.build()
    step = steps[contender] = CONTENDERS[contender][0](network, model)
    step(inputs, targets)
    times = auto_every(examples) if contender == "default" else 1  # which measures at one of these
    peaks[contender] = max(peak_bytes(lambda: step(inputs, targets), model) for _ in range(times))
print(json.dumps(peaks), flush=True)
for line in sys.stdin:
    contender, count = line.split()
    count = auto_every(examples) if contender == "default" else int(count)
    steps[contender](inputs, targets)  # the other side has had the processor's caches meanwhile
    begun = time.perf_counter()
    for _ in range(count):
        steps[contender](inputs, targets)
    print((time.perf_counter() - begun) / count, flush=True)
"""


class Side:
    """One tree at work on one network and batch size."""

    def __init__(self, tree: Path, network: str, examples: int, contenders: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SIDE, network, str(examples), "plain", *contenders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(tree.resolve() / part) for part in ("src", "benchmarks")),
                # As ``cabs bench`` does: an allocator that keeps its memory makes for steady times.
                "MALLOC_MMAP_THRESHOLD_": "4294967296",
                "MALLOC_TRIM_THRESHOLD_": "4294967296",
                "KINETO_LOG_LEVEL": "99",
            },
        )
        peaks = json.loads(self._answer())
        self.memory = {name: peak / peaks["plain"] for name, peak in peaks.items()}

    def seconds(self, contender: str) -> float:
        """The time of one step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{contender} {TOGETHER}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended before its time (exit code {self._process.wait()})")
        return line

    def close(self) -> None:
        with self._process:  # which closes its pipes, and waits
            self._process.kill()


def compare(
    trees: list[Path],
    network: str,
    examples: int,
    contenders: list[str],
    seconds: float,
    least_rounds: int,
    starts: int,
) -> dict[str, object]:
    """The ratios of both trees on one network and size: medians of a pair of processes, then over pairs.

    Where memory comes to lie differs from process to process, and with it what a step costs, by more than a tenth on
    small networks: rounds of one pair do not average that out.
    """
    plains: list[float] = []
    times: dict[tuple[int, str], list[float]] = {}
    memory: list[dict[str, float]] = []
    rounds = 0
    for _ in range(starts):
        sides: list[Side] = []
        ratios: dict[tuple[int, str], list[float]] = {}
        try:
            sides = [Side(tree, network, examples, contenders) for tree in trees]
            until, first = time.monotonic() + seconds / starts, rounds
            while rounds - first < least_rounds or time.monotonic() < until:
                for number in (0, 1) if rounds % 2 else (1, 0):
                    plain = sides[number].seconds("plain")
                    plains.append(plain)
                    for contender in contenders:
                        ratios.setdefault((number, contender), []).append(sides[number].seconds(contender) / plain)
                rounds += 1
            memory = [side.memory for side in sides]
        finally:
            for side in sides:
                side.close()
        for key, values in ratios.items():
            times.setdefault(key, []).append(statistics.median(values))
    return {
        "network": network,
        "examples": examples,
        "plain_ms": round(1e3 * statistics.median(plains), 2),
        "starts": starts,
        "rounds": rounds,
        "time": {c: [round(statistics.median(times[number, c]), 3) for number in (0, 1)] for c in contenders},
        "of each start": {c: [[round(r, 3) for r in times[number, c]] for number in (0, 1)] for c in contenders},
        "memory": {c: [round(one[c], 3) for one in memory] for c in contenders},
    }


def table(results: list[dict[str, Any]], contenders: list[str]) -> list[str]:
    names = [f"{c}, {side}" for c in contenders for side in SIDES]
    lines = [
        f"| network, m | plain, ms | n | {' | '.join(names)} | memory of {contenders[0]}, before, after |",
        "| --- " * (4 + len(names)) + "|",
    ]
    for one in results:
        times = " | ".join(f"{ratio:.3f}" for c in contenders for ratio in one["time"][c])
        memory = ", ".join(f"{ratio:.2f}" for ratio in one["memory"][contenders[0]])
        lines.append(
            f"| {one['network']}, {one['examples']} | {one['plain_ms']} | {one['rounds']} | {times} | {memory} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--network", action="append")
    parser.add_argument("--size", action="append", type=int)
    parser.add_argument("--contender", action="append")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long to time each network at each size")
    parser.add_argument("--rounds", type=int, default=4, help="the fewest rounds of a start, however long they take")
    parser.add_argument("--starts", type=int, default=5, help="pairs of processes, among which the seconds are divided")
    parser.add_argument("--out", type=Path, help="write a table (.md) and the numbers (.json) here")
    options = parser.parse_args()
    contenders = options.contender or CONTENDERS
    trees = [options.before, options.after]
    commits = [
        subprocess.check_output(["git", "-C", tree, "rev-parse", "--short", "HEAD"], text=True) for tree in trees
    ]
    report = {
        "command": shlex.join(["python", "benchmarks/compare.py", *sys.argv[1:]]),
        "commits": dict(zip(SIDES, map(str.strip, commits), strict=True)),
        "date": time.strftime("%Y-%m-%d"),
        **hardware.describe(),
        "results": [],
    }
    for network in options.network or NETWORKS:
        for examples in options.size or SIZES:
            times = options.seconds, options.rounds, options.starts
            report["results"].append(compare(trees, network, examples, contenders, *times))
            print(table(report["results"], contenders)[-1], flush=True)
    lines = [
        "# Step times before and after",
        "",
        f"`{report['command']}`, {report['date']}; before is {report['commits']['before']}, after is "
        f"{report['commits']['after']}; {report['processor']}, {report['cores']} cores, {report['threads']} threads, "
        f"torch {report['torch']}. Medians of ratios to the plain step of the same round and process, n rounds of "
        f"{TOGETHER} steps each, and of the default as many as share a measurement; then medians over "
        f"{options.starts} pairs of processes.",
        "",
        *table(report["results"], contenders),
    ]
    if options.out is None:
        print("\n".join(lines))
    else:
        options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
