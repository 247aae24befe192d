"""Kill training runs and sweeps at random moments, resume them, and check that they end as if nothing had happened.

    python tests/soak/soak.py --kills 100 --seed 0 --minutes 30 --out tests/soak/results/soak.json

Everything is done as a user would: ``cabs train`` and ``cabs sweep`` are started as processes, killed by SIGKILL,
and given again. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import cabs
from cabs import hardware

CHECKPOINT, PART = "checkpoint.pt", "checkpoint.pt.part"
_MARK = "CABS_SOAK"  # environment variable by which all processes of a lane are found, whoever their parent is
_LONGEST_LIFE = 600.0
_SWEEPS_MAY_COMPLAIN = 5  # times in a row: runs that outlive their sweep for a moment keep their directories


@dataclass(frozen=True)
class Work:
    """Something to run, by a command that leaves one or several runs in a directory."""

    kind: str
    name: str
    options: tuple[str, ...]

    def command(self, out: Path) -> list[str]:
        """The command that starts it or, if it has been started, resumes it."""
        start = [sys.executable, "-m", "cabs", self.kind]
        if self.kind == "train" and (out / "config.json").exists():
            return [*start, "--out", str(out), "--resume"]
        return [*start, "digits", "--out", str(out), *self.options]

    def runs(self, out: Path) -> list[Path]:
        """The directories of its runs, so far."""
        if self.kind == "train":
            return [out]
        return sorted(path for path in out.iterdir() if path.is_dir()) if out.is_dir() else []


def works(examples: int, sweep_rules: str = "norm-test,constant") -> dict[str, list[Work]]:
    """What is run: short runs with many checkpoints, whose batch sizes move from the start."""
    schedule = ("--examples", str(examples), "--eval-every", str(examples // 2))
    often = ("--checkpoint-every", "150", "--log-every", "20", "--threads", "1", "--min-batch-size", "8")
    rules = {
        "norm-test": ("--rule", "norm-test", "--theta", "0.6", "--max-batch-size", "64"),
        "cabs": ("--rule", "cabs", "--lr", "0.2", "--seed", "3", "--max-batch-size", "32"),
        "paper": ("--rule", "cabs", "--estimator", "paper", "--weight-decay", "0.001", "--max-batch-size", "32"),
    }
    grid = ("--rules", sweep_rules, "--lrs", "0.1", "--thetas", "0.6", "--sizes", "30", "--jobs", "2")
    return {
        "train": [Work("train", name, (*schedule, *often, *rule)) for name, rule in rules.items()],
        "sweep": [Work("sweep", "sweep", (*schedule, *grid, "--max-batch-size", "64", "--retries", "20"))],
    }


@dataclass
class Tally:
    """What was done, and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    complaints: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Lane:
    """Runs works one after the other, and kills them on the way.

    Args:
        choice: Decides when and what to kill.
        folder: Where to work.
        deadline: When to stop killing, by the monotonic clock.
    """

    def __init__(self, choice: random.Random, folder: Path, deadline: float) -> None:
        self.choice = choice
        self.folder = folder
        self.deadline = deadline
        self.tally = Tally()
        self._stopped = False
        self.mark = uuid.uuid4().hex
        self._references: dict[str, Path] = {}

    def run(self, works: list[Work], kills: int, kills_a_run: int) -> Tally:
        """Run works in turn until so many kills are done, or the time is over."""
        number = 0
        try:
            while kills > 0 and time.monotonic() < self.deadline and not self.tally.wrong:
                work = works[number % len(works)]
                number += 1
                out = self.folder / f"{number:03}-{work.name}"
                kills -= self._see_through(work, out, min(kills, kills_a_run))
                if not self.tally.wrong:
                    self.tally.wrong += compare(work, out, self._reference(work))
                if not self.tally.wrong:
                    self.tally.runs += len(work.runs(out))
                    shutil.rmtree(out)
        finally:
            self.kill_all()
        return self.tally

    def stop(self) -> None:
        """Give up at once, and leave no process behind."""
        self._stopped = True
        self.kill_all()

    def _reference(self, work: Work) -> Path:
        """The same work, not interrupted."""
        if work.name not in self._references:
            out = self.folder / f"reference-{work.name}"
            process = self.start(work, out)
            if process.wait(_LONGEST_LIFE):
                raise RuntimeError(f"{shlex.join(work.command(out))}: {self._last_words(out)}")
            self._references[work.name] = out
        return self._references[work.name]

    def _see_through(self, work: Work, out: Path, kills: int) -> int:
        """Run a work to its end, with so many kills if it lasts as long; gives how many there were."""
        done, in_a_row = 0, 0
        while True:
            kill = done < kills and time.monotonic() < self.deadline
            process = self.start(work, out)
            killed = self._live(work, out, process, kills - done if kill else 0)
            done += killed
            code = process.wait()
            if code == -signal.SIGKILL and killed:
                in_a_row = 0
                continue
            if code == 0:
                return done
            self.tally.complaints.append(f"{out.name}: {self._last_words(out)}")
            in_a_row += 1
            if work.kind == "train" or in_a_row == _SWEEPS_MAY_COMPLAIN:
                self.tally.wrong.append(f"{out}: exit code {code}: {self._last_words(out)}")
                return done

    def start(self, work: Work, out: Path) -> subprocess.Popen[bytes]:
        if self._stopped:
            raise RuntimeError("stopped")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", _MARK: self.mark}
        with open(self._log(out), "ab") as log:
            return subprocess.Popen(
                work.command(out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _live(self, work: Work, out: Path, process: subprocess.Popen[bytes], kills: int) -> int:
        """Follow a process until it ends, by itself or by us; gives how many kills there were."""
        done = 0
        end = time.monotonic() + _LONGEST_LIFE
        while process.poll() is None:
            if time.monotonic() > end:
                self.tally.wrong.append(f"{out}: no end after {_LONGEST_LIFE:g} s")
                self.kill_all()
                break
            if done == kills:
                time.sleep(0.05)
                continue
            before = parts(work, out)
            saved = checkpoints(work, out)
            aim = self._wait_for_moment(work, out, lambda: process.poll() is None and time.monotonic() < end)
            if process.poll() is not None or time.monotonic() > end:
                continue
            what = self._kill(work, process)
            done += 1
            if what != "the sweep alone" and parts(work, out) - before:
                phase = "while checkpointing"
            elif checkpoints(work, out) == saved:
                phase = "before a checkpoint"
            else:
                phase = "between checkpoints"
            self.tally.kills[f"{work.kind}: {what}, {phase}"] += 1
            print(f"{out.name}: killed {what}, aimed at {aim}, hit {phase}", flush=True)
        return done

    def _wait_for_moment(self, work: Work, out: Path, alive: Callable[[], bool]) -> str:
        """Wait for a random moment, or until the process has ended."""
        aim = self.choice.choices(["the start", "training", "a checkpoint"], [1, 2, 4])[0]
        if aim == "the start":
            end = time.monotonic() + self.choice.uniform(0, 6)
            while alive() and time.monotonic() < end:
                time.sleep(0.002)
            return aim
        look = parts if aim == "a checkpoint" else checkpoints
        for _ in range(self.choice.randint(1, 6)):
            seen = look(work, out)
            while alive() and not look(work, out) - seen:
                time.sleep(0.001)
        if aim == "training":
            time.sleep(self.choice.uniform(0, 0.05))
        return aim

    def _kill(self, work: Work, process: subprocess.Popen[bytes]) -> str:
        """Kill the process, or all that it has started too, or only one of those."""
        if work.kind == "train":
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "the run"
        what = self.choice.choice(["the sweep alone", "the sweep and its runs", "one of its runs"])
        runs = sorted(set(marked(self.mark)) - {process.pid})
        if what == "one of its runs" and runs:
            victim = self.choice.choice(runs)
            end(victim)
            while victim in marked(self.mark):
                time.sleep(0.002)
            return what
        process.kill()
        if what == "the sweep alone":
            process.wait()
            return what
        self.kill_all()
        process.wait()
        return "the sweep and its runs"

    def kill_all(self) -> None:
        """End every process of this lane."""
        while found := list(marked(self.mark)):
            for pid in found:
                end(pid)
            time.sleep(0.002)

    def _log(self, out: Path) -> Path:
        return self.folder / f"{out.name}.log"

    def _last_words(self, out: Path) -> str:
        lines = self._log(out).read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-2:])


