"""Which formula measures which operation, and how users add their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cabs.variance.factors import PerExample

OperationFunction = Callable[..., Mapping[str, PerExample]]
LayerFunction = Callable[..., Mapping[str, Tensor]]
Leading = Callable[[str, Tensor, Mapping[str, Any]], int]
"""(the name of an argument, or "delta", the tensor, all arguments) to how many of its first dimensions hold rows."""


def all_but_last(name: str, tensor: Tensor, arguments: Mapping[str, Any]) -> int:
    """Rows are whatever stands before the last dimension."""
    return tensor.dim() - 1


def only_first(name: str, tensor: Tensor, arguments: Mapping[str, Any]) -> int:
    """Rows run along the first dimension."""
    return 1


@dataclass(frozen=True, kw_only=True)
class Formula:
    """How to measure one operation.

    Attributes:
        function: ``(delta, *arguments)`` to the gradients of single examples, by argument name. Its signature,
            less ``delta``, is the operation's own. Delta and the arguments that hold examples come arranged by example,
            (m, rows of each, …).
        names: of the operation's arguments, in order.
        needs: for each argument that may be a parameter, the arguments its gradients are made of. Only
            these are kept for the backward pass, and only if that parameter is trained.
        leading: which dimensions of delta and of the arguments hold rows.
        covers: whether the formula holds for a call, given its arguments by name; calls it does not cover are replayed.
        prepare: what has to be computed of the arguments as a whole, before examples are told apart.
        cheap: whether all examples cost next to nothing where each has one row.
        lowers_precision: whether autocast runs the operation in half precision.
        sums_cheaply: whether ``squared_norm_of_sum`` of its gradients is worth asking for.
        differentiated: ``(delta, wanted, *arguments)`` to the gradients of the wanted arguments, by name: what autograd
            does, for operations that measure some of them along with single examples'.
    """

    function: OperationFunction
    names: tuple[str, ...]
    needs: Mapping[str, tuple[str, ...]]
    leading: Leading = all_but_last
    covers: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda arguments: arguments
    cheap: bool = False
    lowers_precision: bool = False
    sums_cheaply: bool = False
    differentiated: Callable[..., Mapping[str, Tensor]] | None = None


ELEMENTWISE: set[Callable[..., Any]] = set()
"""Operations without a formula that broadcast a parameter over the examples."""

INVOCATIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Operations that a plain function cannot measure: ``(function, args, kwargs)`` to their ``Invocation``."""

OPERATIONS: dict[Callable[..., Any], Formula] = {}
LAYERS: dict[type[nn.Module], LayerFunction] = {}

OPTIONS = {"leading", "covers", "prepare", "cheap", "lowers_precision", "sums_cheaply", "differentiated"}


def operation(*functions: Callable[..., Any], **options: Any) -> Callable[[OperationFunction], OperationFunction]:
    """Declares the formula of operations: ``@operation(F.linear, weight=("input",), bias=())``.

    Options are those of ``Formula``; every other name is an argument that may be a parameter, with what its
    gradients are made of.
    """
    needs = {name: value for name, value in options.items() if name not in OPTIONS}
    others = {name: value for name, value in options.items() if name in OPTIONS}

    def register(formula: OperationFunction) -> OperationFunction:
        _, *names = inspect.signature(formula).parameters
        entry = Formula(function=formula, names=tuple(names), needs=needs, **others)
        for function in functions:
            OPERATIONS[function] = entry
        return formula

    return register


def register_layer(layer: type[nn.Module]) -> Callable[[LayerFunction], LayerFunction]:
    """Declares how to measure a layer of your own whose work is hidden from PyTorch's functions.

    Ordinary modules need nothing: whatever they do with their parameters is seen. This is for layers built on
    a custom ``autograd.Function`` or kernel. The formula gets the layer, the positional inputs of its forward, and
    the gradient of its output, and returns the gradient of every single example::

        @register_layer(FusedScale)
        def fused_scale(layer, inputs, delta):
            return {"scale": delta * inputs[0]}  # (m, *layer.scale.shape)
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise TypeError(f"register_layer takes a subclass of torch.nn.Module, not {layer!r}")

    def register(formula: LayerFunction) -> LayerFunction:
        LAYERS[layer] = formula
        return formula

    return register
