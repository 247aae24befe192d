"""Models in which the rows of an example are not where one would guess, each a family; inputs have shape (m, t, 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Linear


class Made(nn.Module):
    """A module of a function, with parts that it uses."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(self, *args)


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


def siamese(self: Any, x: Tensor) -> Tensor:
    one, other = self.layer(torch.cat([x, 2 * x.flip(1)])).tanh().chunk(2)
    return one * other


def masked_head(self: Any, x: Tensor) -> Tensor:
    mask = x[..., 0] > 0
    out = x.new_zeros(*x.shape[:2], 3)
    out[mask] = self.layer(x[mask]).tanh()
    return out


def routed(self: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, 4)
    weights, experts = self.router(rows).softmax(-1).topk(2, -1)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(self.experts):
        token, slot = torch.where(experts == number)
        out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
    return out.view_as(x)


def relative_bias(self: Any, x: Tensor) -> Tensor:
    bias = self.bias(x)
    for layer in self.layers:
        x = (layer(x) @ x.transpose(1, 2) + bias).softmax(-1) @ x
    return x


def distances(self: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    return self.table((places[:, None] - places).abs().clamp(max=3))[..., 0]


def written(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    y += self.shift
    y[..., :2] += self.part
    y.masked_fill_(y < 0, 0.1)
    y *= self.shift
    y.mul_(2).tanh_()
    return self.last(y)


def put_together(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    y[:, 0] = self.shift
    z = torch.zeros(x.shape[0], x.shape[1] + 1, 3, dtype=x.dtype)
    z[:, 1:] = y
    z[:, 0].copy_(self.shift.expand(len(x), 3) * y[:, 0])
    return self.last(z)


def filled_in_a_loop(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), x.shape[1], 3, dtype=x.dtype)
    for t in range(x.shape[1]):
        out[:, t] = self.layer(x[:, t]).tanh()
    return self.last(out)


def windows(self: Any, x: Tensor) -> Tensor:
    cut = x.unfold(1, 2, 1).permute(1, 0, 2, 3).flatten(0, 1).flatten(1)
    return self.layer(cut).view(x.shape[1] - 1, x.shape[0], -1).transpose(0, 1)


def sorted_by_data(self: Any, x: Tensor) -> Tensor:
    order = torch.argsort(x[:, 0, 0])
    return self.layer(x[order])[torch.argsort(order)]


def padded_windows(self: Any, x: Tensor) -> Tensor:
    pairs = F.pad(x, (0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2)).flatten(0, 1)
    return self.layer(pairs).tanh().mean(1).view(len(x), -1)


def lone_rows(self: Any, x: Tensor) -> Tensor:
    return torch.stack([self.layer(x[i]).tanh() * self.scale for i in range(len(x))])


def attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(4, 2, batch_first=True, **options)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "time first": lambda: Made(lambda s, x: s.l(x.transpose(0, 1)).transpose(0, 1), l=Linear(4, 3)),
    "time first, summed": lambda: Made(lambda s, x: s.l(x.transpose(0, 1)).tanh().sum(0), l=Linear(4, 3)),
    "behind a time-first LSTM": lambda: Made(
        lambda s, x: s.l(s.r(x.transpose(0, 1))[0]).mean(0), r=nn.LSTM(4, 3), l=Linear(3, 3)),
    "windows": lambda: Made(windows, layer=Linear(8, 3)),
    "padded windows": lambda: Made(padded_windows, layer=Linear(4, 3)),
    "siamese": lambda: Made(siamese, layer=Linear(4, 3)),
    "stacked views": lambda: Made(lambda s, x: s.l(torch.stack([x, 2 * x, x.flip(1)])).tanh().prod(0), l=Linear(4, 3)),
    "einsum, time first": lambda: Made(
        lambda s, x: torch.einsum("btd,de->tbe", x, s.w).transpose(0, 1), w=param(4, 3)),
    "masked head": lambda: Made(masked_head, layer=Linear(4, 3)),
    "experts": lambda: Made(routed, router=Linear(4, 3), experts=nn.ModuleList(
        nn.Sequential(Linear(4, 5), nn.GELU(), Linear(5, 4)) for _ in range(3))),
    "experts, one product": lambda: Made(
        lambda s, x: torch.bmm(x.reshape(1, -1, 4).expand(2, -1, -1), s.w).tanh().sum(0).view(len(x), -1),
        w=param(2, 4, 3)),
    "positions from a module": lambda: Made(
        lambda s, x: s.l(x + s.p(x)), p=Made(lambda s, x: s.w[: x.shape[1]], w=param(20, 4)), l=Linear(4, 3)),
    "relative bias": lambda: Made(
        relative_bias, bias=Made(distances, table=nn.Embedding(4, 1)),
        layers=nn.ModuleList([Linear(4, 4), Linear(4, 4)])),
    "expand_as": lambda: Made(lambda s, x: (s.l(x) + s.b.expand_as(s.l(x))).tanh(), l=Linear(4, 3), b=param(3)),
    "learned queries, repeated": lambda: Made(
        lambda s, x: s.a(s.q.repeat(len(x), 1, 1), x, x)[0], a=attention(), q=param(1, 2, 4)),
    "learned queries, expanded": lambda: Made(
        lambda s, x: s.a(s.q.expand(len(x), -1, -1), x, x, need_weights=False)[0], a=attention(), q=param(1, 2, 4)),
    "learned queries, shared": lambda: Made(lambda s, x: F.scaled_dot_product_attention(s.q, x, x), q=param(2, 4)),
    "learned keys": lambda: Made(lambda s, x: F.scaled_dot_product_attention(
        x, s.k.expand(len(x), -1, -1), s.v.expand(len(x), -1, -1)), k=param(1, 3, 4), v=param(1, 3, 4)),
    "relu in place": lambda: nn.Sequential(Linear(4, 3), nn.ReLU(inplace=True), Linear(3, 2)),
    "relu in place, tied": lambda: Made(lambda s, x: F.relu(s.l(x), inplace=True) @ s.l.weight, l=Linear(4, 3)),
    "written": lambda: Made(written, layer=Linear(4, 3), shift=param(3), part=param(2), last=Linear(3, 2)),
    "put together in place": lambda: Made(put_together, layer=Linear(4, 3), shift=param(3), last=Linear(3, 2)),
    "filled in a loop": lambda: Made(filled_in_a_loop, layer=Linear(4, 3), last=Linear(3, 2)),
    "scale on flat rows": lambda: Made(
        lambda s, x: (s.l(x.flatten(0, 1)) * s.g).view(len(x), -1), l=Linear(4, 3), g=param(3)),
    "matrix on flat rows": lambda: Made(
        lambda s, x: (s.l(x.flatten(0, 1)).view(-1, 2, 2) * s.g + s.h).view(len(x), -1),
        l=Linear(4, 4), g=param(2, 2), h=param(2, 1)),
    "class token": lambda: Made(
        lambda s, x: s.l(torch.cat([s.t.expand(len(x), -1, -1), x], 1)).tanh(), t=param(1, 1, 4), l=Linear(4, 3)),
    "class token, time first": lambda: Made(
        lambda s, x: s.l(torch.cat([s.t.expand(1, len(x), -1), x.transpose(0, 1)])).tanh().transpose(0, 1),
        t=param(1, 1, 4), l=Linear(4, 3)),
    "mask token": lambda: Made(
        lambda s, x: s.l(torch.where(x[..., :1] > 0, x, s.t)).tanh(), t=param(4), l=Linear(4, 3)),
    "rolled": lambda: Made(
        lambda s, x: s.l(torch.roll(x, 1, 1).flatten(0, 1)).view(len(x), -1), l=Linear(4, 3)),
    "sorted by data": lambda: Made(sorted_by_data, layer=Linear(4, 3)),
    "frames through a convolution": lambda: Made(
        lambda s, x: s.c(x.permute(1, 0, 2).reshape(-1, 1, 4)).view(x.shape[1], len(x), -1).transpose(0, 1),
        c=nn.Conv1d(1, 2, 2)),
    "frames through a group norm": lambda: Made(
        lambda s, x: s.n(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], len(x), 4).transpose(0, 1),
        n=nn.GroupNorm(2, 4)),
    "token types of zeros": lambda: Made(
        lambda s, x: s.l(x + s.e(torch.zeros(x.shape[:2], dtype=torch.long))), e=nn.Embedding(3, 4), l=Linear(4, 3)),
    "positions in one row": lambda: Made(
        lambda s, x: s.l(x + s.e(torch.arange(x.shape[1])[None])), e=nn.Embedding(30, 4), l=Linear(4, 3)),
    "gathered": lambda: Made(lambda s, x: s.l(x.gather(1, (x[..., :1] > 0).long().expand_as(x))), l=Linear(4, 3)),
    "looked up by indexing": lambda: Made(lambda s, x: s.l(s.w[(x[..., 0] > 0).long()]), w=param(2, 4), l=Linear(4, 3)),
    "matrix from the left": lambda: Made(lambda s, x: (s.w @ x.transpose(1, 2)).tanh(), w=param(3, 4)),
    "bilinear": lambda: Made(lambda s, x: s.b(x, x.sin()), b=nn.Bilinear(4, 4, 3)),
    "patches by unfold": lambda: Made(
        lambda s, x: s.l(F.unfold(x[:, None], (2, 2)).transpose(1, 2)).tanh().sum(1), l=Linear(4, 3)),
    "one example at a time": lambda: Made(lone_rows, layer=Linear(4, 3), scale=param(3)),
}  # fmt: skip
