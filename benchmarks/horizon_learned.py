"""Can a run learn its curvatures from what it measures, and plan the rest of its budget with them? On noisy quadratics.

    PYTHONPATH=tests/rules python benchmarks/horizon_learned.py [--count 40]

The best sizes of docs/theory.md need the curvatures h_j, the noise s_j and the distances u_j of every direction. A run
sees F, ‖∇F‖² and tr Σ. Here they come without any noise of their own, and thirty-six curvatures over five decades are
fitted to their whole history by least squares with non-negative s and u, every 3% of the budget; until the next fit the
sizes are those that would be best if the fit were the truth. Until a tenth of the budget is spent the rule chooses.
"""

from __future__ import annotations

import argparse

import numpy as np
from quadratic import Quadratic, drawn, problems, unseen
from scipy.optimize import nnls

from cabs.rules import CABS, round_and_clip
from cabs.rules.horizon import fit

LEAST = 16
STEEPNESS = np.geomspace(0.999, 1e-5, 36)
"""αh of the directions that are fitted."""
FIRST, EVERY, RECORD = 0.1, 0.03, 0.015
"""Parts of the budget: before the first fit, between fits, and between two moments that are fitted to."""


class History:
    """What each of the fitted directions would have done until now, and what was measured on the way."""

    def __init__(self, alpha: float, variance: float) -> None:
        self.alpha, self.variance, self.h = alpha, variance, STEEPNESS / alpha
        self.kept, self.noise = np.ones_like(self.h), np.zeros_like(self.h)
        self.rows: list[np.ndarray] = []

    def record(self, loss: float, gradient: float) -> None:
        """F = ½ Σ h (u₀ kept + s noise) and ‖∇F‖² = Σ h² (u₀ kept + s noise), each relative to what was measured."""
        both = np.concatenate([self.kept, self.noise])
        h = np.concatenate([self.h, self.h])
        self.rows += [h * both / (2 * loss), h**2 * both / gradient]

    def step(self, m: float) -> None:
        forgotten = (1 - STEEPNESS) ** 2
        self.kept, self.noise = self.kept * forgotten, self.noise * forgotten + self.alpha**2 / m

    def fitted(self, left: float) -> Quadratic:
        """The quadratic of which the rest of the run is one, as far as can be told."""
        variance = np.concatenate([np.zeros_like(self.h), np.ones_like(self.h)]) / self.variance
        matrix = np.stack([*self.rows, 3 * variance])
        scale = np.linalg.norm(matrix, axis=0)
        found = nnls(matrix / scale, np.array([1.0] * len(self.rows) + [3.0]), maxiter=5000)[0] / scale
        start, s = np.split(found, 2)
        return Quadratic("fitted", self.h, s, start * self.kept + s * self.noise, self.alpha, int(left))


def learned(problem: Quadratic) -> float:
    """The loss where the budget ends."""
    history, rule = History(problem.alpha, float(problem.s.sum())), CABS(budget=problem.budget)
    u, left, m, memory = problem.u, float(problem.budget), LEAST, None
    plan: list[float] = []
    fit_at, record_at = FIRST, 0.0
    while left >= LEAST:
        spent = 1 - left / problem.budget
        estimates = problem.estimates(u, int(problem.budget - left), m)
        memory = rule.remember(memory, estimates)
        if spent >= record_at:
            history.record(estimates.loss, estimates.true_gradient_norms_squared[0])
            record_at = spent + RECORD
        if spent >= fit_at or (spent >= FIRST and not plan):
            plan, fit_at = list(history.fitted(left).optimum(LEAST)[1]), spent + EVERY
        wanted = fit(plan.pop(0), left, LEAST) if plan else rule(estimates)
        m = round_and_clip(wanted, LEAST, 10**9)
        if m > left:
            break
        history.step(m)
        u, left = problem.step(u, m), left - m
    return problem.loss(u)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="so many of each group of problems, chosen at random")
    count = parser.parse_args().count
    for title, group in {"96": problems(), "192 others": unseen(), "300 drawn": drawn(300, seed=2026)}.items():
        everything = list(group)
        chosen = [everything[i] for i in np.random.default_rng(0).permutation(len(everything))[:count]]
        best = np.array([problem.optimum()[0] for problem in chosen])
        for name, ended in {"the rule": lambda p: p.run(CABS(budget=p.budget))[0], "learned": learned}.items():
            ratios = np.array([ended(problem) for problem in chosen]) / best
            print(
                f"{title}, {len(chosen)} of them, {name}: median {np.median(ratios):.2f}  mean "
                f"{np.exp(np.mean(np.log(ratios))):.2f}  worst {ratios.max():.3g}  "
                f"within 10% {np.mean(ratios < 1.1):.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
