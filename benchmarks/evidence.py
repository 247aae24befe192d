"""The runs that results/README.md tells of: sweeps of the grids in results/grids, and what the report needs of each.

    python benchmarks/evidence.py [GRID ...] [--data DIR] [--jobs N] [--keep-only]

A grid is the name of a file in results/grids, without .yaml; all of them by default. Runs are made by ``cabs sweep`` in
runs/evidence/GRID, and kept in results/GRID: configuration, summary, all evaluations, and some of the step rows. Runs
that are kept are not run again. The same command goes on where it was stopped; ``--keep-only`` runs nothing. Then
``cabs report results`` makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cabs.experiments.errors import CommandError
from cabs.experiments.runs.directory import CONFIG, SUMMARY
from cabs.experiments.runs.metrics import METRICS
from cabs.experiments.runs.reader import SETTLED, read_status

RESULTS = Path(__file__).resolve().parent.parent / "results"
STEP_ROWS = 25
"""Step rows that are kept of a run: enough for a curve of batch sizes."""


def sweep(grid: str, runs: Path, data: Path | None, jobs: int | None) -> int:
    """Makes the runs of a grid that are not there yet."""
    command = [sys.executable, "-m", "cabs", "sweep", "--grid", str(RESULTS / "grids" / f"{grid}.yaml")]
    command += ["--out", str(runs)] + (["--jobs", str(jobs)] if jobs else [])
    print("$", " ".join(command), flush=True)
    # Through the environment, so that no configuration has a path of this machine in it.
    environment = {**os.environ, **({"CABS_DATA": str(data.absolute())} if data else {})}
    return subprocess.run(command, check=False, env=environment).returncode


def keep(run: Path, kept: Path) -> None:
    """What the report needs of a run that is settled."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, SUMMARY):
        shutil.copyfile(run / name, kept / name)
    rows = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "loss" in row]
    stride = max(1, len(steps) // STEP_ROWS)
    chosen = {id(row) for row in [*steps[::stride], *steps[-1:]]}
    thinned = [_rounded(row) for row in rows if "loss" not in row or id(row) in chosen]
    (kept / METRICS).write_text("".join(json.dumps(row) + "\n" for row in thinned), encoding="utf-8")


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}


def bring_back(kept: Path, runs: Path) -> None:
    """Runs that are kept count as made."""
    for run in kept.iterdir() if kept.is_dir() else ():
        if (run / SUMMARY).exists() and not (runs / run.name).exists():
            shutil.copytree(run, runs / run.name)


def settled(runs: Path) -> list[Path]:
    """The runs of a sweep that are not to be resumed."""
    found = []
    for run in sorted(path for path in runs.iterdir() if (path / CONFIG).exists()) if runs.is_dir() else ():
        try:
            if read_status(run) in SETTLED:
                found.append(run)
        except CommandError as error:
            print(error, file=sys.stderr)
    return found


def main() -> None:
    """Runs what is not there yet, and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="*")
    parser.add_argument("--data", type=Path, help="directory with data sets")
    parser.add_argument("--jobs", type=int, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence"), help="where runs are made")
    parser.add_argument("--keep-only", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    there = sorted(path.stem for path in (RESULTS / "grids").glob("*.yaml"))
    if unknown := set(arguments.grids) - set(there):
        sys.exit(f"no grid {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    failed = False
    for grid in arguments.grids or there:
        runs, kept = arguments.out / grid, RESULTS / grid
        if not arguments.keep_only:
            bring_back(kept, runs)
            failed |= bool(sweep(grid, runs, arguments.data, arguments.jobs))
        made = [run for run in settled(runs) if not (kept / run.name / SUMMARY).exists()]
        for run in made:
            keep(run, kept / run.name)
        print(f"{grid}: {len(made)} runs kept now, {len(settled(kept))} in all")
    sys.exit(failed)


if __name__ == "__main__":
    main()
