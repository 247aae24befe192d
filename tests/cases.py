"""Models that every estimator is tried on, each with inputs for m examples; one list, shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model and how to make its inputs; ``dim`` is where inputs and outputs have the examples."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    dim: int = 0

    def __str__(self) -> str:
        return self.name

    def make(self, examples: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
        model = self.model().to(dtype)
        inputs = self.inputs(examples)
        return model, inputs.to(dtype) if inputs.is_floating_point() else inputs


def losses(output: Tensor | tuple[Tensor, ...], dim: int = 0) -> Tensor:
    """A loss for each example that depends on all of its outputs, unevenly."""
    if isinstance(output, tuple):
        return losses(output[0], dim)
    flat = output.movedim(dim, 0).flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    return (weights * flat + flat.square()).sum(1) / flat.shape[1] ** 0.5 + 3


def reals(*shape: int) -> Callable[[int], Tensor]:
    return lambda m: torch.randn(m, *shape)


def tokens(length: int, vocabulary: int = 7) -> Callable[[int], Tensor]:
    return lambda m: torch.randint(0, vocabulary, (m, length))


class TiedLanguageModel(nn.Module):
    """A token table that is also the output layer, by module or by functional call; learned positions."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.positions = nn.Embedding(9, 6)
        self.mix = nn.Linear(6, 6)
        self.head = None if functional else nn.Linear(6, 7, bias=False)
        if self.head is not None:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x) + self.positions(torch.arange(x.shape[1]))
        hidden = F.gelu(self.mix(hidden))
        return F.linear(hidden, self.table.weight) if self.head is None else self.head(hidden)


class BareParameters(nn.Module):
    """A class token, positions, layer scale and a matrix without a module around them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 9, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(4))
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.gate = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.positions[:, : x.shape[1]]
        x = torch.tanh(x) * self.scale
        x = x - self.shift / 2
        return (x @ self.matrix) * torch.sigmoid(self.gate)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.shared(x) + self.bias)
        return self.conv(self.conv(x.unsqueeze(1)).relu()).squeeze(1)


class FunctionalBits(nn.Module):
    """Operations without a rule of their own, in-place sums, flattened rows, einsum, powers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.core = nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4))
        self.power = nn.Parameter(torch.rand(4) + 1)
        self.vector = nn.Parameter(torch.randn(4))
        self.bilinear = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        m, t, d = x.shape
        x = torch.addmm(self.bias, x.reshape(m * t, d), self.weight).view(m, t, d)
        x += self.bias.view(1, 1, d)
        x = torch.einsum("mtd,de->mte", x, self.core)
        x = self.bilinear(x, x.sin())
        x = x.abs().add(0.1).pow(self.power)
        return torch.stack([x @ self.vector, (x * self.vector).sum(-1)], -1)


class ConvNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = lambda c: nn.GroupNorm(2, c)) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), norm(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1, stride=2, bias=False), nn.ReLU(inplace=True), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(6 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Attention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        cut = x[..., : self.attention.kdim], x[..., : self.attention.vdim]
        return self.attention(x, *cut, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer, and its last states besides its outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.layer(x)
        last = torch.cat(state, -1) if isinstance(state, tuple) else state
        summary = last.movedim(1, 0).flatten(1).sum(1)
        return output + (summary[:, None, None] if self.layer.batch_first else summary[None, :, None])


def normed(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[randomized(layer) for layer in layers])


def randomized(layer: nn.Module) -> nn.Module:
    """Scales of one and shifts of zero hide mistakes."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


CASES = [
    Case("mlp", lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)), reals(5)),
    Case("linear on sequences", lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), reals(6, 5)),
    Case("linear on one position", lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), reals(1, 5)),
    Case("linear on long sequences", lambda: nn.Linear(3, 2), reals(2, 9, 3)),
    Case("convolutional network", ConvNet, reals(2, 8, 8)),
    Case("transposed", lambda: nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.Tanh(),
        nn.ConvTranspose2d(4, 1, (2, 3), dilation=2, bias=False)), reals(2, 3, 4)),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 2)), tokens(5)),
    Case("embedding, one token", lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(4, 2)), tokens(1)),
    Case("embedding, padding", lambda: nn.Sequential(nn.Embedding(3, 4, padding_idx=1), nn.Tanh()), tokens(5, 3)),
    Case("embedding bag, mean", lambda: nn.EmbeddingBag(7, 4, padding_idx=-1), tokens(5)),
    Case("embedding bag, sum", lambda: nn.EmbeddingBag(7, 4, mode="sum"), tokens(5)),
    Case("embedding bag, max", lambda: nn.EmbeddingBag(7, 4, mode="max"), tokens(5)),
    Case("embedding by frequency", lambda: nn.Embedding(50, 4, scale_grad_by_freq=False), tokens(5, 50)),
    Case("layer norm", normed(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 2)), reals(3, 5)),
    Case("layer norm over two dimensions", normed(nn.LayerNorm((3, 5))), reals(2, 3, 5)),
    Case("layer norm without bias", normed(nn.LayerNorm(5, bias=False)), reals(5)),
    Case("rms norm", normed(nn.Linear(5, 6), nn.RMSNorm(6), nn.Linear(6, 2)), reals(3, 5)),
    Case("group norm", normed(nn.GroupNorm(2, 4), nn.Conv1d(4, 3, 2)), reals(4, 5)),
    Case("instance norm", normed(nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 2, 2)), reals(3, 4, 4)),
    Case("prelu", normed(nn.PReLU(4), nn.Conv1d(4, 4, 1), nn.PReLU()), reals(4, 3)),
    Case("prelu on features", normed(nn.PReLU(4)), reals(4)),
    Case("tied, by module", lambda: TiedLanguageModel(functional=False), tokens(5)),
    Case("tied, by function", lambda: TiedLanguageModel(functional=True), tokens(5)),
    Case("bare parameters", BareParameters, reals(5, 4)),
    Case("called twice", CalledTwice, reals(5)),
    Case("functional", FunctionalBits, reals(3, 4)),
    Case("weight norm", lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 2))), reals(4)),
    Case("attention", lambda: Attention(batch_first=True), reals(5, 4)),
    Case("attention, batch second", lambda: Attention(), lambda m: torch.randn(5, m, 4), dim=1),
    Case("attention, other keys", lambda: Attention(kdim=3, vdim=2, batch_first=True), reals(5, 4)),
    Case("attention, bias on keys", lambda: Attention(add_bias_kv=True, batch_first=True), reals(5, 4)),
    Case("transformer layer", lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), reals(5, 4)),
    Case("transformer, batch second", lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0), 2, enable_nested_tensor=False),
        lambda m: torch.randn(5, m, 4), dim=1),
    Case("lstm", lambda: Recurrent(nn.LSTM(3, 4, batch_first=True)), reals(5, 3)),
    Case("lstm, stacked both ways", lambda: Recurrent(nn.LSTM(3, 2, 2, bidirectional=True)),
        lambda m: torch.randn(5, m, 3), dim=1),
    Case("lstm, projected", lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True), reals(5, 3)),
    Case("lstm, one step, no bias", lambda: nn.LSTM(3, 4, bias=False, batch_first=True), reals(1, 3)),
    Case("gru", lambda: Recurrent(nn.GRU(3, 4, 2, batch_first=True)), reals(5, 3)),
    Case("gru, both ways", lambda: nn.GRU(3, 4, bidirectional=True, batch_first=True), reals(5, 3)),
    Case("rnn", lambda: nn.RNN(3, 4, batch_first=True), reals(5, 3)),
    Case("rnn, relu", lambda: nn.RNN(3, 4, nonlinearity="relu"), lambda m: torch.randn(5, m, 3), dim=1),
]  # fmt: skip
