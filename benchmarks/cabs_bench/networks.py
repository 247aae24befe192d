"""The networks that are timed: the paper's four, a ResNet-18 with GroupNorm, and a small GPT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """A network with a batch for it.

    Attributes:
        build: the network.
        inputs: m examples.
        targets: their targets.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    targets: Callable[[int], Tensor]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over examples and positions."""
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Block(nn.Module):
    """ResNet's basic block, with GroupNorm for BatchNorm."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(32, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.GroupNorm(32, width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32×32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    inputs = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inputs, width, stride), Block(width, width, 1)]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tokens in, the logits of the next ones out."""

    def __init__(
        self, *, layers: int = 4, width: int = 256, heads: int = 4, length: int = 128, vocabulary: int = 1024
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return cast(Tensor, self.head(self.norm(self.layers(hidden))))


def _of_problem(name: str) -> Network:
    from cabs.experiments.problems import problem

    chosen = problem(name)
    return Network(
        # The layout that most people train in, and the only one that Opacus gets right.
        lambda: chosen.network().to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
        lambda m: torch.randn(m, *chosen.net.input_shape),
        lambda m: torch.randint(0, chosen.net.classes, (m,)),
    )


def networks() -> dict[str, Network]:
    return {
        **{name: _of_problem(name) for name in ("mnist", "svhn", "cifar10", "cifar100")},
        "resnet18": Network(resnet18, lambda m: torch.randn(m, 3, 32, 32), lambda m: torch.randint(0, 10, (m,))),
        "gpt": Network(GPT, lambda m: torch.randint(0, 1024, (m, 128)), lambda m: torch.randint(0, 1024, (m, 128))),
    }
