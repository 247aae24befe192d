"""Exact or refused, never silently wrong? ``GradientVariance`` on public models, against a loop over single examples.

    python benchmarks/zoo.py [--only REGEX] [--jobs N] [--out benchmarks/results/zoo.jsonl] [--list] [--shuffle SEED]

Every model is built with tiny random weights, in float64 and without dropout, in a process of its own. Results are
written as they come, a line of JSON each and a table beside them at the end, or after Ctrl-C; models that are in the
file already are not tried again. In random order (``--shuffle``) what was tried by then is a sample. Packages that are
missing are left out. An environment that has them all, without torchvision (which vit-pytorch asks for and does not
need here):

    python3 -m venv .venv-zoo
    .venv-zoo/bin/pip install torch==2.13.0
    echo torch==2.13.0 > only.txt
    .venv-zoo/bin/pip install -c only.txt transformers torch_geometric peft diffusers x-transformers monai \\
        perceiver-pytorch linear-attention-transformer performer-pytorch g-mlp-pytorch mlp-mixer-pytorch mambapy \\
        axial-attention nystrom-attention conformer st-moe-pytorch soft-moe-pytorch mixture-of-experts slot-attention \\
        minGRU-pytorch tab-transformer-pytorch rtdl-revisiting-models efficientnet_pytorch lambda-networks \\
        bottleneck-transformer-pytorch deepctr-torch
    .venv-zoo/bin/pip install --no-deps vit-pytorch
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import random
import re
import resource
import sys
import time
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from cabs import __version__, hardware
from zoo_models import Builder, catalogue
from zoo_models.case import Case
from zoo_models.checking import MOST, ORDER, SHAPES, SLACK, SLOW, TOLERANCE, brief, check, summary

SECONDS = 60
MEMORY_GIB = 8
PACKAGES = ("transformers", "torch_geometric", "peft", "diffusers", "x-transformers", "vit-pytorch", "monai")
Result = dict[str, Any]


def attempt(name: str, builder: Builder, connection: Connection, memory_gib: float) -> None:
    """Everything about one model, in the process that was started for it."""
    limit = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115  for as long as the process lives
    report = connection.send
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    report("building")
    try:
        case: Case = builder()
    except Exception as error:
        connection.send({"status": "does not run", "why": f"not built: {brief(error)}", "rows": []})
        return
    rows = check(case, report)
    size = sum(p.numel() for p in case.model.parameters())
    connection.send({**summary(rows), "parameters": size, "rows": rows})


class Attempt:
    """A model that is being tried."""

    def __init__(self, name: str, builder: Builder, memory_gib: float) -> None:
        self.name = name
        self.started = time.monotonic()
        self.stage = "starting"
        self.result: Result | None = None
        context = multiprocessing.get_context("fork")  # what was imported once is there for all
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=attempt, args=(name, builder, theirs, memory_gib), daemon=True)
        self.process.start()
        theirs.close()

    def listen(self, seconds: float) -> bool:
        """Takes what the process reports; whether it is over."""
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, str):
                    self.stage = message
                else:
                    self.result = message
        except (EOFError, OSError):
            self.process.join()
            return self._over(f"the process ended with {self.process.exitcode}")
        if self.result is not None:
            self.process.join(5)
            return self._over("")
        if time.monotonic() - self.started > seconds:
            return self._over(f"not finished after {seconds:.0f} s")
        return False

    def _over(self, why: str) -> bool:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        if self.result is None:
            status = "error" if self.stage.startswith("measured") else "does not run"
            self.result = {"status": status, "why": f"{why} ({self.stage})", "rows": []}
        self.connection.close()
        taken = round(time.monotonic() - self.started, 1)
        self.result = {"name": self.name, **self.result, "seconds": taken}
        return True


def run(builders: dict[str, Builder], out: Path, jobs: int, seconds: float, memory_gib: float) -> None:
    """Tries the models and appends a line for each."""
    waiting = list(builders.items())
    running: list[Attempt] = []
    done = 0
    with out.open("a", encoding="utf-8") as file:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Attempt(*waiting.pop(0), memory_gib))
            wait([one.connection for one in running], timeout=1)
            for one in [one for one in running if one.listen(seconds)]:
                running.remove(one)
                assert one.result is not None
                file.write(json.dumps(one.result) + "\n")
                file.flush()
                done += 1
                why = one.result["why"][:150]
                print(f"{done}/{len(builders)} {one.name}: {one.result['status']} {why}", flush=True)


def read(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {result["name"]: result for result in results}


def versions() -> str:
    found = [f"cabs {__version__}", f"torch {torch.__version__}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")[:160]


def table(results: dict[str, Result], command: str) -> str:
    """The results as Markdown."""
    counts = collections.Counter(result["status"] for result in results.values())
    compared = sum(counts[status] for status in ORDER[:4])
    rounded = sum(result["status"] == "exact" and (result.get("error") or 0) > TOLERANCE for result in results.values())
    machine = hardware.describe(threads=1)
    slow = sorted(name for name, result in results.items() if (result.get("slow") or 0) > SLOW)
    lines = [
        "# Public models against the loop over single examples",
        "",
        f"`{command}`, {versions()}, Python {machine['python']}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['threads']} thread.",
        "",
        f"n = {len(results)} model classes, {compared} of which run and keep examples apart. Tiny random weights, "
        "float64, training mode without dropout and with BatchNorm in evaluation mode; batches of (examples, length) "
        f"{', '.join(map(str, SHAPES))}, with a loss made for this, also with padding, and with the model's own loss "
        "where it is a mean over examples.",
        "",
        f"*Exact* means that squared norms, trace and `.grad` agree to {TOLERANCE:.0e} for all of them, or, where "
        f"float32 inside a model lets batch and single examples differ by more, to {SLACK:.0f} times that difference, "
        f"{MOST:.0e} at most (as {rounded} of the exact need). *Not independent* are models whose outputs for a batch "
        "are not those for single examples.",
        "",
        "| | classes |",
        "| --- | ---: |",
        *(f"| {status} | {counts[status]} |" for status in (*ORDER[3::-1], *ORDER[4:])),
        "",
        f"Slower than {SLOW:.0f} plain steps: {', '.join(slow) or 'none'}.",
        "",
    ]
    for status in ("WRONG", "error", "refused"):
        found = [result for result in results.values() if result["status"] == status]
        reasons = collections.Counter(grouped(result["why"]) for result in found)
        if reasons:
            lines += [f"## {status}: why", "", "| reason | classes |", "| --- | ---: |"]
            lines += [f"| {cell(why)} | {count} |" for why, count in reasons.most_common()]
            lines.append("")
    lines += ["## All", "", "| model | result | times a plain step | why |", "| --- | --- | ---: | --- |"]
    for name, result in sorted(results.items()):
        why = result["why"]
        if result["status"] == "not independent":
            said = {row["cabs"] for row in result["rows"] if "cabs" in row}
            why += f"; cabs: {', '.join(sorted(said))}"
        times = "" if result.get("slow") is None else f"{result['slow']:.1f}"
        lines.append(f"| {name} | {result['status']} | {times} | {cell(why)} |")
    return "\n".join(lines) + "\n"


def grouped(why: str) -> str:
    """A reason without what is peculiar to one model: numbers, shapes and all but the ends of names."""
    if found := re.match(r"(relative error|.grad is off by) \S+(?: in (?:[\w.]*?\.)?(\w+\.\w+|\w+)(?:[, ].*)?)?$", why):
        return found[1] + (f" in {found[2]}" if found[2] else "")
    why = re.sub(r"gradients reached .* by a way", "gradients reached … by a way", why)
    why = re.sub(r"\S+ gives a tensor of shape", "… gives a tensor of shape", why)
    why = re.sub(r"\b\w+(\.\w+)+\b", "…", why)
    return re.sub(r"\(?\d[\d.e+-]*(, *\d+,?)*\)?", "n", why)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=re.compile, help="models whose name has this")
    parser.add_argument("--skip", type=re.compile, help="but not these")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one model")
    parser.add_argument("--memory", type=float, default=MEMORY_GIB, help="GiB of addresses for one model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "zoo.jsonl")
    parser.add_argument("--again", type=re.compile, help="try models with such a status again")
    parser.add_argument("--shuffle", type=int, help="the seed of a random order")
    parser.add_argument("--list", action="store_true", help="the names, and nothing else")
    options = parser.parse_args()
    builders = catalogue()
    if options.only is not None:
        builders = {name: builder for name, builder in builders.items() if options.only.search(name)}
    if options.skip is not None:
        builders = {name: builder for name, builder in builders.items() if not options.skip.search(name)}
    if options.shuffle is not None:
        builders = dict(random.Random(options.shuffle).sample(sorted(builders.items()), len(builders)))
    if options.list:
        print("\n".join(builders))
        return
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    old = read(options.out)
    if options.again is not None:
        old = {name: result for name, result in old.items() if not options.again.search(result["status"])}
    todo = {name: builder for name, builder in builders.items() if name not in old}
    with contextlib.suppress(KeyboardInterrupt):
        run(todo, options.out, options.jobs, options.seconds, options.memory)
    chosen = [f"--{way} '{getattr(options, way).pattern}'" for way in ("only", "skip") if getattr(options, way)]
    chosen += [] if options.shuffle is None else [f"--shuffle {options.shuffle}"]
    command = " ".join(["python benchmarks/zoo.py", *chosen])
    options.out.with_suffix(".md").write_text(table(read(options.out), command), encoding="utf-8")


if __name__ == "__main__":
    main()
