"""Gain per second: CABS with the cost of a step measured, beside minima set by hand, in seconds of training.

    python benchmarks/seconds.py PROBLEM OUT --target LOSS,… [--data DIR] [--lr 0.1] [--examples 30k]
        [--eval-every 1k] [--minima 2,8,16,32,64] [--noise-shares 0.5] [--seeds 0,1,2] [--threads 1]

One run after another, all minima of a seed before the next seed, so that whatever slows the machine slows all. Wants a
machine that does nothing else. The gradient variance is measured as the library does by default. OUT/PROBLEM.md says
how many seconds and examples it took until the training loss was at the target for good: the first evaluation from
which on the mean of all evaluations is no higher. Of several targets each has a table. The noise shares are those of
the runs with a measured cost; minima are run with a quarter.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from cabs import __version__, hardware
from cabs.experiments.runs.reader import Run, read_run


def train(arguments: argparse.Namespace, minimum: int, cost: str, share: float, seed: int) -> Run:
    """One run, or what an earlier command made of it."""
    out = arguments.out / f"{arguments.problem}-{cost}-{minimum}-share{share:g}-seed{seed}"
    if not (out / "summary.json").exists():
        command = [
            *(sys.executable, "-m", "cabs", "train", arguments.problem, "--cost", cost, "--seed", str(seed)),
            *("--noise-share", str(share)),
            *("--min-batch-size", str(minimum), "--lr", str(arguments.lr), "--examples", arguments.examples),
            *("--eval-every", arguments.eval_every, "--measure", "auto", "--threads", str(arguments.threads)),
            *("--out", str(out), "--force"),
            *(("--data", str(arguments.data)) if arguments.data else ()),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_run(out)


def reached(run: Run, target: float) -> tuple[float, float] | None:
    """Seconds and examples until the loss was at the target; None if it never was."""
    losses = [row["train_loss"] for row in run.evaluations]
    for i, row in enumerate(run.evaluations):
        if losses[i] <= target and statistics.fmean(losses[i:]) <= target:
            return row["seconds"], row["examples"]
    return None


def line(name: str, runs: list[Run], target: float) -> str:
    """A row of the table; runs that never were there count as the slowest in the median."""
    ends = [reached(run, target) for run in runs]
    there = [end for end in ends if end]
    size = statistics.fmean(run.evaluations[-1]["examples"] / run.evaluations[-1]["step"] for run in runs)
    middle = statistics.median(end[0] if end else math.inf for end in ends)
    row = f"| {name} | {size:.0f} | {middle:.3g} |" if math.isfinite(middle) else f"| {name} | {size:.0f} | never |"
    if len(there) < len(runs):
        return f"{row} {len(runs) - len(there)} of {len(runs)} never | – | {len(runs)} |"
    seconds, examples = zip(*there, strict=True)
    spread = f" ± {statistics.stdev(seconds):.2g}" if len(runs) > 1 else ""
    return f"{row} {statistics.fmean(seconds):.3g}{spread} | {statistics.fmean(examples):,.0f} | {len(runs)} |"


def name_of(minimum: int, cost: str, share: float) -> str:
    """A method in the table."""
    if cost == "examples":
        return f"least size {minimum}"
    return f'**`cost="measured"`, least size {minimum}**' + (f", noise share {share:g}" if share != 0.5 else "")


def main() -> None:
    """Runs what is not there yet, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True, help="training losses to reach")
    parser.add_argument("--data", type=Path, help="directory with data sets")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--examples", default="30k")
    parser.add_argument("--eval-every", default="1k")
    parser.add_argument("--minima", default="2,8,16,32,64")
    parser.add_argument("--noise-shares", default="0.5", help="of the runs with a measured cost")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    targets = [float(target) for target in arguments.target.split(",")]
    methods = [
        *((2, "measured", float(share)) for share in arguments.noise_shares.split(",")),
        *((int(minimum), "examples", 0.25) for minimum in arguments.minima.split(",")),
    ]
    runs: dict[tuple[int, str, float], list[Run]] = {method: [] for method in methods}
    for seed in map(int, arguments.seeds.split(",")):
        for method in methods:
            runs[method].append(train(arguments, *method, seed))
            print(*method, f"seed {seed}", runs[method][-1].evaluations[-1], flush=True)
    machine = hardware.describe(arguments.threads)
    rows = [
        f"`{shlex.join(['python', 'benchmarks/seconds.py', *sys.argv[1:]])}`; cabs {__version__}, "
        f"{time.strftime('%Y-%m-%d')}; {', '.join(f'{name} {value}' for name, value in machine.items())}",
    ]
    for target in targets:
        rows += [
            "",
            f"| {arguments.problem}, α = {arguments.lr:g}: to a training loss of {target:g} "
            "| mean size | median seconds | mean | examples | n |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *(line(name_of(*method), made, target) for method, made in runs.items()),
        ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{arguments.problem}.md").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
