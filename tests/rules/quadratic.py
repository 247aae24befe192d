"""A noisy quadratic in closed form: F = ½ Σ h_j w_j², and gradients with the variance s_j/m.

E[w_j²] obeys u_j ← (1 − αh_j)² u_j + α² s_j / m, so expected losses need no sampling. Where ``vanishing`` is not 0 the
variance has a part that falls with the loss, s_j (1 + vanishing · F), as it does where all examples can be fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cabs.rules import Estimates, Rule, round_and_clip

Vector = NDArray[np.float64]


@dataclass
class Quadratic:
    name: str
    h: Vector
    s: Vector
    u: Vector
    alpha: float
    budget: int
    vanishing: float = 0.0

    @property
    def q(self) -> Vector:
        return (1 - self.alpha * self.h) ** 2

    def loss(self, u: Vector) -> float:
        return 0.5 * float(self.h @ u)

    def variance(self, loss: float) -> float:
        return float(self.s.sum()) * (1 + self.vanishing * loss)

    def step(self, u: Vector, m: float) -> Vector:
        return self.q * u + self.alpha**2 * self.s * (1 + self.vanishing * self.loss(u)) / m

    def estimates(self, u: Vector, seen: int, m: int) -> Estimates:
        loss = self.loss(u)
        return Estimates(
            loss=loss,
            learning_rates=(self.alpha,),
            variances=(self.variance(loss),),
            true_gradient_norms_squared=(float(self.h**2 @ u),),
            batch_size=m,
            examples_total=seen,
        )

    def run(self, rule: Rule, least: int = 16, c0: float = 0.0) -> tuple[float, list[int]]:
        """The expected loss where the budget ends, a step of m examples costing c0 + m, and the sizes on the way.

        A step that does not fit into what is left is not made: cut short, it would end the run in noise.
        """
        u, left, seen, sizes, memory = self.u, float(self.budget), 0, [least], None
        while True:
            estimates = self.estimates(u, seen, sizes[-1])
            memory = rule.remember(memory, estimates)
            m = round_and_clip(rule(replace(estimates, memory=memory)), least, 10**9)
            if c0 + m > left:
                return self.loss(u), sizes[1:]
            u, left, seen = self.step(u, m), left - c0 - m, seen + m
            sizes.append(m)

    def optimum(self, least: int = 16) -> tuple[float, Vector]:
        """The least expected loss that any sizes m ≥ least with Σ m = budget can reach, and the sizes.

        The loss after T steps is ½ Σ h u q^T + ½α² Σ_τ K(τ)/m_τ, with τ steps still to come and K(τ) = Σ h s q^τ. For a
        given T the best sizes are m_τ = max(least, λ√K(τ)); T is tried.
        """
        assert self.vanishing == 0
        kernel = (self.h * self.s) @ self.q[:, None] ** np.arange(int(self.budget / least))[None, :]
        best: tuple[float, Vector] = (np.inf, kernel)
        for steps in np.unique(np.geomspace(1, len(kernel), 80).round().astype(int)):
            root = np.sqrt(kernel[:steps])
            free = np.arange(1, steps + 1)
            scale = (self.budget - (steps - free) * least) / np.cumsum(root)
            whole = np.flatnonzero(scale * root >= least)
            sizes = np.maximum(least, scale[whole[-1]] * root) if len(whole) else np.full(steps, self.budget / steps)
            loss = self.loss(self.u * self.q**steps) + self.alpha**2 / 2 * float(np.sum(kernel[:steps] / sizes))
            if loss < best[0]:
                best = (loss, sizes[::-1])
        return best

    def searched(self, start: list[int], sweeps: int = 40) -> float:
        """The least expected loss found by trying: log m is piecewise linear in the examples seen.

        From the sizes ``start``, each of ten knots, all of them and their slope are moved up and down, the best move is
        made, and moves become smaller when none is good. Needs no formula, so ``vanishing`` may be anything.
        """
        at = np.array([0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.96, 1.0])
        seen = np.concatenate([[0], np.cumsum(start)[:-1]]) / self.budget
        knots, moves = np.interp(at, seen, np.log(start)), np.vstack([np.eye(10), np.ones(10), 2 * at - 1])
        best, length = float(self.losses(at, knots[None])[0]), 0.5
        for _ in range(sweeps):
            trials = np.maximum(np.log(16), knots + length * np.vstack([moves, -moves]))
            found = self.losses(at, trials)
            length *= 1.1 if found.min() < best * (1 - 1e-4) else 0.5
            if found.min() < best:
                best, knots = float(found.min()), trials[int(found.argmin())]
        return best

    def losses(self, at: Vector, knots: Vector) -> Vector:
        """The loss where the budget ends, for several piecewise linear log m."""
        u, left = np.repeat(self.u[None], len(knots), axis=0), np.full(len(knots), float(self.budget))
        while (left > 0.5).any():
            spent = 1 - left / self.budget
            k = np.clip(np.searchsorted(at, spent, side="right") - 1, 0, len(at) - 2)
            part = (spent - at[k]) / (at[k + 1] - at[k])
            rows = np.arange(len(knots))
            m = np.exp(knots[rows, k] * (1 - part) + knots[rows, k + 1] * part)
            m = np.where(left > 0.5, left / np.maximum(1, np.floor(left / m)), np.inf)  # fills what is left
            noise = (1 + self.vanishing * 0.5 * (u @ self.h)) / m
            u = np.where((left > 0.5)[:, None], self.q * u + self.alpha**2 * self.s * noise[:, None], u)
            left = np.where(left > 0.5, left - m, 0)
        return 0.5 * (u @ self.h)

    def shares(self, sizes: Vector) -> list[tuple[float, float]]:
        """(the part of the budget spent, ρ) before each step of these sizes."""
        u, seen, result = self.u, 0.0, []
        for m in sizes:
            result.append((seen / self.budget, self.alpha * self.variance(self.loss(u)) / (4 * m * self.loss(u))))
            u, seen = self.step(u, m), seen + m
        return result


def spectra(dimension: int = 32) -> dict[str, Vector]:
    """Curvatures as they are found: many flat directions, few steep ones."""
    j = np.arange(1.0, dimension + 1)
    powers = {f"h = j^-{p}": j**-p for p in (1.0, 1.5, 2.0)}
    return {**powers, "three decades": np.logspace(0, -3, dimension)}


def problems(steps: tuple[int, ...] = (500, 3000), vanishing: float = 0.0) -> Iterator[Quadratic]:
    """Spectra × noise like the curvature, or alike everywhere × αh_max × budgets × m_cabs at the start.

    Budgets are so many steps of 16 examples. With ``vanishing`` that part of the variance falls with the loss.
    """
    for name, h in spectra().items():
        for noise, shape in (("s ~ h", h), ("s ~ 1", np.ones_like(h))):
            for alpha in (0.1, 0.3, 0.9):
                for budget in steps:
                    for first in (5, 50):
                        loss = 0.5 * float(h.sum())
                        s = shape * first * loss / (alpha * float(shape.sum()))
                        label = f"{name}, {noise}, α = {alpha}, N = 16 · {budget}, m = {first}"
                        falling = vanishing / (1 - vanishing) / loss
                        yield Quadratic(label, h, s * (1 - vanishing), np.ones_like(h), alpha, 16 * budget, falling)


def unseen(steps: tuple[int, ...] = (1000, 6000)) -> Iterator[Quadratic]:
    """Other spectra, noise, starts, αh_max and budgets."""
    generator = np.random.default_rng(1)
    matrix = generator.normal(size=(80, 120))
    eigenvalues = np.linalg.eigvalsh(matrix @ matrix.T)
    j = np.arange(1.0, 81)
    curvatures = {
        "h = j^-1.25": j**-1.25,
        "h = j^-1.75": j**-1.75,
        "two decades": np.logspace(0, -2, 80),
        "four decades": np.logspace(0, -4, 80),
        "random matrix": eigenvalues / eigenvalues.max(),
        "six spikes": np.concatenate([np.linspace(0.3, 1, 6), np.full(60, 0.02)]),
    }
    for name, h in curvatures.items():
        for shape in (h, np.sqrt(h)):
            for u in (np.ones_like(h), 1 / np.sqrt(h)):
                for alpha in (0.2, 0.6):
                    for budget in steps:
                        for first in (10, 100):
                            s = shape * first * 0.5 * float(h @ u) / (alpha * float(shape.sum()))
                            yield Quadratic(name, h, s, u, alpha, 16 * budget)


def drawn(count: int, seed: int, vanishing: float = 0.0) -> Iterator[Quadratic]:
    """Problems at random: 1 to 60 directions over up to four decades, α h_max from 0.03 to 0.9, 100 to 4,000 steps."""
    generator = np.random.default_rng(seed)

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(generator.uniform(np.log(low), np.log(high))))

    for i in range(count):
        dimension = int(log_uniform(1, 61))
        power = np.arange(1.0, dimension + 1) ** -generator.uniform(0.5, 2.5)
        even = 10 ** -generator.uniform(0, generator.uniform(1, 4), dimension)
        h = power if i % 2 else even / even.max()
        shape, u = h ** generator.uniform(0, 1), h ** -generator.uniform(0, 1)
        alpha, steps, first = log_uniform(0.03, 0.9), log_uniform(100, 4000), log_uniform(3, 200)
        loss = 0.5 * float(h @ u)
        s = shape * first * loss / (alpha * float(shape.sum()))
        falling = vanishing / (1 - vanishing) / loss
        yield Quadratic(f"drawn {i}", h, s * (1 - vanishing), u, alpha, 16 * int(steps), falling)
