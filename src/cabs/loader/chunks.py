"""Chunks of examples: cut, joined, and carried from a loading process to the consumer.

What `default_collate` makes of n examples is a nesting of mappings and sequences whose leaves hold one row
per example: tensors, or lists of strings. Cutting and joining such nestings leaf by leaf turns chunks of any
size into batches of any other size.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from cabs.torch_loading import default_collate_is_as_it_came

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive examples of one epoch.

    Attributes:
        epoch: The epoch they belong to.
        start: How many examples of that epoch come before them.
        count: How many they are.
        data: Their indices or the examples themselves (a list or a tensor), or what `default_collate` made of
            them.
        collated: Whether `data` went through `default_collate`.
    """

    epoch: int
    start: int
    count: int
    data: Any
    collated: bool = False

    def split(self, count: int) -> tuple[Part, Part]:
        """The first `count` examples and the others."""
        if self.collated:
            head, tail = cut(self.data, 0, count), cut(self.data, count, self.count)
        else:
            head, tail = self.data[:count], self.data[count:]
        rest = replace(self, start=self.start + count, count=self.count - count, data=tail)
        return replace(self, count=count, data=head), rest


def _is_text(data: Any) -> bool:
    # default_collate leaves strings as they are: a list or tuple of them is a leaf, not a nesting.
    return isinstance(data, list | tuple) and bool(data) and isinstance(data[0], str | bytes)


def _rebuild(like: Any, children: Any) -> Any:
    """A container like `like` around new children, or a plain one where its type cannot be made anew."""
    try:
        if isinstance(like, MutableMapping | MutableSequence):
            # A copy keeps whatever else a subclass carries.
            clone: Any = copy.copy(like)
            for key, child in children.items() if isinstance(like, Mapping) else enumerate(children):
                clone[key] = child
            return clone
        if hasattr(like, "_fields"):
            return type(like)(*children)
        return type(like)(children)
    except TypeError:
        return children


def combine(leaf: Callable[[list[Any]], Any], trees: list[Any]) -> Any:
    """Applies `leaf` to the leaves that stand at the same place of several nestings of one shape."""
    first = trees[0]
    if isinstance(first, Tensor) or _is_text(first):
        return leaf(trees)
    if isinstance(first, Mapping):
        return _rebuild(first, {key: combine(leaf, [tree[key] for tree in trees]) for key in first})
    if isinstance(first, Sequence):
        if any(len(tree) != len(first) for tree in trees):
            raise RuntimeError(
                f"examples of one batch have {sorted({len(tree) for tree in trees})} elements: "
                "give every example the same number, or pass a collate_fn"
            )
        return _rebuild(first, [combine(leaf, list(column)) for column in zip(*trees, strict=True)])
    raise TypeError(f"cannot cut a batch that holds {type(first).__name__}: pass a collate_fn")


def cut(tree: Any, start: int, stop: int) -> Any:
    """Examples `start` to `stop` of a collated batch; tensors are views."""
    return combine(lambda leaves: leaves[0][start:stop], [tree])


def join(trees: list[Any]) -> Any:
    """One collated batch of several."""
    return trees[0] if len(trees) == 1 else combine(_concatenate, trees)


def own(tree: Any) -> Any:
    """A copy of a collated batch outside shared memory."""
    return combine(lambda leaves: leaves[0].clone() if isinstance(leaves[0], Tensor) else leaves[0], [tree])


def _concatenate(leaves: list[Any]) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.cat(leaves)
    return type(leaves[0])(chain.from_iterable(leaves))


def collates_by_parts(collate_fn: Collate) -> bool:
    """Whether collated chunks can be cut and joined to what `collate_fn` makes of the whole.

    That holds for `default_collate`, unless somebody taught it other types (or padding) through its public
    map.
    """
    return collate_fn is default_collate and default_collate_is_as_it_came()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a worker sends: collated examples, or pickled ones with their tensors set apart.

    Attributes:
        count: How many examples.
        data: What `default_collate` made of them; or all their tensors, flat, by dtype.
        pickled: In the second case the examples without their tensors, and the dtypes and shapes of those.
    """

    count: int
    data: Any
    pickled: tuple[bytes, list[tuple[torch.dtype, torch.Size]]] | None = None

    def part(self, epoch: int, start: int) -> Part:
        """The examples as the consumer counts them."""
        if self.pickled is None:
            return Part(epoch, start, self.count, self.data, collated=True)
        return Part(epoch, start, self.count, _unpack(*self.pickled, self.data))


def collated_chunk(samples: list[Any]) -> Chunk:
    """A worker's collate function where batches are made by `default_collate`."""
    try:
        return Chunk(len(samples), default_collate(samples))
    except Exception:
        # Not necessarily a mistake: a batch cut from this chunk may be one example. The consumer collates,
        # and raises.
        return sample_chunk(samples)


def sample_chunk(samples: list[Any]) -> Chunk:
    """A worker's collate function where the consumer collates."""
    stream = io.BytesIO()
    pickler = _SamplePickler(stream)
    pickler.dump(list(samples))
    flat: dict[torch.dtype, list[Tensor]] = {}
    for tensor in pickler.tensors:
        flat.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    data = {dtype: torch.cat(tensors) for dtype, tensors in flat.items()}
    shapes = [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]
    return Chunk(len(samples), data, (stream.getvalue(), shapes))


class _SamplePickler(pickle.Pickler):
    """Sets tensors aside, so that a chunk takes one block of shared memory per dtype, not one per tensor.

    Each block of shared memory is an open file, and thousands of examples would exhaust them.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        plain = type(obj) is Tensor and obj.layout is torch.strided and obj.device.type == "cpu"
        if not plain or obj.requires_grad or obj.is_quantized or obj.is_nested:
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._seen[id(obj)]


class _SampleUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _unpack(pickled: bytes, shapes: list[tuple[torch.dtype, torch.Size]], flat: dict[torch.dtype, Tensor]) -> list[Any]:
    offsets = dict.fromkeys(flat, 0)
    tensors = []
    for dtype, shape in shapes:
        offset, size = offsets[dtype], shape.numel()
        tensors.append(flat[dtype][offset : offset + size].view(shape))
        offsets[dtype] += size
    samples: list[Any] = _SampleUnpickler(io.BytesIO(pickled), tensors).load()
    return samples
