"""A budget where the loss has a floor that nobody gives: clouds that overlap. The table of docs/rules.md.

    python benchmarks/horizon_floor.py [--seeds 0,1] [--examples 30000] [--spreads 1.0,1.3,1.6]

The clouds are those of examples/budget.py, with a ReLU network, momentum and plain SGD; the wider they are, the more of
the loss stays. Each cell has the loss of the whole data at the end, one number a seed. Some minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from cabs import AdaptiveLoader, BatchSizeScheduler
from cabs.rules import CABS, Constant, Horizon, Rule

OPTIMIZERS = {"momentum 0.9, lr = 0.05": {"lr": 0.05, "momentum": 0.9}, "SGD, lr = 0.3": {"lr": 0.3}}


def methods(budget: int) -> dict[str, Rule]:
    return {
        "`budget=N`": CABS(budget=budget),
        "as measured": CABS(budget=budget, horizon="measured"),
        "by examples": CABS(budget=budget, horizon=Horizon()),
        "CABS": CABS(),
        **{f"constant {size}": Constant(size) for size in (16, 32, 64)},
    }


def train(rule: Rule, spread: float, seed: int, examples: int, settings: dict[str, float]) -> float:
    """The loss of the whole data after so many examples."""
    torch.manual_seed(0)
    centres, clouds = torch.randn(10, 20), torch.randint(10, (6000,))
    inputs = centres[clouds] + spread * torch.randn(6000, 20)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    loader = AdaptiveLoader(TensorDataset(inputs, clouds), batch_size=16, shuffle=True, stream=True)
    scheduler = BatchSizeScheduler(model, optimizer, loader, rule)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if scheduler.last is not None and scheduler.last.examples_total >= examples:
            break
    scheduler.close()
    with torch.no_grad():
        return F.cross_entropy(model(inputs), clouds).item()


def numbers(text: str) -> Sequence[float]:
    return [float(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=[0, 1], help="of the network and the order of examples")
    parser.add_argument("--examples", type=int, default=30_000)
    parser.add_argument("--spreads", type=numbers, default=[1.0, 1.3, 1.6], help="how wide the clouds are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rules = methods(arguments.examples)
    print("| | " + " | ".join(rules) + " |\n" + "| --- " * (len(rules) + 1) + "|")
    for name, settings in OPTIMIZERS.items():
        for spread in arguments.spreads:
            print(f"| {name}, spread {spread:g} |", end="", flush=True)
            for rule in rules.values():
                losses = [train(rule, spread, int(seed), arguments.examples, settings) for seed in arguments.seeds]
                print(" " + " ".join(f"{loss:.3f}" for loss in losses) + " |", end="", flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
