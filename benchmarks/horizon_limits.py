"""How near to the best sizes any rule can come that is not told the curvatures: pairs of quadratics that look alike.

    PYTHONPATH=tests/rules python benchmarks/horizon_limits.py [--trials 1000] [--tolerance 0.02]

In both of a pair all signal is in one direction, tr Σ is the same, and most noise is in a flat direction: in A one that
remembers it until the end, so that batches should be large from the start; in B one so flat that noise there does no
harm, and many small steps are best. While there is much signal, neither F nor ‖∇F‖² tells A from B, and a rule that
sees no more must choose the same sizes for both. Once either differs by more than the tolerance, each is given its own
best sizes. The shared sizes are searched for that make the worse of the two as good as can be, relative to its optimum.

The bound is lower and needs no such search: noise is most at the least size, and until it would exceed the tolerance
there it cannot be seen at any. After that many steps the rule is told which it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from quadratic import Quadratic, Vector

from cabs.rules import CABS

LEAST, KNOTS = 16, 6
Pair = tuple[Quadratic, Quadratic]


def pair(signal: float, flat: float, noise: float, steep: float, steps: int) -> Pair:
    """αh of the directions of the signal and of A's noise, tr Σ, the part of B's noise along the signal, the budget."""
    h, start = np.array([signal, flat, 0.0]), np.array([2 / signal, 0, 0])
    a, b = np.array([0, noise, 0]), np.array([noise * steep, 0, noise * (1 - steep)])
    return Quadratic("A", h, a, start, 1, LEAST * steps), Quadratic("B", h, b, start, 1, LEAST * steps)


PAIRS = (
    (0.125, 7e-4, 90.0, 0.007, 172),
    (0.17, 0.007, 1.3, 0.053, 132),
    (0.0425, 0.00175, 1.3, 0.053, 528),
    (0.15, 0.002, 0.77, 0.025, 352),
)


def alike(a: Quadratic, b: Quadratic, sizes: Vector, tolerance: float) -> int:
    """After how many of these steps F or ‖∇F‖² differs by more than the tolerance."""
    u, v = a.u, b.u
    for i, m in enumerate(sizes):
        if any(abs(np.log((a.h**p @ u) / (b.h**p @ v))) > tolerance for p in (1, 2)):
            return i
        u, v = a.step(u, m), b.step(v, m)
    return len(sizes)


def worse(both: Pair) -> Callable[[Vector], float]:
    """Of shared sizes: the worse of the two losses that can then still be reached, relative to the optima."""
    optima = [problem.optimum(LEAST)[0] for problem in both]

    def ended(problem: Quadratic, sizes: Vector) -> float:
        left, u = problem.budget - int(sizes.sum()), problem.u
        for m in sizes:
            u = problem.step(u, m)
        return replace(problem, u=u, budget=left).optimum(LEAST)[0] if left >= LEAST else np.inf

    return lambda sizes: max(ended(problem, sizes) / best for problem, best in zip(both, optima, strict=True))


def searched(loss: Callable[[Vector], float], count: int, trials: int) -> tuple[float, Vector]:
    """The least of a function of so many log sizes, by random steps from the best that are all the same."""
    generator, length = np.random.default_rng(0), 0.3
    x = min((np.full(count, np.log(m)) for m in np.geomspace(LEAST, 512, 40)), key=loss)
    best = loss(x)
    for _ in range(trials):
        trial = np.maximum(np.log(LEAST), x + length * generator.normal(size=count) * (generator.random(count) < 0.5))
        value = loss(trial)
        length = min(1.0, length * 1.5) if value < best else max(1e-3, length * 0.95)
        best, x = (value, trial) if value < best else (best, x)
    return best, x


def limit(both: Pair, tolerance: float, trials: int) -> tuple[float, float]:
    """The least worse ratio that shared sizes can reach, and the part of the budget that is shared."""
    ratio, budget, at = worse(both), both[0].budget, np.linspace(0, 0.5, KNOTS)

    def shared(logs: Vector) -> Vector:
        seen, sizes = 0.0, list[float]()
        while (m := float(np.exp(np.interp(seen / budget, at, logs)))) <= budget - seen:
            sizes, seen = [*sizes, m], seen + m
        return np.array(sizes[: alike(*both, np.array(sizes), tolerance)])

    best, logs = searched(lambda logs: ratio(shared(logs)), KNOTS, trials)
    return best, float(shared(logs).sum()) / budget


def bound(both: Pair, tolerance: float, trials: int) -> tuple[float, int]:
    """The same for a rule that is told as soon as noise could be seen, and the number of steps until then."""
    small, ratio = np.full(both[0].budget // LEAST, float(LEAST)), worse(both)
    steps = min(alike(problem, replace(problem, s=0 * problem.s), small, tolerance) for problem in both)
    return searched(lambda logs: ratio(np.exp(logs)), steps, trials)[0], steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="shared sizes that are tried")
    parser.add_argument("--tolerance", type=float, default=0.02, help="the difference that can be told")
    arguments = vars(parser.parse_args())
    for settings in PAIRS:
        both = pair(*settings)
        print("αh {}, flat {}, tr Σ {}, steep {}, {} steps of 16:".format(*settings))
        for problem in both:
            best, sizes = problem.optimum(LEAST)
            rule = problem.run(CABS(budget=problem.budget))[0] / best
            print(f"  best {problem.name}: {best:.2g} in {len(sizes)} steps from {sizes[0]:.0f}; the rule {rule:.2f}")
        (best, part), (told, steps) = limit(both, **arguments), bound(both, **arguments)
        print(f"  told apart after {part:.0%}: {best:.2f}; told after {steps} steps: {told:.2f}", flush=True)


if __name__ == "__main__":
    main()
