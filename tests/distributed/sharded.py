"""A small transformer in shards (``fully_shard``), and what it measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader

WORDS, WIDTH, LENGTH = 11, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(F.gelu(self.wide(x)))


class Transformer(nn.Module):
    """Tied embeddings and a bare parameter, for good measure."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@dataclass
class Setting:
    steps: int = 6
    microbatch_size: int | None = None
    least: int = 3
    reshard: bool = True
    clip: float | None = None
    optimizer: str = "sgd"
    options: dict[str, Any] = field(default_factory=dict)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, WORDS, (50, LENGTH + 1), generator=generator))


def shard(model: nn.Module, reshard: bool = True) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def train(setting: Setting) -> tuple[list[int], list[tuple[float, ...]], list[Tensor]]:
    """Sizes, numbers and final weights, in one process or in each of several."""
    torch.manual_seed(0)
    model: nn.Module = Transformer().double()
    if dist.is_initialized():
        model = shard(model, setting.reshard)
    kind, lr = {
        "sgd": (torch.optim.SGD, 0.3),
        "adamw": (torch.optim.AdamW, 0.03),
        "adagrad": (torch.optim.Adagrad, 0.1),
    }[setting.optimizer]
    optimizer = kind(model.parameters(), lr=lr)
    loader = AdaptiveLoader(data(), shuffle=True, seed=7, stream=True, max_microbatch_size=setting.microbatch_size)
    options = {"smoothing": 0.3, "max_examples": None, "measure_every": 1, **setting.options}
    scheduler = CABS(model, optimizer, loader, min_batch_size=setting.least, max_batch_size=30, **options)
    sizes, numbers = [], []
    for _, batch in zip(range(setting.steps), loader, strict=False):
        optimizer.zero_grad()
        for (words,) in [batch] if setting.microbatch_size is None else batch:
            outputs = model(words[:, :-1])
            losses = F.cross_entropy(outputs.flatten(0, 1), words[:, 1:].flatten(), reduction="none")
            scheduler.backward(losses.view(len(words), -1).mean(1))
        if setting.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        scheduler.step()
        last = scheduler.last
        assert last is not None
        sizes.append(last.batch_size)
        numbers.append((last.loss, last.variance, last.gradient_norm_squared, last.raw_batch_size))
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    scheduler.close()
    return sizes, numbers, [weight.detach().clone() for weight in weights]


class Hidden(torch.autograd.Function):
    """A product that nobody can look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return delta @ weight, delta.t() @ x


class HiddenLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(x, self.weight)


def complaint(kind: str) -> str:
    """What is said of a loop or a model that will not do."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    inner: nn.Module = HiddenLinear() if kind == "hidden" else nn.Linear(4, 3)
    model = nn.Sequential(nn.Linear(4, 4), inner)
    fully_shard(model)
    loader = AdaptiveLoader(TensorDataset(torch.randn(40, 4)), batch_size=8, seed=0)
    estimator = "microbatch" if kind == "estimator" else "exact"
    try:
        scheduler = CABS(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, min_batch_size=8, estimator=estimator
        )
        (x,) = next(iter(loader))
        loss = model(x).square().mean()
        if kind == "penalty":
            loss = loss + sum(p.square().sum() for p in model.parameters())
        if kind == "plain":
            loss.backward()
            scheduler.step(loss)
        else:
            scheduler.backward(loss)
            scheduler.step()
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return "nothing"


def found_size() -> int:
    """max_microbatch_size="auto" in shards, and a step with it."""
    torch.manual_seed(0)
    model = shard(Transformer())
    loader = AdaptiveLoader(data(), seed=0, max_microbatch_size="auto")

    def loss_of(batch: Any) -> Tensor:
        (words,) = batch
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = CABS(model, optimizer, loader, min_batch_size=6, max_batch_size=32, trial=loss_of)
    for microbatch in next(iter(loader)):
        scheduler.backward(loss_of(microbatch))
    optimizer.step()
    scheduler.step()
    assert isinstance(loader.max_microbatch_size, int)
    return loader.max_microbatch_size
