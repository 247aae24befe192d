"""Which rule measures which operation, and how users add their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cabs.variance.factors import PerExample
from cabs.variance.layout import Layout

OperationFunction = Callable[..., Mapping[str, PerExample]]
LayerFunction = Callable[..., Mapping[str, Tensor]]
Covers = Callable[[Mapping[str, Any], "Layout"], bool]


@dataclass(frozen=True)
class OperationRule:
    """How to measure one operation.

    Attributes:
        function: ``(delta, *arguments)`` to the gradients of single examples, by argument name. Its signature,
            less ``delta``, is the operation's own.
        needs: for each argument that may be a parameter, the arguments its gradients are made of. Only
            these are kept for the backward pass, and only if that parameter is trained.
        covers: whether the rule holds for a call, given its arguments by name and where its examples are;
            calls it does not cover are replayed.
        mixes_examples: whether a call, given its arguments, makes an example's output depend on others.
        features: how many dimensions of its input and output, from the last, cannot be the examples'.
        cheap: whether all examples cost next to nothing, given the gradient of the output.
        lowers_precision: whether autocast runs the operation in half precision.
        sums_cheaply: whether ``squared_norm_of_sum`` of its gradients is worth asking for.
        differentiated: ``(delta, wanted, *arguments)`` to the gradients of the wanted arguments, by name: what autograd
            does, for operations that measure some of them along with single examples'.
        names: of the operation's arguments, in order.
    """

    function: OperationFunction
    needs: Mapping[str, tuple[str, ...]]
    covers: Covers
    mixes_examples: Callable[[Mapping[str, Any]], bool]
    features: int
    cheap: Callable[[Tensor], bool]
    lowers_precision: bool
    sums_cheaply: bool
    differentiated: Callable[..., Mapping[str, Tensor]] | None
    names: tuple[str, ...]


ELEMENTWISE: set[Callable[..., Any]] = set()
"""Operations without a rule that broadcast a parameter over the examples."""

INVOCATIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Operations that a plain function cannot measure: ``(function, args, kwargs)`` to their ``Invocation``."""

OPERATIONS: dict[Callable[..., Any], OperationRule] = {}
LAYERS: dict[type[nn.Module], LayerFunction] = {}


def examples_kept_apart(arguments: Mapping[str, Any], layout: Layout) -> bool:
    """Covers calls whose first examples-carrying argument has the examples in a dimension of their own."""
    return layout.holds(next(value for value in arguments.values() if isinstance(value, Tensor)))


def operation(
    *functions: Callable[..., Any],
    covers: Covers = examples_kept_apart,
    mixes_examples: Callable[[Mapping[str, Any]], bool] = lambda arguments: False,
    features: int = 0,
    cheap: Callable[[Tensor], bool] = lambda delta: False,
    lowers_precision: bool = False,
    sums_cheaply: bool = False,
    differentiated: Callable[..., Mapping[str, Tensor]] | None = None,
    **needs: tuple[str, ...],
) -> Callable[[OperationFunction], OperationFunction]:
    """Declares the rule of operations: ``@operation(F.linear, weight=("input",), bias=())``."""

    def register(rule: OperationFunction) -> OperationFunction:
        _, *names = inspect.signature(rule).parameters
        entry = OperationRule(
            rule,
            needs,
            covers,
            mixes_examples,
            features,
            cheap,
            lowers_precision,
            sums_cheaply,
            differentiated,
            tuple(names),
        )
        for function in functions:
            OPERATIONS[function] = entry
        return rule

    return register


def register_layer(layer: type[nn.Module]) -> Callable[[LayerFunction], LayerFunction]:
    """Declares how to measure a layer of your own whose work is hidden from PyTorch's functions.

    Ordinary modules need nothing: whatever they do with their parameters is seen. This is for layers built on
    a custom ``autograd.Function`` or kernel. The rule gets the layer, the positional inputs of its forward, and
    the gradient of its output, and returns the gradient of every single example::

        @register_layer(FusedScale)
        def fused_scale(layer, inputs, delta):
            return {"scale": delta * inputs[0]}  # (m, *layer.scale.shape)
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise TypeError(f"register_layer takes a subclass of torch.nn.Module, not {layer!r}")

    def register(rule: LayerFunction) -> LayerFunction:
        LAYERS[layer] = rule
        return rule

    return register
