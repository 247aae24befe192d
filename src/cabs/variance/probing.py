"""A check of owners that needs no loss: change one example, run the model again, and see whose rows move.

A wrong owner is worse than none, so the owners are checked against what the model does. It takes two forward passes
without gradients, once; random numbers, buffers and modes are restored afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cabs.interrupts import gradients_on
from cabs.torch_compiler import plain_python, uncompiled
from cabs.torch_internals import buffers_of, tree_map, unseen
from cabs.variance.inputs import tensors_in
from cabs.variance.memory import Marks
from cabs.variance.owners import SUM, Owners, full

TOLERANCE = 1e-4
"""How far a number may move that nothing should move: kernels may round differently."""


@dataclass
class Seen:
    """What one use of parameters gave: where, whose it is, and two numbers for each place with an owner of its own."""

    where: str
    owners: Owners
    prints: Tensor


class Probe:
    """Takes down what uses of parameters give in a forward pass.

    Args:
        marks: the owners of tensors.
        where: the name of the module that has some parameters.
    """

    def __init__(self, marks: Marks, where: Callable[[list[Tensor]], str]) -> None:
        self._marks, self._where = marks, where
        self.seen: list[Seen] = []
        self._mixed = False

    def record(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Told each call on examples and parameters, with what it gave."""
        if function is F.batch_norm and (kwargs.get("training") or (len(args) > 5 and args[5])):
            self._mixed = True  # behind it everything moves with everything, as the user is told
        owners = self._marks.get(output) if isinstance(output, Tensor) else None
        if owners is None or self._mixed or not output.is_floating_point() or output.numel() == 0:
            return
        alike = [d for d, n in enumerate(owners.table.shape) if n == 1]
        numbers = output.detach().double()
        prints = torch.stack(
            [(part.sum(alike) if alike else part).flatten().cpu() for part in (numbers, numbers.abs())]
        )
        parameters = [t for t in tensors_in((args, kwargs)) if t.requires_grad and self._marks.get(t) is None]
        self.seen.append(Seen(self._where(parameters), owners, prints))


class Probing(Protocol):
    """What shows a probe the uses of parameters."""

    probe: Probe | None


def can_be_checked(marks: Marks) -> bool:
    """Whether there are examples to tell apart."""
    return marks.lot is not None and marks.lot.examples > 1


def check_owners(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    marks: Marks,
    probing: Probing,
    where: Callable[[list[Tensor]], str],
) -> None:
    """Changes one example and sees whose rows move.

    Raises:
        RuntimeError: they are not that example's.
    """
    again, lot = callable_again(module), marks.lot
    assert lot is not None
    number = 0  # the first: where others are ranked behind it, as by experts with a capacity, it moves most of them
    probes = []
    with unseen(), gradients_on(False):
        calls = [(args, kwargs), with_another_example(args, kwargs, marks, number, lot.examples - 1)]
    try:
        for call in calls:
            probes.append(Probe(marks, where))
            probing.probe = probes[-1]
            with plain_python(marks), as_before(again), gradients_on(False):
                again(*call[0], **call[1])
    except Exception as error:
        warnings.warn(
            f"the owners of rows were not checked, since the model cannot be called again with one example changed: "
            f"{type(error).__name__}: {error}; check_owners=False leaves the check out",
            stacklevel=2,
        )
        return
    finally:
        probing.probe = None
    wrong = disagreement(probes[0].seen, probes[1].seen, number)
    if wrong is not None:
        raise RuntimeError(wrong)


def disagreement(before: list[Seen], after: list[Seen], changed: int) -> str | None:
    """The first use in which a change of one example moved what belongs to another, in words."""
    for one, other in zip(before, after, strict=False):
        ids = one.owners.table.flatten()
        if one.where != other.where or not torch.equal(ids, other.owners.table.flatten()):
            continue  # rows went another way, as where they are routed by their data
        moved = ((one.prints - other.prints).abs() > TOLERANCE * (1 + one.prints.abs())).any(0)
        wrong = ids[moved & (ids >= 0) & (ids < SUM) & (ids != changed)]
        if len(wrong):
            return (
                f"{one.where}: a change of example {changed} of the batch moves rows that seem to be example "
                f"{int(wrong[0])}'s. Either the model makes examples depend on one another, or cabs takes the rows of "
                "one for another's: measure with estimator='microbatch', or, if you know better, leave this check out "
                "with check_owners=False"
            )
    return None


def with_another_example(args: Any, kwargs: Any, marks: Marks, number: int, instead: int) -> tuple[Any, Any]:
    """The arguments with the numbers of one example in the place of another's, marked like those they stand for."""

    def changed(value: Any) -> Any:
        owners = marks.get(value) if isinstance(value, Tensor) else None
        if owners is None:
            return value
        ids = full(owners.table, value.shape, owners.varying).to(value.device)
        other = value.detach().clone()
        here, there = (ids == number).expand(value.shape), (ids == instead).expand(value.shape)
        if int(here.sum()) == int(there.sum()):
            other[here] = value.detach()[there]
        marks.set(other, owners)
        return other

    found: tuple[Any, Any] = tree_map(changed, (args, kwargs))
    return found


@contextmanager
def as_before(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Restores random numbers, buffers and other attributes of modules afterwards; tells if random numbers were drawn.

    Buffers are copied and the copies used: a graph that waits for its backward pass may need them as they are.
    """
    kept = [(module, dict(buffers_of(module))) for module in model.modules()]
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    drawn = False
    copies: dict[int, Tensor] = {}
    try:
        for module, buffers in kept:
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers_of(module)[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        with torch.random.fork_rng([d for d in devices if d.type == kind], device_type=kind):
            before = _random_state(devices)
            yield lambda: drawn
            drawn = any(not torch.equal(a, b) for a, b in zip(before, _random_state(devices), strict=True))
    finally:
        for module, values in attributes:
            vars(module).update(values)
        for module, buffers in kept:
            buffers_of(module).update(buffers)


def _random_state(devices: Iterable[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in devices)]


def callable_again(module: nn.Module) -> nn.Module:
    """What to call for a further forward pass on this process alone."""
    while (inner := module.module if isinstance(module, DistributedDataParallel) else uncompiled(module)) is not module:
        module = inner
    return module
