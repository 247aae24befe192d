"""CABS with a horizon beside CABS and constant sizes, with and without cosine decay: one table for docs.

    python benchmarks/horizon_table.py OUT [--data DIR] [--problems digits,mnist] [--examples 90k] [--jobs 1]
        [--lrs 0.03,0.1,0.3] [--seeds 0,1,2] [--sizes 16,32,64] [--min-batch-size M] [--eval-every 9k] [--table-only]

All runs are made by ``cabs sweep``, two sweeps for each problem, in directories below OUT. The same command goes on
where it was stopped. ``OUT/table.md`` has, for every learning rate, the training loss, test accuracy and number of
steps at the end: the mean over seeds, and ± the standard deviation. Data sets are looked for in --data, or $CABS_DATA.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cabs import __version__, hardware
from cabs.experiments.errors import CommandError
from cabs.experiments.problems import title_of
from cabs.experiments.reports.selection import by_method
from cabs.experiments.runs.reader import Run, find_runs


def sweep(arguments: argparse.Namespace, problem: str, name: str, options: Sequence[str]) -> int:
    """One sweep of a problem, gone on with if it was begun."""
    command = [
        *(sys.executable, "-m", "cabs", "sweep", problem),
        *("--lrs", arguments.lrs, "--seeds", arguments.seeds, "--examples", arguments.examples),
        *("--eval-every", arguments.eval_every, "--jobs", str(arguments.jobs)),
        *("--out", str(arguments.out / f"{problem}-{name}")),
        *(("--data", str(arguments.data)) if arguments.data else ()),
        *(("--min-batch-size", str(arguments.min_batch_size)) if arguments.min_batch_size else ()),
        *options,
    ]
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode


def spread(values: Sequence[float], form: str) -> str:
    """A mean, and the deviation if there are several."""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), form)}"


def cell(runs: Sequence[Run]) -> str:
    """What came of the seeds of one method with one learning rate."""
    diverged = sum(not run.finished for run in runs)
    if diverged:
        return f"diverged ({diverged} of {len(runs)})"
    loss = spread([run.final_loss for run in runs], ".2g")
    score = spread([run.final_score * 100 for run in runs], ".2f")
    steps = statistics.fmean(run.evaluations[-1]["step"] for run in runs)
    return f"{loss}<br>{score}%<br>{steps:,.0f} steps"


def table(problem: str, runs: Sequence[Run]) -> str:
    """The methods of a problem, with every learning rate."""
    settled = [run for run in runs if run.status in ("finished", "diverged")]
    rates = sorted({run.config.lr for run in settled})
    lines = [
        f"### {title_of(problem)}, {max(run.config.examples for run in settled):,} examples, "
        f"{len({run.config.seed for run in settled})} seeds",
        "",
        "| training loss, test accuracy, steps | " + " | ".join(f"α = {rate:g}" for rate in rates) + " |",
        "| --- |" + " --- |" * len(rates),
    ]
    for method in by_method(settled):
        by_rate = {setting.lr: setting.runs for setting in method.settings}
        cells = [cell(by_rate[rate]) if rate in by_rate else "–" for rate in rates]
        lines.append(f"| {method.name} | " + " | ".join(cells) + " |")
    missing = len(runs) - len(settled)
    if missing:
        lines += ["", f"{missing} runs are not finished and left out."]
    return "\n".join(lines)


def main() -> None:
    """Runs what is not finished, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="directory with data sets")
    parser.add_argument("--problems", default="digits,mnist")
    parser.add_argument("--examples", default="90k")
    parser.add_argument("--lrs", default="0.03,0.1,0.3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--sizes", default="16,32,64", help="constant sizes")
    parser.add_argument("--min-batch-size", type=int, help="of the adaptive rules; the problem's by default")
    parser.add_argument("--eval-every", default="9k", help="examples between evaluations")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    parts, failed = [], False
    for problem in arguments.problems.split(","):
        if not arguments.table_only:
            failed |= bool(sweep(arguments, problem, "adaptive", ["--rules", "horizon,cabs"]))
            constant = ["--rules", "constant", "--sizes", arguments.sizes, "--lr-decays", "none,cosine"]
            failed |= bool(sweep(arguments, problem, "constant", constant))
        directories = [arguments.out / f"{problem}-{name}" for name in ("adaptive", "constant")]
        try:
            parts.append(table(problem, find_runs([path for path in directories if path.is_dir()]).runs))
        except (CommandError, ValueError) as error:
            print(f"{problem}: no table yet: {error}", file=sys.stderr)
            continue
        about = hardware.describe(1)
        note = f"cabs {__version__}, " + ", ".join(f"{name} {value}" for name, value in about.items())
        (arguments.out / "table.md").write_text("\n\n".join([*parts, note]) + "\n", encoding="utf-8")
    print("\n\n".join(parts))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
