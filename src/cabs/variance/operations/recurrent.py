"""LSTM, GRU and simple recurrent layers.

The fused kernels hide what happens in time, so a layer is run again, step by step and for the measured
examples only, to get the gradients at its two matrix multiplications: D_ih of W_ih x and D_hh of W_hh h. The
rest is the gradient of a matrix multiplication, with time steps for positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cabs.interrupts import gradients_on
from cabs.variance.adoption import OwnersOf
from cabs.variance.factors import Outer, PerExample, Positions
from cabs.variance.hollow import leads_to_parameters
from cabs.variance.interception import COMPOSITES, Interceptor
from cabs.variance.invocations import Invocation
from cabs.variance.owners import Owners, collapse, join
from cabs.variance.registry import INVOCATIONS
from cabs.variance.rows import Rows

Gates = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""(W_ih x, W_hh h, state) to the next state, whose first part is h before any projection."""


def _lstm(zi: Tensor, zh: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (zi + zh).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(zi: Tensor, zh: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (ri, ui, ni), (rh, uh, nh) = zi.chunk(3, -1), zh.chunk(3, -1)
    u = (ui + uh).sigmoid()
    n = (ni + (ri + rh).sigmoid() * nh).tanh()
    return ((1 - u) * n + u * state[0],)


CELLS: Mapping[Callable[..., Any], Gates] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: lambda zi, zh, _: ((zi + zh).tanh(),),
    torch.rnn_relu: lambda zi, zh, _: ((zi + zh).relu(),),
}


def layer_by_layer(
    interceptor: Interceptor, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A stack of layers and directions as calls of one layer in one direction, each of them seen on its own.

    Args:
        interceptor: which sees the rest.
        function: one of ``CELLS``.
        args: of the stack.
        kwargs: none; the layers' modules pass none.
    """
    if len(args) != 9 or not isinstance(args[3], bool):
        raise NotImplementedError(
            "packed sequences cannot be measured: give the recurrent layer padded tensors, "
            "or use estimator='microbatch'"
        )
    x, hx, weights, biases, layers, dropout, train, both_ways, batch_first = args
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    per = len(weights) // (layers * (2 if both_ways else 1))
    time = 1 if batch_first else 0
    finals: list[Sequence[Tensor]] = []
    for layer in range(layers):
        outputs = []
        for way in range(2 if both_ways else 1):
            k = layer * (2 if both_ways else 1) + way
            mine = tuple(state[k : k + 1] for state in states)
            turned = x.flip(time) if way else x
            start = mine if function is torch.lstm else mine[0]
            output, *final = interceptor.measure(
                function, turned, start, weights[k * per : (k + 1) * per], biases, 1, 0.0, train, False, batch_first
            )
            outputs.append(output.flip(time) if way else output)
            finals.append(final)
        x = torch.cat(outputs, -1) if both_ways else outputs[0]
        if dropout and train and layer + 1 < layers:
            x = torch.dropout(x, dropout, True)
    return (x, *(torch.cat(parts) for parts in zip(*finals, strict=True)))


class RecurrentLayer(Invocation):
    """One layer in one direction."""

    needs_tap = True
    knows_owners = True

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owners: OwnersOf
    ) -> None:
        x, hx, weights, self._biases, *self._options = args
        self._function = function
        self._batch_first = self._options[-1]
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        self.values = {"x": x}
        self.values.update({f"state{k}": state for k, state in enumerate(states)})
        self.values.update({f"weight{k}": weight for k, weight in enumerate(weights)})
        self.parameters = [
            name
            for name, value in self.values.items()
            if isinstance(value, Tensor) and leads_to_parameters(value) and owners(value) is None
        ]
        # The layer is run again, so all of its weights are needed, trained or not.
        self.kept = [name for name in self.values if name not in self.parameters]
        if learned := [name for name in self.parameters if not name.startswith("weight")]:
            raise NotImplementedError(
                f"a recurrent layer's {', '.join(learned)} is made of parameters alone: expand learned initial states "
                "to one row an example with .expand() right before the call"
            )

        self._ids = self._batch(owners)

    def _batch(self, owners: OwnersOf) -> Tensor:
        """Whose each sequence of the batch is."""
        found = []
        for name, value in self.values.items():
            owner = owners(value)
            if owner is not None:
                dim = 0 if name == "x" and self._batch_first else 1
                found.append(collapse(owner.table, [d for d in range(3) if d != dim]).flatten())
        return join(found, 1)

    def mark(self, outputs: Sequence[Tensor]) -> list[Owners]:
        dims = [0 if self._batch_first else 1, *(1 for _ in outputs[1:])]
        return [Owners(self._ids.reshape([-1 if d == dim else 1 for d in range(3)])) for dim in dims]

    def _part(self, kind: str, values: Mapping[Any, Any]) -> list[Tensor]:
        return [value for name, value in values.items() if name.startswith(kind)]

    def call(self) -> Any:
        states = self._part("state", self.values)
        hx = tuple(states) if self._function is torch.lstm else states[0]
        return self._function(self.values["x"], hx, self._part("weight", self.values), self._biases, *self._options)

    def gradients(
        self, values: Mapping[Any, Any], delta: tuple[Tensor, ...], rows: Rows, chosen: slice
    ) -> Mapping[Any, PerExample]:
        batch = 0 if self._batch_first else 1
        by_sequence = Rows(Owners(self._ids), rows.lot)

        def of_chosen(tensor: Tensor, dim: int) -> Tensor:
            """Sequences, or states, of the chosen examples: (examples · sequences of each, …)."""
            return by_sequence.arrange(tensor.movedim(dim, 0), 1, chosen, zero=True).flatten(0, 1)

        x = of_chosen(values["x"], batch)
        state = tuple(of_chosen(part, 1)[:, 0] for part in self._part("state", values))
        weights = [weight.detach() for weight in self._part("weight", values)]
        output_delta, *final_deltas = delta
        output_delta = of_chosen(output_delta, batch)
        goals, taps, previous, unprojected = self._run(x, state, weights)
        deltas = [output_delta[:, t] for t in range(x.shape[1])] + [of_chosen(final, 1)[:, 0] for final in final_deltas]
        flat = [tap for step in taps for tap in step]
        found = torch.autograd.grad(goals, flat, deltas, allow_unused=True, materialize_grads=True)
        count = len(rows.chosen(chosen))
        by_kind = [_positions(torch.stack(found[k :: len(taps[0])], 1), count) for k in range(len(taps[0]))]
        inputs = [None if part is None else _positions(part, count) for part in (x, previous, unprojected)]
        return self._named(by_kind, inputs, weights)

    def _run(
        self, x: Tensor, state: tuple[Tensor, ...], weights: list[Tensor]
    ) -> tuple[list[Tensor], list[list[Tensor]], Tensor, Tensor | None]:
        """Runs the layer in time; the taps are the results of its matrix multiplications, leaves of the graph."""
        w_ih, w_hh = weights[:2]
        b_ih, b_hh = weights[2:4] if self._biases else (None, None)
        projection = weights[-1] if len(weights) in (3, 5) else None
        cell = CELLS[self._function]
        outputs, taps, previous, unprojected = [], [], [], []
        with gradients_on(True):
            for t in range(x.shape[1]):
                previous.append(state[0].detach())
                zi = torch.nn.functional.linear(x[:, t], w_ih, b_ih).detach().requires_grad_()
                zh = _through(torch.nn.functional.linear(state[0], w_hh, b_hh))
                state = cell(zi, zh, state)
                taps.append([zi, zh])
                if projection is not None:
                    unprojected.append(state[0].detach())
                    zr = _through(torch.nn.functional.linear(state[0], projection))
                    state = (zr, *state[1:])
                    taps[-1].append(zr)
                outputs.append(state[0])
        return (
            [*outputs, *state],
            taps,
            torch.stack(previous, 1),
            torch.stack(unprojected, 1) if unprojected else None,
        )

    def _named(
        self, deltas: list[Tensor], inputs: list[Tensor | None], weights: list[Tensor]
    ) -> Mapping[Any, PerExample]:
        matrices = [0, 1] + ([len(weights) - 1] if len(deltas) == 3 else [])
        found: dict[Any, PerExample] = {}
        for place, delta, input in zip(matrices, deltas, inputs, strict=False):
            assert input is not None
            found[f"weight{place}"] = Outer(delta.unsqueeze(1), input.unsqueeze(1), weights[place].shape)
        if self._biases:
            found["weight2"], found["weight3"] = Positions(deltas[0], (1,)), Positions(deltas[1], (1,))
        return found


def _positions(tensor: Tensor, examples: int) -> Tensor:
    """(examples · sequences, time, features) as (examples, positions, features)."""
    return tensor.reshape(examples, -1, tensor.shape[-1])


def _through(z: Tensor) -> Tensor:
    """A tensor of the graph whose gradient can be asked for, also where nothing before it needs one."""
    return z if z.requires_grad else z.requires_grad_()


def one_cell(
    interceptor: Interceptor, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """One step of an LSTM, which has two outputs, as the calls that it is made of, each of them seen on its own."""

    def step(
        x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> tuple[Tensor, ...]:
        linear = torch.nn.functional.linear
        return _lstm(linear(x, w_ih, b_ih), linear(hx[0], w_hh, b_hh), tuple(hx))

    return step(*args, **kwargs)


COMPOSITES[torch.lstm_cell] = one_cell
for _function in CELLS:
    COMPOSITES[_function] = layer_by_layer
    INVOCATIONS[_function] = RecurrentLayer
