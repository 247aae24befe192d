"""Is the batch size of CABS the best one? The gain of real steps of every size, with no theory in it.

    python benchmarks/optimality.py PROBLEM OUT [--data DIR] [--optimizer sgd] [--lrs 0.3,0.1] [--at 5k,20k,60k]
        [--sizes 4,8,…] [--steps 1] [--draws 60] [--sample 2000] [--seed 0] [--threads 1]

A run with CABS stops after so many examples. From there, for each size m, batches are drawn at random, the optimizer
makes its own step on each, always from the same weights and the same state, and the loss on a large fixed sample is
compared before and after: the gain, and the gain per example. Vertical lines say what CABS chose in the run, and what
the norm test and the noise scale would have chosen, from the gradients of all examples of the sample. An optimizer with
momentum spreads the effect of a gradient over several steps: ``--steps k`` makes k of them with k batches of size m.

Writes OUT/PROBLEM-OPTIMIZER.json after each point, goes on where it stopped, and draws OUT/PROBLEM-OPTIMIZER.png.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cabs import AdaptiveLoader, BatchSizeScheduler, GradientVariance, __version__, hardware, rules
from cabs.couplings import Coupled, coupling_of
from cabs.experiments.files import write_json
from cabs.experiments.problems import problem, title_of
from cabs.experiments.problems.problem import Problem
from cabs.experiments.runs.optimizers import optimizer_kind
from cabs.experiments.runs.style import COLOURS, DPI, house_style
from cabs.rules import examples_of

CHUNK = 250
"""Examples of the sample that are computed at a time."""
Batch = tuple[Tensor, Tensor]


class Training:
    """A run with CABS that stops where it is told to."""

    def __init__(self, chosen: Problem, data: Path | None, optimizer: str, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.problem, self.train = chosen, chosen.load(data).train.dataset()
        self.kind, self.lr, self.seed = optimizer_kind(optimizer), lr, seed
        self.model = chosen.network(seed)
        self.optimizer = self.kind.optimizer(self.model, lr, 0.0)
        self.augmentation = torch.Generator().manual_seed(seed)
        loader = AdaptiveLoader(self.train, batch_size=chosen.min_batch_size, shuffle=True, seed=seed, stream=True)
        self.scheduler = BatchSizeScheduler(
            self.model, self.optimizer, loader, rules.CABS(), min_batch_size=2, max_examples=None, measure_every=1
        )
        self.batches: Iterator[Any] = iter(loader)
        self.examples = 0

    def until(self, examples: int) -> None:
        """Trains on until so many examples were seen."""
        while self.examples < examples:
            inputs, targets = next(self.batches)
            loss = step(self.problem, self.model, self.optimizer, (self._augmented(inputs), targets))
            self.scheduler.step(loss)
            self.examples += len(targets)

    def copy(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer as they are, which nobody measures."""
        model = self.problem.network(self.seed)
        model.load_state_dict(self.model.state_dict())
        optimizer = self.kind.optimizer(model, self.lr, 0.0)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return model, optimizer

    def draw(self, examples: int, generator: torch.Generator) -> Batch:
        """A batch at random, without replacement, as an epoch would have it."""
        chosen = torch.randperm(len(self.train), generator=generator)[:examples]
        inputs, targets = self.train[chosen]
        return self.problem.inputs.train(inputs, generator), targets

    def _augmented(self, inputs: Tensor) -> Tensor:
        return self.problem.inputs.train(inputs, self.augmentation)


