"""A small transformer that predicts the next character."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """Attention, then two dense layers at each position, each on top of a norm and added to what it was given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        attention, output = Attention(width, heads), nn.Linear(4 * width, width)
        self.attention = nn.Sequential(nn.LayerNorm(width), attention)
        self.dense = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), output)
        self.added = (attention.output, output)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        output: Tensor = x + self.dense(x)
        return output


class Transformer(nn.Module):
    """Numbers of characters in, (batch, position); scores of the next ones out, (batch, position, character)."""

    def __init__(self, net: GPT) -> None:
        super().__init__()
        self.characters = nn.Embedding(net.classes, net.width)
        self.positions = nn.Embedding(net.context, net.width)
        self.blocks = nn.Sequential(*(Block(net.width, net.heads) for _ in range(net.layers)))
        self.norm = nn.LayerNorm(net.width)
        self.head = nn.Linear(net.width, net.classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        scores: Tensor = self.head(self.norm(self.blocks(self.characters(x) + self.positions(places))))
        return scores


@dataclass(frozen=True, kw_only=True)
class GPT:
    """The shape of a transformer, which `build` makes.

    Attributes:
        layers: How many blocks it has.
        width: The length of the vector at each position.
        heads: How many heads its attention has.
        context: How many characters it sees.
        classes: How many different characters there are.
    """

    layers: int
    width: int
    heads: int
    context: int
    classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return (self.context,)

    def build(self, seed: int = 0) -> nn.Module:
        """The network with its initial weights, which depend on the seed alone.

        As in GPT-2: normal with deviation 0.02, less for the layers whose outputs are added up; biases 0.
        """
        network = Transformer(self)
        generator = torch.Generator().manual_seed(seed)
        added = {id(layer) for block in network.modules() if isinstance(block, Block) for layer in block.added}
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02 / math.sqrt(2 * self.layers) if id(module) in added else 0.02
                nn.init.normal_(module.weight, std=std, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        return network
