"""The parameters of a model: their names, their groups, and who stands in for them.

``fully_shard`` keeps a part of each parameter in every process. For a layer's forward and backward pass it puts the
whole of it, another tensor, in the parameter's place; that one is used, and its gradients are seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn


class Parameters:
    """Names and groups of parameters, which are known by their ids.

    Args:
        model: the module that has them.
        groups: those that are measured, in groups.

    Attributes:
        groups: the number of a parameter's group, by id.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Iterable[Tensor]]) -> None:
        self._model = model
        self._keep = [p for group in groups for p in group]  # ids stay valid only while their tensors live
        self.groups = {id(p): number for number, group in enumerate(groups) for p in group}
        named = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(p): name for name, p in reversed(named.items())}
        self._named = named
        self._shards = {name: p for name, p in named.items() if hasattr(p, "device_mesh") and p.requires_grad}
        self._group_of_name = {name: self.groups[id(p)] for name, p in named.items() if id(p) in self.groups}
        self._seen: set[str] = set()

    @property
    def measured(self) -> list[Tensor]:
        """The parameters that are measured, group by group."""
        return self._keep

    @property
    def sharded(self) -> bool:
        """Whether processes have a part of each parameter, and have to call the model together."""
        return bool(self._shards)

    def name(self, key: int) -> str:
        """A parameter's name, for messages."""
        return self._names.get(key, "a parameter")

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the model's parameters."""
        return id(tensor) in self._names

    def original(self, key: int) -> Tensor | None:
        """The parameter itself, also for what stands in for it."""
        return self._named.get(self._names.get(key, ""))

    def is_news(self, parameter: Tensor) -> bool:
        """Whether this is seen for the first time, and stands in for a parameter that is sharded."""
        if not self._shards or id(parameter) in self._names:
            return False
        names = [name for name, p in self._model.named_parameters(remove_duplicate=False) if p is parameter]
        self._keep.append(parameter)
        self._names[id(parameter)] = names[0] if names else "a parameter"
        self._seen.update(names)
        if names and names[0] in self._group_of_name:
            self.groups[id(parameter)] = self._group_of_name[names[0]]
        return bool(names)

    def unseen_shards(self) -> set[str]:
        """Names of sharded parameters that have a gradient though nothing was seen to stand in for them."""
        return {name for name, p in self._shards.items() if p.grad is not None and name not in self._seen}
