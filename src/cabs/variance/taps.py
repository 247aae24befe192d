"""Where gradients are seen on their way back, and what is computed besides training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from cabs.torch_internals import unseen


class Tap(torch.autograd.Function):
    """The identity; shows the gradients that come back, with tensors that autograd kept for it.

    A hook on the tensor costs less and does as well wherever keeping a tensor is just that.
    """

    @staticmethod
    def forward(ctx: Any, show: Callable[..., None], outputs: int, *tensors: Tensor) -> Any:
        ctx.show = show
        ctx.save_for_backward(*tensors[outputs:])
        aliases = tuple(tensor.detach() for tensor in tensors[:outputs])
        return aliases[0] if outputs == 1 else aliases

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        ctx.show(deltas, kept)
        return None, None, *deltas, *(None for _ in kept)


class DifferentiatesItself(Protocol):
    """A call that computes its own gradients."""

    def call(self) -> tuple[Any, list[Tensor]]:
        """Makes the call without a graph; also what is to be saved for ``differentiate``."""

    def differentiate(self, delta: Tensor, saved: Sequence[Tensor], wanted: Sequence[Any]) -> Mapping[Any, Tensor]:
        """The gradients of the wanted arguments."""


class Differentiated(torch.autograd.Function):
    """A call whose gradients the use computes itself."""

    @staticmethod
    def forward(ctx: Any, use: DifferentiatesItself, names: list[Any], *tensors: Tensor) -> Any:
        ctx.use, ctx.names = use, names
        output, saved = use.call()
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Any, ...]:
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if needed]
        gradients = ctx.use.differentiate(delta, ctx.saved_tensors, wanted)
        return None, None, *(gradients.get(name) for name in ctx.names)


def before_node(tensor: Tensor, show: Callable[[Tensor], None]) -> None:
    """Shows the gradient that the operation behind a tensor gets: after hooks on the tensor, which may change it."""
    number = tensor.output_nr

    def hook(deltas: Sequence[Tensor | None]) -> None:
        delta = deltas[number]
        if delta is not None:
            show(delta)

    assert tensor.grad_fn is not None
    tensor.grad_fn.register_prehook(hook)


def tensors_of(output: Any) -> list[Tensor]:
    return [out for out in (output if isinstance(output, (tuple, list)) else (output,)) if isinstance(out, Tensor)]


def apart(tensor: Tensor) -> AbstractContextManager[None]:
    """For what is computed besides training: in full precision, and seen by no mode."""
    with unseen():  # to look at a tensor is a call that modes see
        device = tensor.device.type
    return _in_full_precision(device) if torch.is_autocast_enabled(device) else unseen()


@contextmanager
def _in_full_precision(device: str) -> Iterator[None]:
    with unseen(), torch.autocast(device, enabled=False):
        yield


class OwnDerivatives:
    """Whether this package itself takes derivatives now: hooks on parameters are called for these too."""

    depth = 0

    def __enter__(self) -> None:
        OwnDerivatives.depth += 1

    def __exit__(self, *exception: object) -> None:
        OwnDerivatives.depth -= 1
