"""What measuring fewer examples, or fewer steps, does to the batch sizes that CABS chooses.

    python benchmarks/subset.py PROBLEM --data DIR [--optimizer sgd] [--lr 0.1] [--examples 150000] [--out OUT.md]

One run is driven by all examples of every step. The squared norms of all single gradients are kept, so that what any
other way of measuring would have chosen *at the same steps of the same run* can be computed afterwards: the ratio of
its size to the one from everything has a mean (its bias) and a spread.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from cabs import AdaptiveLoader, GradientVariance
from cabs.couplings import Coupled, coupling_of
from cabs.experiments.problems import problem
from cabs.rules import round_and_clip
from cabs.scheduler.smoothing import ExponentialAverage
from cabs_bench.measure import environment

WAYS = [
    (None, 1),
    (32, 1),
    (16, 1),
    (8, 1),
    (None, 4),
    (32, 4),
    (16, 2),
    (16, 4),
    (8, 2),
    (32, 5),
    (32, 8),
    (None, 5),
    (None, 8),
]
WEIGHTED = [(None, 1), (None, 5), (None, 8), (16, 5), (8, 5), (8, 8), (8, 10), (4, 5), (4, 8)]
"""(examples measured at most, steps from one measurement to the next)"""

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
}

Record = tuple[float, torch.Tensor, float]
"""F, every ‖g_i‖² and ‖g‖² of a step."""


def record(name: str, data: Path | None, kind: str, lr: float, examples: int) -> list[Record]:
    torch.manual_seed(0)
    chosen = problem(name)
    model = chosen.network()
    train = chosen.load(data).train
    loader = AdaptiveLoader(TensorDataset(train.images, train.labels), batch_size=16, shuffle=True, stream=True, seed=0)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr)
    variance = GradientVariance(model).attach()
    coupled = Coupled(optimizer, coupling_of(optimizer))
    if coupled.diagonal:
        variance.weigh(coupled.weights, trusted=True)
    generator = torch.Generator().manual_seed(0)
    averages = ExponentialAverage.zeros(2)
    seen, records = 0, []
    for images, labels in loader:
        loss = F.cross_entropy(model(chosen.inputs.train(images, generator)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(labels)
        if variance.unweighed:  # the first step of an optimizer that has a P only then
            variance.reset()
            continue
        norms, square = variance.squared_norms(), variance.mean_squared_norm.item()
        variance.reset()
        records.append((loss.item(), norms, square))
        averages = averages.update((records[-1][0], norms.mean().item() - square), 0.95)
        f, trace = averages.mean
        loader.batch_size = round_and_clip(coupled.alphas()[0] * trace / f, 16, 2048)
        if seen >= examples:
            return records
    raise AssertionError("a stream does not end")


def sizes(records: list[Record], most: int | None, every: int) -> list[float]:
    """α tr Σ / F without α, step by step, as this way of measuring would have it."""
    averages = ExponentialAverage.zeros(2)
    held, chosen = 0.0, []
    for step, (loss, norms, square) in enumerate(records):
        if step % every == 0:
            k = len(norms) if most is None else min(most, len(norms))
            stride = len(norms) // k
            held = norms[: stride * k : stride].mean().item() - square
        averages = averages.update((loss, held), 0.95)
        f, trace = averages.mean
        chosen.append(trace / f)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--examples", type=int, default=150_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records = record(options.problem, options.data, options.optimizer, options.lr, options.examples)
    whole = sizes(records, None, 1)
    lines = [
        f"# Fewer examples, fewer steps: {options.problem}",
        "",
        f"`python benchmarks/subset.py {options.problem} --optimizer {options.optimizer} --lr {options.lr} "
        f"--examples {options.examples}`,",
        f"{environment()}.",
        "",
        f"{len(records)} steps of {len(records[0][1])} to {max(len(r[1]) for r in records)} examples, the first 40",
        "left out. Sizes are relative to those from all examples of every step.",
        "",
        "| examples measured, at most | every … steps | mean | spread (standard deviation) | 5% to 95% |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for most, every in WEIGHTED if options.optimizer == "adamw" else WAYS:
        pairs = zip(sizes(records, most, every), whole, strict=True)
        ratios = torch.tensor([a / b for a, b in pairs][40:])
        low, high = ratios.quantile(torch.tensor([0.05, 0.95])).tolist()
        cells = ["all" if most is None else most, every, f"{ratios.mean():.3f}", f"{ratios.std():.3f}"]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {low:.2f} to {high:.2f} |")
    own = torch.tensor([math.log(b / a) for a, b in zip(whole[40:], whole[60:], strict=False)])
    moves = f"{own.std():.2f} (standard deviation of the log)"
    lines += ["", f"The size from everything itself moves by {moves} in 20 steps."]
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
