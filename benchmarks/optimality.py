"""Is the batch size of CABS the best one? The gain of real steps of every size, with no theory in it.

    python benchmarks/optimality.py PROBLEM OUT [--data DIR] [--optimizer sgd] [--lrs 0.3,0.1] [--at 5k,20k]
        [--sizes 8,16,…] [--steps 1] [--draws 96] [--population 8000] [--sample 1000] [--seed 0] [--threads 1]

A run with CABS stops after so many examples. From there, for each size m, batches are drawn at random, the optimizer
makes its own step on each, always from the same weights and the same state, and the loss before and after is compared:
the gain, and the gain per example. Vertical lines say what CABS chose in the run, and what CABS, the norm test and the
noise scale would choose if they saw every gradient. An optimizer with momentum spreads the effect of a gradient over
several steps: ``--steps k`` makes k of them with k batches of size m.

All of it is about one population, some thousand training examples with the augmentation they happened to get: batches
are drawn from it with replacement, F is its loss, Σ is its covariance. So no batch is seen by one side only, and what
the rules ask for is known exactly. A gain is measured on a part of the population, the same before and after, and the
parts take turns. What a batch gains because its gradient happens to point along ∇F is known from that gradient, and
its expectation from ∇F, so it is taken out by regression (a control variate), which narrows the error bars and leaves
the mean where it is.

Writes OUT/PROBLEM-OPTIMIZER.json after each point, goes on where it stopped, and draws OUT/PROBLEM-OPTIMIZER.png.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cabs import AdaptiveLoader, BatchSizeScheduler, GradientVariance, __version__, hardware, rules
from cabs.couplings import Coupled, coupling_of
from cabs.experiments.files import write_json
from cabs.experiments.problems import problem
from cabs.experiments.problems.problem import Problem
from cabs.experiments.runs.optimizers import optimizer_kind
from cabs.rules import examples_of
from optimality_report import draw, table

CHUNK = 250
"""Examples that are computed at a time, where all of the population is."""
Batch = tuple[Tensor, Tensor]
Gradient = list[Tensor]


class Training:
    """A run with CABS that stops where it is told to."""

    def __init__(self, chosen: Problem, data: Path | None, optimizer: str, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.problem, self.train = chosen, chosen.load(data).train.dataset()
        self.kind, self.lr, self.seed = optimizer_kind(optimizer), lr, seed
        self.model = chosen.network(seed)
        self.optimizer = self.kind.optimizer(self.model, lr, 0.0)
        self.augmentation = torch.Generator().manual_seed(seed)
        least = chosen.min_batch_size  # as `cabs train` has it: with less some problems never begin to learn
        loader = AdaptiveLoader(self.train, batch_size=least, shuffle=True, seed=seed, stream=True)
        self.scheduler = BatchSizeScheduler(
            self.model, self.optimizer, loader, rules.CABS(), min_batch_size=least, max_examples=None, measure_every=1
        )
        self.batches: Iterator[Any] = iter(loader)
        self.examples = 0

    def until(self, examples: int) -> None:
        """Trains on until so many examples were seen."""
        while self.examples < examples:
            inputs, targets = next(self.batches)
            batch = self.problem.inputs.train(inputs, self.augmentation), targets
            self.scheduler.step(step(self.problem, self.model, self.optimizer, batch))
            self.examples += len(targets)

    def copy(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer as they are, which nobody measures."""
        model = self.problem.network(self.seed)
        model.load_state_dict(self.model.state_dict())
        optimizer = self.kind.optimizer(model, self.lr, 0.0)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return model, optimizer

    def population(self, examples: int, generator: torch.Generator) -> Batch:
        """Examples of the training set, each once, with an augmentation that stays."""
        inputs, targets = self.train[torch.randperm(len(self.train), generator=generator)[:examples]]
        return self.problem.inputs.train(inputs, generator), targets


