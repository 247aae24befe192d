"""P of the weighted norms Σ_j P_j g_j²: where it comes from, that it fits, and how long it is held.

A diagonal P may be as large as the model, and computed from an optimizer's state only when it is asked for. So it is
asked for one parameter at a time, and let go of as soon as that parameter's norms are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cabs.variance.parameters import Parameters

WeightsOf = Callable[[int], Tensor | None]
"""A parameter's weights by its id; None if it has none (yet)."""
Lookup = Callable[[Tensor], Tensor | None]


class Held:
    """Weights from the first time they are asked for in a backward pass until both norms that need them are known."""

    def __init__(self, weights: WeightsOf) -> None:
        self._weights = weights
        self._kept: dict[int, Tensor | None] = {}
        self._taken: set[int] = set()
        self.missing = False
        """Whether a parameter that was asked for has none."""

    def get(self, key: int) -> Tensor | None:
        if key not in self._kept:
            self._kept[key] = self._weights(key)
            self.missing |= self._kept[key] is None
        return self._kept[key]

    def again(self, key: int) -> Tensor | None:
        """The same, whether they are still needed or not."""
        return self._weights(key)

    def take(self, key: int, last: bool = False) -> Tensor | None:
        """The same, for one of the two norms: those of single examples, and that of their sum."""
        weights = self.get(key)
        if last or key in self._taken:
            del self._kept[key]
        self._taken.add(key)
        return weights


class Weights:
    """The weights of a model's parameters, whole where these are sharded.

    Args:
        lookup: the weights of a parameter.
        model: the module that has them.
        parameters: their names, and what they stand in for.
        trusted: leave out the look at every number.
    """

    def __init__(self, lookup: Lookup, model: nn.Module, parameters: Parameters, trusted: bool) -> None:
        self._lookup, self._parameters, self._trusted = lookup, parameters, trusted
        self._shards = _in_shards(model) if parameters.sharded else {}
        self._whole: dict[int, Tensor | None] = {}

    def __call__(self, key: int) -> Tensor | None:
        parameter = self._parameters.original(key)
        assert parameter is not None
        if id(parameter) not in self._shards:
            return self._checked(parameter)
        if id(parameter) not in self._whole:
            # All parameters of a module that fully_shard gathers at a time, in one order: processes have to agree on
            # it, and different modules are used in the same order by all of them anyway.
            self._whole = {id(p): _whole(self._checked(p)) for p in self._shards[id(parameter)]}
        return self._whole[id(parameter)]

    def forget(self) -> None:
        """Lets go of what was gathered."""
        self._whole = {}

    def _checked(self, parameter: Tensor) -> Tensor | None:
        weights = self._lookup(parameter)
        if weights is not None:
            _check(weights, parameter, self._parameters.name(id(parameter)), self._trusted)
            weights = weights.detach().to(parameter.device)
        return weights


def lookup_of(weights: Mapping[Tensor, Tensor], model: nn.Module, parameters: Parameters) -> Lookup:
    """What ``GradientVariance`` is given, if every parameter that is measured has weights that fit it."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights is a {type(weights).__name__}: it must map each parameter to a tensor of its shape")
    own = {id(p) for p in model.parameters()}
    for key in weights:
        if id(key) not in own:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise ValueError(f"weights has {what} for a key, which is no parameter of the model")
    for name, parameter in model.named_parameters():
        if id(parameter) in parameters.groups and parameter.requires_grad:
            if parameter not in weights:
                raise ValueError(f"weights has nothing for {name}: each parameter that is measured needs a tensor")
            _check(weights[parameter], parameter, name, trusted=False)
    return weights.get


def _check(weights: Any, parameter: Tensor, name: str, trusted: bool) -> None:
    if not isinstance(weights, Tensor) or weights.is_complex() or weights.is_sparse:
        raise TypeError(f"the weights of {name} are {type(weights).__name__}: they must be a dense tensor of reals")
    if weights.shape != parameter.shape:
        raise ValueError(
            f"the weights of {name} have shape {tuple(weights.shape)}, and the parameter has {tuple(parameter.shape)}"
        )
    if not trusted:
        local = weights.to_local() if hasattr(weights, "to_local") else weights
        if not bool(torch.isfinite(local).all()) or bool((local < 0).any()):
            raise ValueError(f"the weights of {name} are not all finite and at least 0")


def _in_shards(model: nn.Module) -> dict[int, list[Tensor]]:
    """For each parameter all those of the module that ``fully_shard`` gathers it with."""
    from torch.distributed.fsdp import FSDPModule

    innermost: dict[int, tuple[int, Tensor]] = {}
    for number, module in enumerate(model.modules()):
        if isinstance(module, FSDPModule):
            innermost |= {id(p): (number, p) for p in module.parameters() if p.requires_grad}
    together: dict[int, list[Tensor]] = {}
    for number, parameter in innermost.values():
        together.setdefault(number, []).append(parameter)
    return {key: together[number] for key, (number, _) in innermost.items()}


def _whole(weights: Tensor | None) -> Tensor | None:
    return weights.full_tensor() if hasattr(weights, "full_tensor") else weights  # type: ignore[union-attr]
