"""What a batch-size schedule costs: a loop with the scheduler and a rule that measures nothing, beside the plain loop.

    python benchmarks/schedules.py [--rounds 40] [--steps 50] [--threads 1] [--out FILE]

Both loops train the same small network on the same batches of the same AdaptiveLoader settings, in turns within one
run, so that whatever else the machine does meets both alike. The ratio is the median over pairs; the difference is
given in microseconds of a step, which is what the scheduler's own arithmetic takes. A larger network makes the ratio
smaller, not the difference.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from cabs import AdaptiveLoader, BatchSizeScheduler, rules

WIDTHS = (64, 1024)


class Loop:
    """A loop of its own: network, optimizer, loader, and perhaps a scheduler."""

    def __init__(self, width: int, batch_size: int, scheduled: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
        self.loader = AdaptiveLoader(data, batch_size=batch_size, shuffle=True, seed=0, stream=True)
        self.scheduler = None
        if scheduled:
            rule = rules.Steps(f"0:{batch_size} 1G:{2 * batch_size}")
            self.scheduler = BatchSizeScheduler(self.model, self.optimizer, self.loader, rule, min_batch_size=2)
        self.batches = iter(self.loader)

    def seconds(self, steps: int) -> float:
        """Of so many steps. The plain loop reads its loss too, as people do to log it."""
        start = time.perf_counter()
        for _ in range(steps):
            inputs, targets = next(self.batches)
            loss = F.cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.scheduler is None:
                loss.item()
            else:
                self.scheduler.step(loss)
        return time.perf_counter() - start


def main() -> None:
    """Prints a table, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="pairs to take medians of")
    parser.add_argument("--steps", type=int, default=50, help="steps of each loop in a pair")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = [
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, threads {arguments.threads}, "
        f"n = {arguments.rounds} pairs of {arguments.steps} steps of {arguments.batch_size} examples",
        "",
        "| width | plain step, µs | with a schedule, µs | ratio (quartiles) | difference, µs |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for width in WIDTHS:
        plain, scheduled = (Loop(width, arguments.batch_size, flag) for flag in (False, True))
        for loop in (plain, scheduled):
            loop.seconds(arguments.steps)
        pairs = []
        for turn in range(arguments.rounds):
            first, second = (plain, scheduled) if turn % 2 else (scheduled, plain)
            times = {loop: loop.seconds(arguments.steps) for loop in (first, second)}
            pairs.append((times[plain], times[scheduled]))
        unit = 1e6 / arguments.steps
        low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
        lines.append(
            f"| {width} | {unit * statistics.median(a for a, _ in pairs):.0f} "
            f"| {unit * statistics.median(b for _, b in pairs):.0f} | {middle:.3f} ({low:.3f} to {high:.3f}) "
            f"| {unit * statistics.median(b - a for a, b in pairs):.1f} |"
        )
    text = "\n".join(lines)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