def end(pid: int) -> None:
    """Kill a process that may have ended already."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> Iterator[int]:
    """The living processes that have a mark in their environment."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):  # that of a dead process is empty
                    yield int(folder.name)
            except OSError:
                continue


def parts(work: Work, out: Path) -> set[tuple[str, int, int]]:
    """The checkpoints that are being written, or were when their process was killed."""
    return _identities(work, out, PART)


def checkpoints(work: Work, out: Path) -> set[tuple[str, int, int]]:
    """The newest checkpoints."""
    return _identities(work, out, CHECKPOINT)


def _identities(work: Work, out: Path, name: str) -> set[tuple[str, int, int]]:
    found = set()
    for run in work.runs(out):
        try:
            status = os.stat(run / name)
        except OSError:
            continue
        found.add((run.name, status.st_ino, status.st_ctime_ns))
    return found


def numbers(path: Path) -> str:
    """The metrics without their times, byte for byte."""
    return re.sub(r'"seconds":[0-9.e-]+', "", (path / "metrics.jsonl").read_text())


def compare(work: Work, out: Path, reference: Path) -> list[str]:
    """How a work that was killed differs from the same that was not."""
    found, expected = work.runs(out), work.runs(reference)
    if work.kind == "sweep" and [path.name for path in found] != [path.name for path in expected]:
        return [f"{out}: other runs than in {reference}"]
    wrong = []
    for run, whole in zip(found, expected, strict=True):
        if json.loads((run / "summary.json").read_text())["status"] != "finished":
            wrong.append(f"{run}: not finished")
        if numbers(run) != numbers(whole):
            wrong.append(f"{run}: other metrics than {whole}")
        weights, right = (torch.load(path / CHECKPOINT, weights_only=True)["network"] for path in (run, whole))
        if weights.keys() != right.keys() or not all(torch.equal(weights[name], right[name]) for name in right):
            wrong.append(f"{run}: other weights than {whole}")
    if work.kind == "sweep" and _outcome(out) != _outcome(reference):
        wrong.append(f"{out}: another outcome than {reference}")
    return wrong