def step(chosen: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    loss = chosen.loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def sample_loss(chosen: Problem, model: nn.Module, sample: Batch) -> float:
    parts = zip(sample[0].split(CHUNK), sample[1].split(CHUNK), strict=True)
    return sum(float(chosen.loss(model(x), y)) * len(y) for x, y in parts) / len(sample[1])


def gains(
    training: Training, sample: Batch, size: int, steps: int, draws: int, generator: torch.Generator
) -> list[float]:
    """F before less F after ``steps`` steps with batches of this size, once for each draw."""
    chosen = training.problem
    model, optimizer = training.copy()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    before = sample_loss(chosen, model, sample)
    found = []
    for _ in range(draws):
        for _ in range(steps):
            step(chosen, model, optimizer, training.draw(size, generator))
        found.append(before - sample_loss(chosen, model, sample))
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
    return found


def marks(training: Training, sample: Batch) -> dict[str, float]:
    """The sizes that rules ask for here, from all gradients of the sample rather than from a few batches."""
    plain, coupled = _traces(training, sample, False), _traces(training, sample, True)
    loss = sample_loss(training.problem, training.copy()[0], sample)
    alpha = Coupled(training.optimizer, coupling_of(training.optimizer)).alphas()[0]
    last = training.scheduler.last
    assert last is not None
    m = training.scheduler.last_batch_size
    return {
        "CABS, in the run": last.raw_batch_size,
        "CABS": alpha * coupled[0] / loss,
        "norm test, θ = 1": plain[0] / (plain[1] + plain[0] / m),
        "noise scale": plain[0] / plain[1] if plain[1] > 0 else math.inf,
    }


def _traces(training: Training, sample: Batch, weighted: bool) -> tuple[float, float]:
    """tr Σ and ‖∇F‖², or tr(PΣ) and ∇FᵀP∇F, by the sample's gradients one and all."""
    model, optimizer = training.copy()
    coupled = Coupled(optimizer, coupling_of(optimizer))
    weigh = weighted and coupled.diagonal
    total = 0.0
    gradients = [torch.zeros_like(p) for p in model.parameters()]
    count = len(sample[1])
    for x, y in zip(sample[0].split(CHUNK), sample[1].split(CHUNK), strict=True):
        model.zero_grad()
        weights = {p: coupled.weights(p) for p in model.parameters()} if weigh else None
        with GradientVariance(model, weights=weights) as variance:
            training.problem.loss(model(x), y).backward()
        total += float(variance.squared_norms().sum())
        for gradient, p in zip(gradients, model.parameters(), strict=True):
            if p.grad is not None:
                gradient.add_(p.grad, alpha=len(y) / count)
    model.zero_grad()
    square = sum(
        float((g.square() * (coupled.weights(p) if weigh else 1)).sum())
        for g, p in zip(gradients, model.parameters(), strict=True)
    )
    trace = (total / count - square) * count / (count - 1)
    return trace, square - trace / count


def point(training: Training, examples: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All sizes at one point of the run."""
    training.until(examples)
    generator = torch.Generator().manual_seed(examples)
    sample = training.draw(arguments.sample, generator)
    result: dict[str, Any] = {
        "lr": training.lr,
        "examples": training.examples,
        "loss": sample_loss(training.problem, training.copy()[0], sample),
        "marks": marks(training, sample),
        "gains": {},
    }
    for size in arguments.sizes:
        found = gains(training, sample, size, arguments.steps, arguments.draws, generator)
        mean, error = statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found))
        result["gains"][size] = [mean, error]
        print(f"  m = {size}: gain {mean:.3g} ± {error:.2g}, per example {mean / size / arguments.steps:.3g}")
    return result


def draw(report: dict[str, Any], path: Path) -> None:
    """A row of panels for each learning rate."""
    from matplotlib.figure import Figure

    points, steps = report["points"], report["steps"]
    rates = sorted({p["lr"] for p in points}, reverse=True)
    columns = max(sum(p["lr"] == rate for p in points) for rate in rates)
    with house_style():
        figure = Figure(figsize=(3.6 * columns, 2.9 * len(rates) + 0.9), layout="constrained")
        grid = figure.subplots(len(rates), columns, squeeze=False, sharex=True)
        for rate, axes_of_rate in zip(rates, grid, strict=True):
            for one, axes in zip([p for p in points if p["lr"] == rate], axes_of_rate, strict=False):
                _panel(axes, one, steps)
        for axes in grid[-1]:
            axes.set_xlabel("batch size m")
        for axes in grid[:, 0]:
            axes.set_ylabel("gain per example")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(
            f"{title_of(report['problem'])} · {report['optimizer']}: gain per example of real steps", x=0.02, ha="left"
        )
        figure.savefig(path, dpi=DPI)


def _panel(axes: Any, one: dict[str, Any], steps: int) -> None:
    sizes = [int(size) for size in one["gains"]]
    means = [mean / size / steps for size, (mean, _) in zip(sizes, one["gains"].values(), strict=True)]
    errors = [error / size / steps for size, (_, error) in zip(sizes, one["gains"].values(), strict=True)]
    axes.errorbar(sizes, means, errors, marker="o", markersize=3, linewidth=1.2, color="black", label="measured")
    axes.axhline(0, color="grey", linewidth=0.6)
    styles = ("-", "--", ":", "-.")
    for colour, style, (name, size) in zip(COLOURS, styles, one["marks"].items(), strict=False):
        if sizes[0] / 2 <= size <= sizes[-1] * 2:
            axes.axvline(size, color=colour, linestyle=style, linewidth=1.5, label=name)
        else:
            axes.axvline(math.nan, color=colour, linestyle=style, label=name)
    top = max(mean + error for mean, error in zip(means, errors, strict=True))
    axes.set_ylim(-0.35 * top, 1.15 * top)
    axes.set_xscale("log", base=2)
    axes.set_title(f"α = {one['lr']:g}, {one['examples']:,} examples, F = {one['loss']:.3g}", fontsize=9)


def table(report: dict[str, Any]) -> str:
    """The best size of those tried, what the rules say, and what CABS's own size would gain of the best."""
    lines = [
        "| α | examples | F | best m tried | CABS, in the run | CABS | norm test | noise scale | CABS, of the best |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in report["points"]:
        per = {int(m): mean / int(m) for m, (mean, _) in one["gains"].items()}
        best = max(per, key=lambda m: per[m])
        share = _interpolated(per, one["marks"]["CABS"]) / per[best] if per[best] > 0 else math.nan
        sizes = " | ".join(f"{size:,.0f}" if math.isfinite(size) else "∞" for size in one["marks"].values())
        lines.append(f"| {one['lr']:g} | {one['examples']:,} | {one['loss']:.3g} | {best} | {sizes} | {share:.0%} |")
    return "\n".join(lines)


def _interpolated(values: dict[int, float], at: float) -> float:
    """Linearly in log m; the outermost value beyond the sizes that were tried."""
    sizes = sorted(values)
    at = min(max(at, sizes[0]), sizes[-1])
    for low, high in itertools.pairwise(sizes):
        if low <= at <= high:
            weight = math.log(at / low) / math.log(high / low)
            return (1 - weight) * values[low] + weight * values[high]
    return values[sizes[0]]


def main() -> None:
    """Measures what is not there yet, and draws all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="directory with data sets")
    parser.add_argument("--optimizer", help="the problem's by default")
    parser.add_argument("--lrs", default="0.3,0.1", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--at", default="5k,20k,60k", type=lambda text: [examples_of(part) for part in text.split(",")])
    parser.add_argument(
        "--sizes",
        default="4,8,16,32,64,128,256,512,1024",
        type=lambda text: [int(part) for part in text.split(",")],
    )
    parser.add_argument("--steps", type=int, default=1, help="steps of each trial")
    parser.add_argument("--draws", type=int, default=60, help="trials of each size")
    parser.add_argument("--sample", type=int, default=2000, help="examples that the loss is measured on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = problem(arguments.problem)
    optimizer = arguments.optimizer or chosen.optimizer
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{chosen.name}-{optimizer}.json"
    settings = {
        "problem": chosen.name,
        "optimizer": optimizer,
        **{name: getattr(arguments, name) for name in ("sizes", "steps", "draws", "sample", "seed")},
    }
    report = {
        "command": shlex.join(["python", "benchmarks/optimality.py", *sys.argv[1:]]),
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
        **hardware.describe(arguments.threads),
        **settings,
        "points": [],
    }
    if path.exists():
        before = json.loads(path.read_text())
        if any(before[name] != value for name, value in settings.items()):
            sys.exit(f"{path} has points with other settings: give another directory")
        report["points"] = before["points"]
    for lr in arguments.lrs:
        there = {one["asked"] for one in report["points"] if one["lr"] == lr}
        if there >= set(arguments.at):
            continue
        training = Training(chosen, arguments.data, optimizer, lr, arguments.seed)
        for examples in sorted(set(arguments.at) - there):
            print(f"{chosen.name}, {optimizer}, α = {lr:g}, after {examples:,} examples", flush=True)
            report["points"].append({"asked": examples, **point(training, examples, arguments)})
            report["points"].sort(key=lambda one: (-one["lr"], one["asked"]))
            write_json(path, report)
    draw(report, path.with_suffix(".png"))
    path.with_suffix(".md").write_text(table(report) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
