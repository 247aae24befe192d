"""How near the horizon comes to the best sizes there are, on noisy quadratics: the table of docs/theory.md.

    PYTHONPATH=tests/rules python benchmarks/horizon_quadratics.py [--drawn 300]

Where the noise is constant the best sizes are computed; where it falls with the loss they are searched for, which takes
a minute or two.
"""

from __future__ import annotations

import argparse

import numpy as np
from quadratic import Quadratic, drawn, problems, unseen

from cabs.rules import CABS, Horizon, Rule

METHODS = {
    "the smaller of the two below": lambda budget: CABS(budget=budget),
    "as measured": lambda budget: CABS(budget=budget, horizon="measured"),
    "0.6 until 60%, then to 1/8": lambda budget: CABS(budget=budget, horizon=Horizon()),
    "1 until 70%, then to 1/16": lambda budget: CABS(budget=budget, horizon=Horizon(1, 0.7, 1 / 16)),
    "1/2 throughout": lambda budget: CABS(noise_share=0.5),
    "CABS": lambda budget: CABS(),
}


def least(problem: Quadratic) -> float:
    """The best loss: computed, or the best that is found from where the rules ended."""
    if problem.vanishing == 0:
        return problem.optimum()[0]
    runs = [problem.run(make(problem.budget)) for make in METHODS.values()]
    starts = sorted(((loss, sizes) for loss, sizes in runs if np.isfinite(loss)), key=lambda run: run[0])[:2]
    return min(problem.searched(sizes) for _, sizes in starts)


def ended(problem: Quadratic, rule: Rule) -> float:
    return problem.run(rule)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=300, help="problems drawn at random")
    count = parser.parse_args().drawn
    groups = {
        "96": list(problems()),
        "192 others": list(unseen()),
        "drawn": list(drawn(count, seed=2026)),
        "drawn, noise falls with the loss": list(drawn(count // 5, seed=7, vanishing=0.95)),
    }
    for title, group in groups.items():
        best = np.array([least(problem) for problem in group])
        print(f"{title}: {len(group)} problems")
        for name, make in METHODS.items():
            ratios = np.array([ended(problem, make(problem.budget)) for problem in group]) / best
            mean = np.exp(np.mean(np.log(ratios)))
            print(
                f"  {name:28} median {np.median(ratios):.2f}  mean {mean:.2f}  worst {ratios.max():.3g}  "
                f"within 10% {np.mean(ratios < 1.1):.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
