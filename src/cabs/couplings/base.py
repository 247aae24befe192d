"""What a coupling is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Group = Mapping[str, Any]
"""One of an optimizer's ``param_groups``."""
State = Mapping[str, Any]
"""What an optimizer keeps of one parameter; empty before its first step."""


class Coupling:
    """Reads a step as w ← w − α P u: u is g or an average of gradients with unit gain, P a slowly changing diagonal.

    In the coordinates P^{-1/2} w this is plain SGD with the gradient P^{1/2} g, so that the paper's rule becomes
    m = α tr(PΣ) / F. A coupling keeps nothing itself: both are read from the optimizer, α at every step and P in every
    backward pass that is measured. P is that of the last step made, the nearest thing to the next one's.
    """

    diagonal: bool = True
    """Whether P is a diagonal; else it is 1, and measured at no more cost than for plain SGD."""

    def alpha(self, group: Group, state: State) -> float:
        """α, for a parameter of a group; its state may be empty."""
        return float(group["lr"])

    def weights(self, group: Group, state: State) -> Tensor | None:
        """P, non-negative and of the parameter's shape; None as long as there is none."""
        return None
