"""`cabs probe` beside brute force: a sweep over batch sizes for times, the variance of many batches for tr Σ.

    python benchmarks/probe.py benchmarks/results/probe --data DIR --part noise
    python benchmarks/probe.py benchmarks/results/probe --data DIR --part times      on a machine that does nothing else

MNIST's network with SGD and the character transformer with AdamW, before training and after some of it. Brute force
shares nothing with the probe but the model and the loss: tr Σ is b times the variance of the gradients of many batches
of b examples, and times are those of a plain loop. Each part replaces its numbers in OUT.json and writes OUT.md anew.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cabs import probe
from cabs.couplings import Coupled, coupling_of
from cabs.experiments.problems import problem
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.runs.session import use_threads
from cabs.probe.recommending import gain
from cabs_bench.measure import environment

PROBLEMS = {"mnist": ("sgd", 0.1), "shakespeare": ("adamw", 1e-3)}
TRAINED = (0, 6_400)
"""Examples of training before the probe, in steps of 32."""
BATCHES, SIZE = 320, 64
"""Of brute force."""
SWEEP = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROUNDS = 12


class Setting:
    """A problem with its model as it is after some training.

    Args:
        name: the problem's.
        data: the directory with data sets.
        trained: how many examples to train on first.
    """

    def __init__(self, name: str, data: Path | None, trained: int) -> None:
        torch.manual_seed(0)
        self.problem = problem(name)
        kind, lr = PROBLEMS[name]
        self.model: nn.Module = self.problem.network(0)
        self.dataset: TensorDataset = self.problem.load(data).train.dataset()
        self.optimizer = OPTIMIZERS[kind].optimizer(self.model, lr, 0.0)
        for _ in range(trained // 32):
            self.step(32)

    def loss(self, batch: Any) -> Tensor:
        return self.problem.loss(self.model(self.problem.inputs.train(batch[0], torch.default_generator)), batch[1])

    def batch(self, size: int) -> list[Tensor]:
        rows = torch.randint(len(self.dataset), (size,))
        return [tensor[rows] for tensor in self.dataset.tensors]

    def step(self, size: int) -> None:
        self.optimizer.zero_grad()
        self.loss(self.batch(size)).backward()
        self.optimizer.step()

    def probe(self, **options: Any) -> Any:
        return probe(self.model, self.dataset, self.loss, self.optimizer, batch_size=32, **options)


def many_batches(setting: Setting) -> dict[str, list[float]]:
    """F, tr Σ, tr(PΣ) if there is a P, and the noise scale, each with its standard error over tenths of the batches."""
    parameters = [p for p in setting.model.parameters() if p.requires_grad]
    coupled = Coupled(setting.optimizer, coupling_of(setting.optimizer))
    weights = [coupled.weights(p) for p in parameters] if coupled.diagonal else []
    p = (
        torch.cat([w.flatten() for w in weights if w is not None]).double()
        if weights and weights[0] is not None
        else None
    )
    blocks = [_block(setting, parameters, p, BATCHES // 10) for _ in range(10)]
    whole = {name: sum(block[name] for block in blocks) / 10 for name in blocks[0]}
    count = BATCHES // 10 * 10
    found = {}
    for name, weight in (("trace", 1.0), ("weighted", p)):
        if weight is None:
            continue
        squares = "squares" if name == "trace" else "weighted squares"
        estimates = [_trace(block, squares, weight, BATCHES // 10) for block in blocks]
        found[name] = [_trace(whole, squares, weight, count), statistics.stdev(estimates) / math.sqrt(10)]
    mean = whole["gradient"]
    signal = float(mean @ mean) - found["trace"][0] / (count * SIZE)
    found["signal"] = [signal, 0.0]
    found["noise_scale"] = [found["trace"][0] / signal, 0.0]
    losses = [block["loss"] for block in blocks]
    found["loss"] = [statistics.fmean(losses), statistics.stdev(losses) / math.sqrt(10)]
    return found


def _block(setting: Setting, parameters: list[Tensor], p: Tensor | None, count: int) -> dict[str, Any]:
    """Means over some batches."""
    gradient: Any = 0.0
    squares = weighted = loss = 0.0
    for _ in range(count):
        setting.model.zero_grad()
        value = setting.loss(setting.batch(SIZE))
        value.backward()
        flat = torch.cat([one.grad.flatten() for one in parameters]).double()
        gradient = gradient + flat / count
        squares += float(flat @ flat) / count
        weighted += 0.0 if p is None else float(flat.square() @ p) / count
        loss += value.item() / count
    setting.model.zero_grad()
    return {"gradient": gradient, "squares": squares, "weighted squares": weighted, "loss": loss}


def _trace(block: dict[str, Any], squares: str, weight: Any, count: int) -> float:
    mean = float((block["gradient"].square() * weight).sum())
    return SIZE * count / (count - 1) * (block[squares] - mean)


def noise_part(data: Path | None, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The probe's noise beside that of many batches, at the same weights."""
    rows = []
    for name in PROBLEMS:
        for trained in TRAINED:
            setting = Setting(name, data, trained)
            tell(f"{name} after {trained}: probe")
            report = setting.probe(seconds=0.5, max_batch_size=64)
            tell(f"{name} after {trained}: {BATCHES} batches of {SIZE}")
            torch.manual_seed(1)
            rows.append(
                {"problem": name, "trained": trained, "probe": report.to_dict(), "brute": many_batches(setting)}
            )
    return rows