def _outcome(out: Path) -> Any:
    content = json.loads((out / "sweep.json").read_text())
    return content["runs"], content["best"]


def soak(
    kills: int,
    seed: int,
    minutes: float,
    folder: Path,
    *,
    kills_a_run: int = 9,
    planned: dict[str, list[Work]] | None = None,
) -> dict[str, Any]:
    """Kill and compare.

    Args:
        kills: How often to kill: two times of three a single run, else a sweep.
        seed: Decides when.
        minutes: No more kills after that time; what runs then is seen through.
        folder: An empty directory to work in.
        kills_a_run: How many kills one run or sweep gets.
        planned: What to run.

    Returns:
        What was done and what came of it.
    """
    start = time.monotonic()
    planned = planned or works(9_000)
    sweeps = kills // 3
    shares = {"train": kills - sweeps, "sweep": sweeps}
    lanes = {}
    for kind in shares:
        (folder / kind).mkdir()
        lanes[kind] = Lane(random.Random(f"{seed} {kind}"), folder / kind, start + 60 * minutes)
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(lanes[kind].run, planned[kind], share, kills_a_run) for kind, share in shares.items()]
        try:
            tallies = [future.result() for future in futures]
        except BaseException:
            for lane in lanes.values():
                lane.stop()
            raise
    counts: Counter[str] = sum((tally.kills for tally in tallies), Counter())
    return {
        "kills": sum(counts.values()),
        "of_training": sum(count for what, count in counts.items() if what.startswith("train")),
        "of_sweeps": sum(count for what, count in counts.items() if what.startswith("sweep")),
        "while_checkpointing": sum(count for what, count in counts.items() if what.endswith("while checkpointing")),
        "by_moment": dict(sorted(counts.items())),
        "runs_compared": sum(tally.runs for tally in tallies),
        "complaints": [complaint for tally in tallies for complaint in tally.complaints],
        "wrong": [wrong for tally in tallies for wrong in tally.wrong],
        "minutes": round((time.monotonic() - start) / 60, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30, help="no more kills after that time")
    parser.add_argument("--out", type=Path, help="file for the record")
    given = parser.parse_args()
    if not Path("/proc/self/environ").exists():
        parser.error("finds its processes in /proc, which this system does not have")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # either stops it, with all that it has started
    folder = Path(tempfile.mkdtemp(prefix="cabs-soak-"))
    result = soak(given.kills, given.seed, given.minutes, folder)
    command = shlex.join(["python", "tests/soak/soak.py", *sys.argv[1:]])
    record = {"command": command, "environment": {"cabs": cabs.__version__, **hardware.describe()}, **result}
    text = json.dumps(record, indent=2, ensure_ascii=False)
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n", encoding="utf-8")
    if result["wrong"]:
        print(f"wrong; what is left of it is in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    if result["kills"] < given.kills:
        print(f"only {result['kills']} of {given.kills} kills in the time; give it more --minutes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
