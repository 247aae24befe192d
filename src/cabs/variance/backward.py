"""What one backward pass leaves behind: squared norms of single examples, and of their sum.

Nothing here knows how losses are scaled or how passes are put together: the numbers are of the gradients as
they flow, G_i with Σ_i G_i the pass's contribution to ``.grad``. ``reading.py`` undoes the scaling, in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cabs.norms import squared_norm
from cabs.variance.accumulated import Accumulated
from cabs.variance.dots import Dots
from cabs.variance.factors import PerExample, Sum
from cabs.variance.weights import Held, WeightsOf

Squares = Callable[[PerExample, Tensor | None], Tensor]
Terms = dict[int, list[Tensor]]
SQUARES: Mapping[str, Squares] = {"exact": lambda g, w: g.squared_norms(w), "paper": lambda g, w: g.positionwise(w)}


class BackwardPass:
    """The running sums of one backward pass; parameters are known by the number of their group."""

    def __init__(
        self,
        task: int,
        examples: int,
        squares: Squares | None,
        groups: Mapping[int, int],
        *,
        weight: float | None = None,
        scale: Tensor | None = None,
        accumulated: Accumulated,
        accumulates: bool = False,
        weights: WeightsOf | None = None,
        dots: Dots | None = None,
        norms_only: bool = False,
    ) -> None:
        self.task = task
        self.examples = examples
        self.weight = weight
        """The factor of one example's gradient in that of the step, if it was told."""
        self.scale = scale
        self.accumulates = accumulates
        """Whether the batch has had earlier passes."""
        self.roots: list[Tensor] = []
        """What ``backward`` was called on."""
        self.penalized = False
        """Whether some parameter got more gradient than the examples account for."""
        self._excess: dict[int, Tensor] = {}
        """The square of that, for parameters of no penalty."""
        self.unmeasured = False
        """Whether compiled code could not be measured, so that nothing here is worth reading."""
        self._norms_only = norms_only
        self._weights_of = weights
        self._weights = None if weights is None else Held(weights)
        self._accumulated = accumulated
        self._totals: dict[int, Tensor] = {}
        """Σ_i G_i of parameters whose gradient has yet to arrive."""
        self.squares: dict[int, list[Tensor]] = {}
        """Σ over parameters of ‖G_i‖², by group, when finished; a tensor for each number of examples measured."""
        self.square_of_sum: dict[int, Tensor] = {}
        """Σ over parameters of ‖Σ_i G_i‖², by group, when finished."""
        self._terms: tuple[Terms, Terms] = ({}, {})
        self.dots = dots
        """⟨G_i, Σ_i G_i⟩, if they are asked for."""
        self.claimed: set[int] = set()
        self._square = squares
        self._groups = groups
        self._uses: dict[int, list[PerExample]] = {}
        self._sums: dict[int, tuple[Tensor, int]] = {}
        self._finished: set[int] = set()

    def add(self, parameter: Tensor, gradients: PerExample, expected_uses: int) -> None:
        """Takes one use of a parameter; the uses of one parameter are squared together."""
        key = id(parameter)
        self.claimed.add(key)
        if key not in self._groups:
            return
        uses = self._uses.setdefault(key, [])
        uses.append(gradients)
        if len(uses) == expected_uses:
            self._square_uses(key)
        else:
            self._weighs(key)  # as the weights are now, should the rest never come

    @property
    def unweighed(self) -> bool:
        """Whether some parameter had a gradient and no weights, so that nothing here is worth reading."""
        return self._weights is not None and self._weights.missing

    @property
    def sums_by_grams(self) -> bool:
        """Whether ``add_square_of_sum`` will do for a parameter with a single use."""
        return self._weights is None and not self.accumulates and not self._norms_only

    def beside(self, examples: int) -> BackwardPass:
        """A record for some of the examples, of whose gradients the norms are wanted and not the sum."""
        return BackwardPass(
            self.task,
            examples,
            self._square,
            self._groups,
            accumulated=Accumulated(),
            weights=self._weights_of,
            norms_only=True,
        )

    def absorb(self, other: BackwardPass) -> None:
        """Takes the norms that were found beside."""
        other.finish()
        self.claimed |= other.claimed
        for group, values in other.squares.items():
            self._terms[0].setdefault(group, []).extend(values)

    def wants_norms(self, parameter: Tensor) -> bool:
        """Whether ``add_norms`` will do for a parameter with a single use."""
        key = id(parameter)
        exact = self._square is SQUARES["exact"] and self.dots is None
        return exact and key in self._groups and self._weighs(key)

    def weights(self, parameter: Tensor) -> Tensor | None:
        """What the squares of a parameter's elements are multiplied by; None for 1."""
        return None if self._weights is None else self._weights.get(id(parameter))

    def _weighs(self, key: int) -> bool:
        """Whether a parameter's squares can be weighed, if they must be."""
        return self._weights is None or self._weights.get(key) is not None

    def add_norms(self, parameter: Tensor, squared_norms: Tensor) -> None:
        """Takes ‖G_i‖² of a parameter with a single use."""
        key = id(parameter)
        self.claimed.add(key)
        self._finish(key)
        if self._weights is not None:
            self._weights.take(key, last=self._norms_only)
        self._accumulate(self._terms[0], key, squared_norms)

    def add_whole(self, parameter: Tensor, gradient: Tensor, square: bool) -> None:
        """Takes the pass's gradient of a parameter; ``square`` if the pass counts as one example (``microbatch``)."""
        key = id(parameter)
        if key not in self._groups:
            return
        self.claimed.add(key)
        self._add_cross(parameter, gradient)
        own = self._add_own_square(key, gradient, alone=True)
        if square and own is not None:
            self._accumulate(self._terms[0], key, own)
        self._accumulated.add(parameter, gradient, gradient)

    def add_sum(self, parameter: Tensor, gradient: Tensor, expected_uses: int, squared: bool = False) -> None:
        """Takes Σ_i G_i of one use of a parameter, as autograd computed it; ``squared`` if its square is known."""
        key = id(parameter)
        if key not in self._groups or self._norms_only:
            return
        total, count = self._sums.get(key, (None, 0))
        if total is not None:
            gradient = total + gradient
        if count + 1 < expected_uses:
            # Should the other uses never come, this may be what ends up in ``.grad``, to be clipped there.
            self._sums[key] = (gradient.clone() if count == 0 else gradient, count + 1)
            self._weighs(key)
            return
        self._sums.pop(key, None)
        self._totals[key] = gradient
        self._note_sum(key, gradient)
        if not squared:
            self._add_cross(parameter, gradient)
            self._add_own_square(key, gradient)

    def receive(self, parameter: Tensor, gradient: Tensor) -> tuple[Tensor | None, bool]:
        """Takes what arrives at a parameter; Σ_i G_i of its uses, if all have come, and whether that is all of it."""
        total = self._totals.pop(id(parameter), None)
        if total is None or gradient.is_sparse or total.is_sparse:
            return total, total is not None and close(total, gradient)
        whole = total.data_ptr() == gradient.data_ptr() or close(total, gradient)
        self.penalized = self.penalized or not whole
        self._accumulated.add(parameter, total, gradient)
        return total, whole

    def note_excess(self, key: int, excess: Tensor) -> None:
        """Takes what arrived at a parameter besides its uses, though no penalty is known of."""
        weights = None if self._weights is None else self._weights.again(key)
        if torch.finfo(excess.dtype).eps < TOLERANCE and (self._weights is None or weights is not None):
            self._excess[key] = squared_norm(excess, weights)

    def unaccounted(self) -> set[int]:
        """The parameters with such an excess; one that is nothing beside the rest is rounding."""
        if not self._excess:
            return set()
        self.finish()
        rest = sum(float(square) for square in self.square_of_sum.values())
        return {key for key, square in self._excess.items() if float(square) > TOLERANCE**4 * rest}

    def _add_own_square(self, key: int, gradient: Tensor, alone: bool = False) -> Tensor | None:
        weights = None if self._weights is None else self._weights.take(key, last=alone)
        if weights is None and self._weights is not None:
            return None
        square = squared_norm(gradient, weights)
        self._accumulate(self._terms[1], key, square)
        return square

    def _add_cross(self, parameter: Tensor, gradient: Tensor) -> None:
        before = self._accumulated.before(parameter) if self.accumulates else None
        if before is not None and self._weighs(id(parameter)):
            # ‖a + b‖² = ‖a‖² + ‖b‖² + 2⟨a, b⟩
            weights = self.weights(parameter)
            if weights is not None:
                before = before * weights.to(before.dtype)
            cross = (
                torch.sum(before * gradient)
                if gradient.is_sparse
                else torch.vdot(before.flatten().to(gradient.dtype), gradient.flatten())
            )
            self._accumulate(self._terms[1], id(parameter), 2 * (cross.real if cross.is_complex() else cross))

    def add_square_of_sum(self, parameter: Tensor, square: Tensor) -> None:
        """Takes ‖Σ_i G_i‖² of a parameter with a single use."""
        if id(parameter) in self._groups:
            self._accumulate(self._terms[1], id(parameter), square)

    def finish(self) -> None:
        """Squares what is still waiting for uses that the backward pass never reached."""
        for key in list(self._uses):
            self._square_uses(key)
        for key in list(self._sums):
            total = self._sums.pop(key)[0]
            self._add_own_square(key, total)
            self._note_sum(key, total)
        # One sum over many parameters rather than many sums of two.
        squares, squares_of_sums = self._terms
        for group, values in squares.items():
            values += self.squares.pop(group, [])
            lengths = {value.shape for value in values}
            self.squares[group] = [torch.stack([v for v in values if v.shape == shape]).sum(0) for shape in lengths]
        for group, values in squares_of_sums.items():
            values += [self.square_of_sum.pop(group)] if group in self.square_of_sum else []
            self.square_of_sum[group] = torch.stack(values).sum()
        self._terms = ({}, {})

    def mean_squares(self, group: int) -> Tensor | None:
        """The mean over examples of ‖G_i‖², for the parameters of a group."""
        if group not in self.squares:
            return None
        means = [values.mean() for values in self.squares[group]]
        return means[0] if len(means) == 1 else torch.stack(means).sum()

    def _square_uses(self, key: int) -> None:
        uses = self._uses.pop(key)
        self._finish(key)
        assert self._square is not None
        gradients = uses[0] if len(uses) == 1 else Sum(uses)
        if self._weighs(key):
            weights = None if self._weights is None else self._weights.take(key, last=self._norms_only)
            self._accumulate(self._terms[0], key, self._square(gradients, weights))
        if self.dots is not None:
            self.dots.take(key, gradients)

    def _note_sum(self, key: int, total: Tensor) -> None:
        if self.dots is not None:
            self.dots.take_sum(key, total)

    def _finish(self, key: int) -> None:
        if key in self._finished:
            raise RuntimeError(
                "a parameter was used again after its gradients had been measured: call backward once on the sum of "
                "all losses of a step, and checkpoint layers that share parameters with use_reentrant=False"
            )
        self._finished.add(key)

    def _accumulate(self, terms: Terms, key: int, value: Tensor) -> None:
        terms.setdefault(self._groups[key], []).append(value)


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two gradients are the same but for rounding."""
    difference = squared_norm(one.to(other.dtype) - other)
    return bool(difference <= TOLERANCE**2 * squared_norm(other))


TOLERANCE = 1e-3