def sweep(setting: Setting) -> dict[int, float]:
    """The median seconds of plain steps of many sizes, taken in turns after two rounds to warm up."""
    found: dict[int, list[float]] = {size: [] for size in SWEEP}
    batches = {size: setting.batch(size) for size in SWEEP}
    for turn in range(ROUNDS + 2):
        for size in SWEEP if turn % 2 else reversed(SWEEP):
            start = time.perf_counter()
            setting.optimizer.zero_grad()
            setting.loss(batches[size]).backward()
            setting.optimizer.step()
            if turn >= 2:
                found[size].append(time.perf_counter() - start)
    return {size: statistics.median(times) for size, times in found.items()}


def times_part(data: Path | None, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The probe's line beside a sweep."""
    rows = []
    for name in PROBLEMS:
        setting = Setting(name, data, TRAINED[-1])
        tell(f"{name}: probe")
        report = setting.probe(max_batch_size=SWEEP[-1])
        tell(f"{name}: sweep")
        rows.append({"problem": name, "probe": report.to_dict(), "brute": sweep(setting)})
    return rows


def noise_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"Probe: {rows[0]['probe']['noise']['examples']:,} examples. Brute force: b = {SIZE}, {BATCHES} batches "
        f"({BATCHES * SIZE:,} examples), ± its standard error over tenths "
        "of them. Inside: the interval, widened by twice that error, holds what brute force found. CABS before AdamW's "
        "first step is left out: its P is the probe's own.",
        "",
        "| problem | after | | probe | 95% | brute force | inside |",
        "| --- | ---: | --- | ---: | --- | ---: | --- |",
    ]
    for row in rows:
        noise, brute = row["probe"]["noise"], row["brute"]
        alpha = PROBLEMS[row["problem"]][1]
        truth = brute.get("weighted", brute["trace"])
        known = row["probe"]["filled"] == 0  # else the P is the probe's own, which brute force does not have
        cells = [
            ("F", noise["loss"], *brute["loss"]),
            ("tr Σ", noise["trace"], *brute["trace"]),
            ("noise scale", noise["noise_scale"], *brute["noise_scale"]),
        ]
        if known:
            cells.append(
                ("CABS", noise["size"], alpha * truth[0] / brute["loss"][0], alpha * truth[1] / brute["loss"][0])
            )
        for what, interval, value, error in cells:
            high = math.inf if interval["high"] is None else interval["high"]
            inside = "yes" if interval["low"] - 2 * error <= value <= high + 2 * error else "no"
            shown = "∞" if interval["value"] is None else f"{interval['value']:.4g}"
            plus = f" ± {error:.2g}" if error else ""
            name = f"{row['problem']} | {row['trained']:,}" if what == "F" else " | "
            lines.append(
                f"| {name} | {what} | {shown} | {interval['low']:.4g} to {high:.4g} | {value:.4g}{plus} | {inside} |"
            )
    return lines


def times_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        times, brute = row["probe"]["times"], {int(size): t for size, t in row["brute"].items()}
        if times["line"] is None:
            lines += [f"{row['problem']}: the probe could not tell c₀ and c₁.", ""]
            continue
        (c0, c1), cabs = times["line"], row["probe"]["noise"]["size"]["value"]
        most = max(size / t for size, t in brute.items())
        reached = next(size for size, t in brute.items() if size / t >= 0.9 * most)
        best = max(brute, key=lambda size: gain(size, cabs) / brute[size])
        lines += [
            f"**{row['problem']}**, {times['rounds']} rounds of the probe, {ROUNDS} of the sweep: "
            f"c₀ = {c0 * 1e3:.3g} ms, c₁ = {c1 * 1e3:.3g} ms.",
            f"Most throughput: probe {row['probe']['most_throughput']:.4g} examples/s, sweep {most:.4g}. "
            f"90% of it: from m = {row['probe']['saturation']:.3g} by the probe's line, from {reached} in the sweep.",
            f"Most gain per second at CABS = {cabs:.3g}: m = {row['probe']['cabs_batch_size_per_second']:.3g} by the "
            f"line, {best} of the sizes swept.",
            "",
            "| m | sweep, ms | line, ms | ratio |",
            "| ---: | ---: | ---: | ---: |",
        ]
        for size, t in brute.items():
            line = c0 + c1 * size
            lines.append(f"| {size} | {t * 1e3:.4g} | {line * 1e3:.4g} | {line / t:.2f} |")
        lines.append("")
    return lines


def described(machine: dict[str, Any]) -> str:
    return (
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, threads: {machine['threads']}, "
        f"Python {machine['python']}, cabs {machine['versions']['cabs']}, torch {machine['torch']}"
    )


def page(parts: dict[str, Any], out: Path) -> str:
    lines = ["# The probe beside brute force", ""]
    for part, title, made in (("noise", "Noise", noise_lines), ("times", "Times", times_lines)):
        if part in parts:
            command = f"python benchmarks/probe.py {out} --data DIR --part {part}"
            lines += [f"## {title}", "", f"`{command}`, {described(parts[part]['environment'])}.", ""]
            lines += [*made(parts[part]["rows"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="without .md and .json")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--part", choices=("noise", "times"), required=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    numbers = options.out.with_suffix(".json")
    parts = json.loads(numbers.read_text()) if numbers.exists() else {}
    run = noise_part if options.part == "noise" else times_part
    with use_threads(options.threads):
        rows = run(options.data, lambda what: print(what, flush=True))
        parts[options.part] = {"environment": environment(), "rows": rows}
    numbers.write_text(json.dumps(parts, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(json.loads(numbers.read_text()), options.out))
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
