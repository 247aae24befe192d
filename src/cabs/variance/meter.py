"""Follows forward and backward passes of one model and gathers what its uses of parameters report."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cabs.variance.backward import BackwardPass
from cabs.variance.interception import Hook, Installation, Interceptor, is_parameter, mark, tensors_in
from cabs.variance.invocations import Expanded, Invocation, Layer, invocation
from cabs.variance.layout import Layout
from cabs.variance.parameters import Parameters
from cabs.variance.uses import Use

IN_PLACE = {Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__}
EXPANSIONS = ("ExpandBackward0", "RepeatBackward0")
NO_TASK = -1


def current_backward() -> int:
    """A number that is the same throughout one call of backward, and -1 outside of any."""
    return torch._C._current_graph_task_id()


class Meter:
    """Hooks in a model, from ``__init__`` to ``remove``.

    Args:
        model: the module to follow.
        begin: makes the record of a new backward pass, given its number of examples.
        measured: which of m examples to measure, given whether all of them cost next to nothing.
        parameters: the model's, with their names.
        batch_dim: which dimension of the model's inputs runs over the examples.
        count: the number of examples in the model's inputs, if their shape does not tell.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[int], BackwardPass],
        measured: Callable[[int, bool], slice],
        parameters: Parameters,
        batch_dim: int,
        count: Callable[..., int] | None,
    ) -> None:
        self._measured = measured
        self._begin_pass = begin
        self._count = count
        self._parameters = parameters
        self._examples = 0
        self._costly = False
        self._warned: set[str] = set()
        self._uses: Counter[int] = Counter()
        self._uses_settled = False
        self._pass: tuple[int, BackwardPass] | None = None
        self._received: list[tuple[int, int]] = []
        self._missed: set[int] = set()
        self._interceptor = Interceptor(self._measure, batch_dim)
        self._installation = Installation(
            model, self._interceptor, self._begin_forward, self._measure_layer, self.remove
        )
        self._leaf_hooks: list[Any] = []
        for parameter in model.parameters():
            self._watch(parameter)

    def pause(self, paused: bool) -> None:
        """Lets forward passes go by unmeasured, until told otherwise."""
        self._installation.active = not paused

    @property
    def cheap(self) -> bool:
        """Whether all that was ever measured costs next to nothing."""
        return not self._costly

    def remove(self) -> None:
        self._installation.remove()
        for handle in self._leaf_hooks:
            handle.remove()

    # -- forward

    def _begin_forward(self, inputs: list[Tensor]) -> None:
        dim = self._interceptor.batch_dim
        self._examples = (
            next((x.shape[dim] for x in inputs if x.dim() > dim), 0) if self._count is None else self._count(*inputs)
        )
        if self._uses_settled and current_backward() == NO_TASK:
            self._uses.clear()
            self._uses_settled = False

    def _measure(
        self,
        interceptor: Interceptor,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plain: bool,
    ) -> Any:
        if self._examples == 0:
            raise ValueError(
                "the model was called with no examples, or with inputs that do not tell how many: pass "
                "count_examples to GradientVariance"
            )
        layout = Layout(self._examples, interceptor.batch_dim)
        if not plain:
            args, kwargs = self._tap_expanded(args, kwargs, layout)
            if not any(map(is_parameter, tensors_in((args, kwargs)))):
                return function(*args, **kwargs)
        call = invocation(function, args, kwargs, layout)
        if function in IN_PLACE:
            call.in_place = True
        elif _writes(function):
            raise NotImplementedError(
                f"{function.__name__} writes a parameter's effect into a tensor in "
                "place, which cannot be measured: use the form that returns a new tensor"
            )
        return self._use(call, layout)

    def _measure_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        return self._use(Layer(layer, args, output), Layout(self._examples, self._interceptor.batch_dim))

    def _use(self, call: Invocation, layout: Layout) -> Any:
        use = Use(self, call, layout, current_backward())
        if call.mixes_examples and (where := self.where(use)) not in self._warned:
            self._warned.add(where)
            warnings.warn(
                f"{where} mixes the examples of a batch (BatchNorm in training mode), so that the "
                "gradient of a single example is not defined: measuring each example's contribution to the batch "
                "gradient instead. GroupNorm or LayerNorm avoid this; estimator='microbatch' does without.",
                stacklevel=2,
            )
        for parameter in use.parameters:
            if self._parameters.is_news(parameter):
                self._watch(parameter)
            # Recomputed activations (checkpointing) repeat uses that were counted the first time.
            if use.task == NO_TASK or not self._uses[id(parameter)]:
                self._uses[id(parameter)] += 1
        return use.forward()

    def _tap_expanded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Parameters that were expanded to a row for each example count as examples from here on."""
        most = max(tensor.dim() for tensor in tensors_in((args, kwargs)))

        def tapped(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
                return type(value)(map(tapped, value))
            if not is_parameter(value) or value.dim() < most or not layout.holds(value) or value.grad_fn is None:
                return value
            if value.grad_fn.name() not in EXPANSIONS:
                return value
            rows = self._use(Expanded(value), layout)
            mark(rows)
            return rows

        return tapped(args), {name: tapped(value) for name, value in kwargs.items()}

    def where(self, use: Use) -> str:
        """The name of the module that has the parameters of a use."""
        names = [self._parameters.name(id(parameter)) for parameter in use.parameters]
        return names[0].rpartition(".")[0] or names[0]

    # -- backward

    def measured(self, examples: int, cheap: bool) -> slice:
        self._costly |= not cheap
        return self._measured(examples, cheap)

    def expected_uses(self, parameter: Tensor) -> int:
        return self._uses[id(parameter)]

    def backward_pass(self, use: Use) -> BackwardPass:
        """The record of the backward pass that runs now."""
        self._uses_settled = True
        task = current_backward() if use.task == NO_TASK else use.task
        if self._pass is None or self._pass[0] != task:
            self._note_missed()
            self._received = [(number, key) for number, key in self._received if number == task]
            self._pass = (task, self._begin_pass(use.layout.examples))
        current = self._pass[1]
        if current.examples != use.layout.examples:
            raise RuntimeError(
                f"{self.where(use)} saw {use.layout.examples} examples in a backward pass of {current.examples}: all "
                "parts of a model must get the same examples, in the first dimension"
            )
        return current

    def _watch(self, parameter: Tensor) -> None:
        if parameter.requires_grad:
            self._leaf_hooks.append(parameter.register_hook(Hook(self._receive(id(parameter)), self.remove)))

    def _receive(self, key: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if not self._installation.active:
                return
            self._received.append((current_backward(), key))
            if self._pass is not None and key in self._pass[1].addresses:
                self._pass[1].penalized |= gradient.data_ptr() != self._pass[1].addresses.pop(key)

        return hook

    def check(self) -> None:
        """Refuses to report a variance that misses a parameter."""
        self._note_missed()
        missed = {self._parameters.name(key) for key in self._missed} | self._parameters.unseen_shards()
        if missed:
            names = ", ".join(sorted(missed))
            raise RuntimeError(
                f"gradients reached {names} by a way that cannot be seen (a custom autograd.Function or scripted "
                "code): register a rule for the layer with cabs.variance.register_layer, or use "
                "estimator='microbatch'"
            )

    def forget(self) -> None:
        """Begins a new batch."""
        self._missed.clear()
        self._received.clear()
        self._pass = None

    def _note_missed(self) -> None:
        if self._pass is not None:
            task, current = self._pass
            self._missed |= {key for number, key in self._received if number == task} - current.claimed


def _writes(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