def step(chosen: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    loss = chosen.loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def loss_on(chosen: Problem, model: nn.Module, examples: Batch) -> float:
    return sum(float(chosen.loss(model(x), y)) * len(y) for x, y in parts(examples, CHUNK)) / len(examples[1])


def parts(examples: Batch, size: int) -> list[Batch]:
    return list(zip(examples[0].split(size), examples[1].split(size), strict=True))


class Population:
    """The examples that a point is about: their loss, their gradients and what the rules make of them."""

    def __init__(self, training: Training, examples: Batch) -> None:
        self.examples = examples
        model, optimizer = training.copy()
        coupled = Coupled(optimizer, coupling_of(optimizer))
        self.loss = loss_on(training.problem, model, examples)
        trace, square, direction = _moments(training.problem, model, examples, None)
        steps = (trace, square, direction)
        if coupled.diagonal:
            steps = _moments(training.problem, model, examples, coupled.weights)
        coupled_trace, self.slope, self.direction = steps
        last, m = training.scheduler.last, training.scheduler.last_batch_size
        assert last is not None
        self.marks = {
            "CABS, in the run": last.raw_batch_size,
            "CABS": coupled.alphas()[0] * coupled_trace / self.loss,
            "norm test, θ = 1": trace / (square + trace / m),  # ‖g‖² of a batch has its own noise in it
            "noise scale": trace / square,
        }

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Examples at random, with replacement: independent, as in the paper."""
        chosen = torch.randint(len(self.examples[1]), (size,), generator=generator)
        return self.examples[0][chosen], self.examples[1][chosen]


def _moments(
    chosen: Problem, model: nn.Module, examples: Batch, weights: Callable[[Tensor], Tensor | None] | None
) -> tuple[float, float, Gradient]:
    """tr Σ, ‖∇F‖² and ∇F, or with weights P tr(PΣ), ∇FᵀP∇F and P∇F."""
    parameters = list(model.parameters())
    scale: dict[Tensor, Tensor] = {}
    for p in parameters:
        scale[p] = one if weights is not None and (one := weights(p)) is not None else torch.ones_like(p)
    norms, count = 0.0, len(examples[1])
    gradient = [torch.zeros_like(p) for p in parameters]
    for x, y in parts(examples, CHUNK):
        model.zero_grad()
        with GradientVariance(model, weights=None if weights is None else scale) as variance:
            chosen.loss(model(x), y).backward()
        norms += float(variance.squared_norms().sum()) / count
        for total, p in zip(gradient, parameters, strict=True):
            assert p.grad is not None
            total.add_(p.grad, alpha=len(y) / count)
    direction = [scale[p] * g for p, g in zip(parameters, gradient, strict=True)]
    square = _dot(direction, gradient)
    return norms - square, square, direction


def _dot(one: Gradient, other: Gradient) -> float:
    return sum(float((a * b).sum()) for a, b in zip(one, other, strict=True))


def gains(
    training: Training, population: Population, size: int, arguments: argparse.Namespace, generator: torch.Generator
) -> tuple[float, float]:
    """F before less F after some steps with batches of this size, and the standard error of it."""
    chosen = training.problem
    model, optimizer = training.copy()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    looks = parts(population.examples, arguments.sample)
    before = [loss_on(chosen, model, look) for look in looks]
    found, luck = [], []
    for draw_number in range(arguments.draws):
        for step_number in range(arguments.steps):
            step(chosen, model, optimizer, population.batch(size, generator))
            if step_number == 0:
                luck.append(_dot(population.direction, [p.grad for p in model.parameters() if p.grad is not None]))
        turn = draw_number % len(looks)
        found.append(before[turn] - loss_on(chosen, model, looks[turn]))
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
    return controlled(found, luck, population.slope)


def controlled(found: list[float], luck: list[float], expected: float) -> tuple[float, float]:
    """Mean and standard error of what was found, less what a control of known expectation explains of it."""
    slope, offset = statistics.linear_regression(luck, found)
    rest = sum((y - offset - slope * x) ** 2 for x, y in zip(luck, found, strict=True)) / (len(found) - 2)
    away = (expected - statistics.fmean(luck)) ** 2 / statistics.variance(luck) / (len(luck) - 1)
    return offset + slope * expected, math.sqrt(rest * (1 / len(luck) + away))


def point(training: Training, examples: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All sizes at one point of the run."""
    training.until(examples)
    generator = torch.Generator().manual_seed(examples)
    population = Population(training, training.population(arguments.population, generator))
    result: dict[str, Any] = {
        "asked": examples,
        "lr": training.lr,
        "examples": training.examples,
        "loss": population.loss,
        "marks": population.marks,
        "gains": {},
    }
    print(
        f"  F = {population.loss:.3g},",
        ", ".join(f"{name}: {m:.1f}" for name, m in population.marks.items()),
        flush=True,
    )
    for size in arguments.sizes:
        mean, error = gains(training, population, size, arguments, generator)
        result["gains"][str(size)] = [mean, error]
        print(
            f"  m = {size}: gain {mean:.3g} ± {error:.2g}, per example {mean / size / arguments.steps:.3g}", flush=True
        )
    return result


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="directory with data sets")
    parser.add_argument("--optimizer", help="the problem's by default")
    parser.add_argument("--lrs", default="0.3,0.1", type=_list_of(float))
    parser.add_argument("--at", default="5k,20k", type=_list_of(examples_of))
    parser.add_argument("--sizes", default="8,16,32,64,128,256,512", type=_list_of(int))
    parser.add_argument("--steps", type=int, default=1, help="steps of each trial")
    parser.add_argument("--draws", type=int, default=96, help="trials of each size")
    parser.add_argument("--population", type=int, default=8000, help="examples that batches are drawn from")
    parser.add_argument(
        "--sample", type=int, default=1000, help="examples of them that one trial's loss is measured on"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main(words: list[str] | None = None) -> None:
    """Measures what is not there yet, and draws all of it."""
    words = sys.argv[1:] if words is None else words
    arguments = options().parse_args(words)
    torch.set_num_threads(arguments.threads)
    chosen = problem(arguments.problem)
    optimizer = arguments.optimizer or chosen.optimizer
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{chosen.name}-{optimizer}.json"
    settings = {
        "problem": chosen.name,
        "optimizer": optimizer,
        **{name: getattr(arguments, name) for name in ("sizes", "steps", "draws", "population", "sample", "seed")},
    }
    points: list[dict[str, Any]] = []
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if any(before.get(name) != value for name, value in settings.items()):
            sys.exit(f"{path} has points with other settings: give another directory")
        points = before["points"]
    report = {
        "command": shlex.join(["python", "benchmarks/optimality.py", *words]),
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
        **hardware.describe(arguments.threads),
        **settings,
        "points": points,
    }
    for lr in arguments.lrs:
        there = {one["asked"] for one in points if one["lr"] == lr}
        if there >= set(arguments.at):
            continue
        training = Training(chosen, arguments.data, optimizer, lr, arguments.seed)
        for examples in sorted(set(arguments.at) - there):
            print(f"{chosen.name}, {optimizer}, α = {lr:g}, after {examples:,} examples", flush=True)
            points.append(point(training, examples, arguments))
            points.sort(key=lambda one: (-one["lr"], one["asked"]))
            write_json(path, report)
    draw(report, path.with_suffix(".png"))
    path.with_suffix(".md").write_text(table(report) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
