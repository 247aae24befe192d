"""Whose row is it: owners through views, writes, operations and whole models, against loops and brute force."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from cabs import CABS, AdaptiveLoader, GradientVariance
from cabs.variance.following import Following
from cabs.variance.memory import Marks, covers_its_memory_once
from cabs.variance.owners import SUM, Lot, Owners, compact
from cabs.variance.reference import reference
from compare import assert_equal, by_loop, measure, trained
from families import FAMILIES, Made, param

SHAPES = [(4, 8), (3, 7), (5, 5), (2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[0])
    model, inputs = FAMILIES[name]().double(), torch.randn(*shape, 4).double()
    assert_equal(measure(model, inputs), by_loop(model, inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_some_examples_of_families(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]().double(), torch.randn(7, 6, 4).double()
    variance = measure(model, inputs, max_examples=3)
    expected = by_loop(model, inputs)
    torch.testing.assert_close(variance.squared_norms(), expected.squared_norms[[0, 2, 4]], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(variance.mean_squared_norm, expected.mean_squared_norm, rtol=1e-9, atol=1e-12)


# -- random compositions between layers: exact, or refused

MOVES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.transpose(0, 1),
    lambda x: x.permute(1, 0, 2).contiguous(),
    lambda x: x.flip(1),
    lambda x: x.roll(1, 1),
    lambda x: x.roll(2, 0),
    lambda x: torch.cat([x, x.sin()], 1),
    lambda x: torch.cat([x, x.cos()], 0),
    lambda x: torch.stack(x.chunk(2, 1), 0).flatten(0, 1) if x.shape[1] % 2 == 0 else x,
    lambda x: x.chunk(2)[0] if len(x) > 1 else x,
    lambda x: x[torch.argsort(x[:, 0, 0])],
    lambda x: x[:, torch.arange(x.shape[1]).flip(0)],
    lambda x: x.gather(1, (x[..., :1] > 0).long().expand_as(x)) if x.shape[1] > 1 else x,
    lambda x: x.masked_fill(x > 1, 0.5),
    lambda x: x.unfold(1, 2, 1).mean(-1) if x.shape[1] > 1 else x,
    lambda x: x.unfold(1, 2, 1).permute(1, 0, 3, 2).flatten(1, 2) if x.shape[1] > 1 else x,
    lambda x: x.unsqueeze(0).expand(2, *x.shape).flatten(0, 1),
    lambda x: x.repeat(2, 1, 1),
    lambda x: x.repeat_interleave(2, 0),
    lambda x: x.flatten(0, 1).unflatten(0, (x.shape[1], x.shape[0])),
    lambda x: F.pad(x, (0, 0, 1, 1)),
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: x * x.softmax(1),
    lambda x: x.clone().index_add_(1, torch.zeros(x.shape[1], dtype=torch.long), x),
    lambda x: x[:, ::2],
    lambda x: x.reshape(-1, 4)[x.reshape(-1, 4)[:, 0] > 0].unsqueeze(1),
    lambda x: x + x.amax((0, 1)) if x.numel() else x,
    lambda x: x.cumsum(0),
]  # fmt: skip


class Chained(nn.Module):
    """Layers with moves between them; the end adds up whatever rows there are, example by example if it can."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(len(numbers) + 1))
        self.scale, self.shift = param(4), param(4)
        self._moves = [MOVES[number] for number in numbers]

    def forward(self, x: Tensor) -> Tensor:
        for move, layer in zip(self._moves, self.layers, strict=False):
            x = layer(move(x)).tanh() * self.scale + self.shift
        return self.layers[-1](x)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(MOVES) - 1), min_size=1, max_size=4), st.sampled_from(SHAPES), st.integers(0, 99))
def test_random_compositions_are_exact_or_refused(numbers: list[int], shape: tuple[int, int], seed: int) -> None:
    """The oracle needs no loop and no owners: the rows of the output that an example moves, found by moving it."""
    torch.manual_seed(seed)
    model, x = Chained(numbers).double(), torch.randn(*shape, 4).double()
    whose = moved_by(model, x)
    if whose is None:
        return  # examples meet: there is nothing to be exact about; the loss below would mix them
    weights = torch.randn_like(model(x))
    examples = shape[0]

    def losses(output: Tensor) -> Tensor:
        terms = (weights * output + output.square()).flatten(1).sum(1)
        return torch.zeros(examples, dtype=x.dtype).index_add(0, whose.clamp(min=0), terms * (whose >= 0))

    parameters = trained(model)
    expected = reference(lambda i: losses(model(x))[i], [parameters], examples)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with GradientVariance(model) as variance:
                losses(model(x)).mean().backward()
            norms = variance.squared_norms()
    except (RuntimeError, UserWarning) as error:
        if not re.search("mixed|added up|depends on others|no example's", str(error)):
            raise
        return
    torch.testing.assert_close(norms, expected.squared_norms, rtol=1e-8, atol=1e-10)


def moved_by(model: nn.Module, x: Tensor) -> Tensor | None:
    """Which example each row of the output belongs to, −1 for nobody; None if some row belongs to several."""
    with torch.no_grad():
        before = model(x).flatten(1)
        owner = torch.full((len(before),), -1)
        for i in range(len(x)):
            other = x.clone()
            other[i] = torch.randn_like(other[i])
            after = model(other).flatten(1)
            if after.shape != before.shape:
                return None
            changed = (after != before).any(1)
            if (changed & (owner >= 0)).any():
                return None
            owner[changed] = i
    return owner


# -- memory: views and writes


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 10**6))
def test_owners_of_views_and_of_what_is_written_into_them(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    shape = [chance.choice([1, 2, 3, 4, 6]) for _ in range(chance.randint(1, 3))]
    x = torch.randn([*shape, chance.choice([2, 3, 4])])
    if chance.random() < 0.3:
        x = x.permute(*torch.randperm(x.dim()).tolist()).clone(memory_format=torch.preserve_format)
    dim = chance.randrange(x.dim())
    marks = Marks("_test_owners")
    marks.lot = Lot(x.shape[dim])
    marks.set(x, Owners.along(dim, x.dim(), torch.arange(x.shape[dim])))
    twin = torch.empty_strided(x.size(), x.stride(), dtype=torch.long)
    twin.copy_(torch.arange(x.shape[dim]).reshape([-1 if d == dim else 1 for d in range(x.dim())]).expand(x.shape))
    for _ in range(chance.randint(1, 5)):
        if chance.random() < 0.25 and x.numel() and 0 not in x.stride() and covers_its_memory_once(x):
            ids = torch.randint(0, 5, [n if chance.random() < 0.5 else 1 for n in x.shape])
            marks.set(x, Owners(compact(ids)))
            twin.copy_(ids.expand(twin.shape))
        else:
            step = a_view(chance, x)
            x, twin = step(x), step(twin)
    if x.numel():
        found = marks.get(x)
        assert found is not None
        assert torch.equal(found.table.expand(x.shape), twin)


def a_view(chance: random.Random, x: Tensor) -> Callable[[Tensor], Tensor]:
    kind = chance.randrange(7) if x.dim() else chance.choice([4, 5])
    dim = chance.randrange(x.dim()) if x.dim() else 0
    if kind == 0:
        order = torch.randperm(x.dim()).tolist()
        return lambda t: t.permute(order)
    if kind == 1:
        first = chance.randrange(x.shape[dim])
        cut = slice(first, chance.randint(first + 1, x.shape[dim]), chance.choice([1, 2]))
        return lambda t: t[tuple(cut if d == dim else slice(None) for d in range(t.dim()))]
    if kind == 2:
        place = chance.randrange(x.shape[dim])
        return lambda t: t.select(dim, place)
    if kind == 3:
        size = x.shape[dim]
        part = chance.choice([n for n in range(1, size + 1) if size % n == 0])
        return lambda t: t.unflatten(dim, (part, size // part))
    if kind == 4:
        return lambda t: t.unsqueeze(0)
    if kind == 5:
        return lambda t: t.expand(2, *t.shape)
    width = chance.randint(1, x.shape[dim])
    return lambda t: t.unfold(dim, width, 1)


# -- operations: whoever changes an output must be its owner

A = (3, 4, 2)
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: x.sin() * x + 1,
    "broadcast": lambda x: x * torch.arange(8.0).reshape(1, 4, 2),
    "sum": lambda x: x.sum(1),
    "sum of all": lambda x: x.sum(),
    "mean over examples": lambda x: x.mean(0),
    "softmax": lambda x: x.softmax(1),
    "softmax over examples": lambda x: x.softmax(0),
    "max": lambda x: x.max(2).values,
    "var": lambda x: x.var((1, 2)),
    "sort": lambda x: x.sort(1).values,
    "sort over examples": lambda x: x.sort(0).values,
    "topk": lambda x: x.topk(2, 1).values,
    "cumsum": lambda x: x.cumsum(0),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "matmul across": lambda x: x.flatten(1) @ x.flatten(1).T,
    "by a matrix": lambda x: x @ torch.ones(2, 3),
    "from the left": lambda x: torch.ones(5, 4) @ x,
    "einsum": lambda x: torch.einsum("mtd,med->tme", x, x),
    "convolution": lambda x: F.conv1d(x, torch.ones(3, 4, 2)),
    "grouped convolution": lambda x: F.conv1d(x.reshape(1, 12, 2), torch.ones(3, 4, 2), groups=3),
    "pool": lambda x: F.max_pool1d(x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x.unsqueeze(1), 1),
    "upsample": lambda x: F.interpolate(x, scale_factor=2),
    "layer norm": lambda x: F.layer_norm(x, (2,)),
    "layer norm over examples": lambda x: F.layer_norm(x.permute(1, 2, 0), (3,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": lambda x: F.instance_norm(x),
    "pad": lambda x: F.pad(x, (1, 1, 0, 1)),
    "pad examples": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "reflect": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "cat": lambda x: torch.cat([x, torch.zeros(3, 1, 2)], 1),
    "cat examples": lambda x: torch.cat([x, torch.zeros(1, 4, 2), x]),
    "stack": lambda x: torch.stack([x, x.flip(0)], 1),
    "index": lambda x: x[torch.tensor([2, 0, 0])],
    "mask": lambda x: x[torch.tensor([[True, False, True, True]] * 3)],
    "index two": lambda x: x[torch.tensor([0, 2]), :, torch.tensor([1, 0])],
    "gather": lambda x: x.gather(0, torch.tensor([[[2, 1]] * 4])),
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 3])),
    "roll": lambda x: x.roll((1, 2), (0, 1)),
    "roll flat": lambda x: x.roll(3),
    "flip": lambda x: x.flip(0, 2),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([2, 0, 1]), 0),
    "index_add": lambda x: torch.zeros(2, 4, 2).index_add(0, torch.tensor([0, 1, 1]), x),
    "index_copy": lambda x: torch.zeros(5, 4, 2).index_copy(0, torch.tensor([4, 1, 0]), x),
    "scatter_add": lambda x: torch.zeros(3, 5, 2).scatter_add(1, torch.tensor([[[1, 0]] * 4] * 3), x),
    "scatter_add examples": lambda x: torch.zeros(2, 4, 2).scatter_add(0, torch.tensor([[[1, 0]] * 4] * 3), x),
    "index_put": lambda x: torch.zeros(6, 4, 2).index_put((torch.tensor([5, 0, 2]),), x),
    "index_put, added": lambda x: torch.zeros(2, 4, 2).index_put((torch.tensor([1, 0, 1]),), x, accumulate=True),
    "masked_scatter": lambda x: torch.zeros(4, 4, 2).masked_scatter(torch.arange(4)[:, None, None] > 0, x),
    "masked_select": lambda x: x.masked_select(torch.tensor([[True], [False], [True], [True]])),
    "where": lambda x: torch.where(torch.tensor([[True, False]]), x, x.roll(1, 0)),
    "in place, part": lambda x: torch.zeros(3, 5, 2).index_fill_(0, torch.tensor([0]), 1)[:, 1:].copy_(x),
    "embedding bag": lambda x: F.embedding_bag((x.flatten(1) > 0).long(), torch.randn(2, 3)),
    "fft": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "inverse": lambda x: torch.linalg.inv(x[:, :2] + 5 * torch.eye(2)),
    "cdist": lambda x: torch.cdist(x, x),
    "unfold": lambda x: F.unfold(x.unsqueeze(1), (2, 2)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "lstm cell": lambda x: nn.LSTMCell(2, 3)(x[:, 0])[0],
    "gru": lambda x: nn.GRU(2, 3, batch_first=True)(x)[0],
    "rnn, time first": lambda x: nn.RNN(2, 3)(x.transpose(0, 1))[0],
    "losses": lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(12).long(), reduction="none"),
    "loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(3, 2, 2)),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.unsqueeze(-1), 2),
    "unknown": lambda x: torch.histc(x, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_whoever_changes_an_output_is_its_owner(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(A)
    found, output = followed(OPERATIONS[name], x)
    for i in range(A[0]):
        other = x.clone()
        other[i] = torch.randn_like(other[i])
        torch.manual_seed(1)
        changed = OPERATIONS[name](other) != output
        allowed = (found == i) | (found >= SUM)
        assert not (changed & ~allowed).any(), f"example {i} changes what belongs to others"


def followed(operation: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """An output's owners, as followed, and the output."""
    marks = Marks("_test_followed")
    marks.lot = Lot(len(x))
    mine = x.clone()
    marks.set(mine, Owners.along(0, x.dim(), torch.arange(len(x))))
    torch.manual_seed(1)
    with Following(marks):
        output = operation(mine)
    found = marks.get(output)
    assert found is not None
    return found.table.expand(output.shape), output


def test_what_keeps_examples_apart_is_known_to() -> None:
    """Owners that are never known would pass the test above."""
    across = ("examples", "across", "of all", "loss", "cumsum", "unknown", "cdist", "scatter_add examples")
    for name, operation in OPERATIONS.items():
        if not any(word in name for word in across):
            found, _ = followed(operation, torch.randn(A))
            settled = name not in ("index_add", "index_put, added", "where", "stack", "roll", "roll flat")
            assert not settled or (found < SUM).all(), name


# -- inputs


@dataclass
class Box:
    x: Tensor
    note: str = ""


def against(model: nn.Module, call: Callable[[Any], Tensor], singles: list[Any], whole: Any, **options: Any) -> None:
    """Compares a model on a batch with the same on its single examples; losses are means over an example's outputs."""
    with GradientVariance(model, **options) as variance:
        call(whole).square().flatten(1).mean(1).mean().backward()
    assert_equal(variance, reference(lambda i: call(singles[i]).square().mean(), [trained(model)], len(singles)))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


def test_a_first_argument_that_holds_no_examples() -> None:
    for other in (torch.ones(1, 4).double(), torch.ones(4).double(), torch.ones(()).double()):
        model = Made(lambda s, other, x: s.l(x * other), l=nn.Linear(4, 3)).double()
        against(model, lambda x, model=model, other=other: model(other, x), list(X.split(1)), X)


def test_inputs_in_objects() -> None:
    model = Made(lambda s, box: s.l(box.x), l=nn.Linear(4, 3)).double()
    against(model, lambda x: model(Box(x)), list(X.split(1)), X)
    nested = Made(lambda s, parts: s.l(parts["a"][0].x), l=nn.Linear(4, 3)).double()
    against(nested, lambda x: nested({"a": [Box(x)]}), list(X.split(1)), X)


@pytest.mark.parametrize("places", [torch.arange(5), torch.arange(5)[None]], ids=["(T,)", "(1, T)"])
def test_as_many_positions_as_examples(places: Tensor) -> None:
    model = Made(lambda s, x, p: s.e(x) + s.p(p), e=nn.Embedding(9, 4), p=nn.Embedding(9, 4)).double()
    tokens = torch.randint(0, 9, (5, 5))
    against(model, lambda x: model(x, places), list(tokens.split(1)), tokens)


def test_a_square_mask_with_as_many_rows_as_examples() -> None:
    mask = torch.ones(5, 5).tril().log().double()
    model = Made(lambda s, x, m: (s.l(x) @ x.mT + m).softmax(-1) @ x, l=nn.Linear(4, 4)).double()
    x = torch.randn(5, 5, 4).double()
    against(model, lambda x: model(x, mask), list(x.split(1)), x)


def test_inputs_that_disagree_are_refused() -> None:
    model = Made(lambda s, x, y: s.l(x).sum() * y.sum(), l=nn.Linear(4, 3)).double()
    with GradientVariance(model), pytest.raises(ValueError, match="count_examples"):
        model(X, torch.randn(5, 4))


def test_examples_that_share_memory() -> None:
    """Windows of one long series: a place in memory belongs to several of them."""
    series = torch.randn(9).double()
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = series.unfold(0, 4, 1)
    against(model, model, list(x.split(1)), x)


def test_a_batch_that_goes_through_in_parts() -> None:
    model = nn.Linear(4, 3).double()
    with GradientVariance(model) as variance:
        parts = [model(X[:2]).square().mean(1), model(X[2:]).square().mean(1)]
        torch.cat(parts).mean().backward()
    assert_equal(variance, reference(lambda i: model(X[i : i + 1]).square().mean(), [trained(model)], 6))


GRAPHS = [2, 4, 3]


def graph_network() -> nn.Module:
    def forward(s: Any, x: Tensor, edges: Tensor, batch: Tensor, count: int) -> Tensor:
        h = s.a(x)
        h = (torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) + h) * s.g
        return s.b(torch.zeros(count, 4, dtype=x.dtype).index_add_(0, batch, h.relu()))

    return Made(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2), g=param(4)).double()


@pytest.mark.parametrize(
    "options",
    [{"count_examples": lambda *_: 3}, {"owners": lambda x, edges, batch: batch}],
    ids=["counted", "told"],
)
def test_uneven_graphs(options: dict[str, Any]) -> None:
    model, x = graph_network(), torch.randn(9, 4).double()
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(GRAPHS))
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 0, 3, 4, 5, 2, 7, 8, 6]])

    def one(i: int) -> Tensor:
        nodes = (batch == i).nonzero().flatten()
        mine = edges[:, batch[edges[0]] == i] - nodes[0]
        return model(x[nodes], mine, torch.zeros(len(nodes)).long(), 1).square().mean()

    with GradientVariance(model, **options) as variance:
        model(x, edges, batch, 3).square().mean(1).mean().backward()
    assert_equal(variance, reference(one, [trained(model)], 3))


# -- beyond the forward pass


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.table(x)).tanh()


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_a_tied_head_in_a_chunked_loss(penalty: float) -> None:
    model = Tied().double()
    x, y = torch.randint(0, 9, (5, 5)), torch.randint(0, 9, (5, 5))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        rows, targets = model(x).reshape(-1, 4), y.reshape(-1)
        parts = zip(rows.split(7), targets.split(7), strict=True)
        total = sum(F.cross_entropy(r @ model.table.weight.T, t, reduction="sum") for r, t in parts)
        return total / len(targets)

    with GradientVariance(model) as variance:
        (loss(x, y) + penalty * model.table.weight.square().sum()).backward()
    assert_equal(variance, reference(lambda i: loss(x[i : i + 1], y[i : i + 1]), [trained(model)], 5))


def test_a_hook_that_changes_gradients_does_no_harm_to_accumulation() -> None:
    model = nn.Linear(4, 3).double()
    expected = reference(lambda i: model(X[i : i + 1]).square().sum(), [trained(model)], 6)
    handles = [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model.parameters()]
    with GradientVariance(model) as variance:
        for part in X.split(2):
            (model(part).square().sum() / 6).backward()
    for handle in handles:
        handle.remove()
    assert_equal(variance, expected)


def test_an_old_gradient_does_no_harm_to_accumulation() -> None:
    model = nn.Linear(4, 3).double()
    expected = reference(lambda i: model(X[i : i + 1]).square().sum(), [trained(model)], 6)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with GradientVariance(model) as variance:
        for part in X.split(2):
            (model(part).square().sum() / 6).backward()
    assert_equal(variance, expected)


@pytest.mark.parametrize("loss", ["contrastive", "tokens", "logarithm"])
def test_losses_in_which_examples_meet_are_warned_about(loss: str) -> None:
    model = nn.Linear(4, 3).double()
    targets = torch.tensor([0, 1, -100, 2, 1, 0])
    x = X.reshape(3, 2, 4) if loss == "tokens" else X
    with GradientVariance(model):
        output = model(x)
        value = {
            "contrastive": lambda: F.cross_entropy(output @ output.T, torch.arange(6)),
            "tokens": lambda: F.cross_entropy(output.flatten(0, 1), targets),
            "logarithm": lambda: output.square().mean().log(),
        }[loss]()
        with pytest.warns(UserWarning, match="loss of one example depends on others"):
            value.backward()


def test_equal_numbers_of_tokens_are_no_matter() -> None:
    model = nn.Linear(4, 3).double()
    targets = torch.tensor([-100, 1, -100, 2, 1, -100])
    x = X.reshape(3, 2, 4)

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), targets)

    with GradientVariance(model) as variance:
        loss(x, targets).backward()
    assert_equal(variance, reference(lambda i: loss(x[i : i + 1], targets[2 * i : 2 * i + 2]), [trained(model)], 3))


def test_what_comes_after_a_mixture_is_refused() -> None:
    model = Made(lambda s, x: s.l(x), l=nn.Linear(4, 3), temperature=param(1)).double()
    with GradientVariance(model):
        output = model(X)
        loss = F.cross_entropy(output @ output.T * model.temperature, torch.arange(6))
        with pytest.raises(RuntimeError, match=r"temperature .*mixed .*test_owners.py"):
            loss.backward()


def test_what_comes_after_the_sum_is_refused() -> None:
    model = Made(lambda s, x: s.l(x), l=nn.Linear(4, 3), weight=param(1)).double()
    with GradientVariance(model), pytest.raises(RuntimeError, match="added up"):
        (model(X).square().mean() * model.weight.exp()).sum().backward()


# -- what cannot be seen


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return delta * w, (delta * x).sum(0)


def test_a_use_that_is_hidden_beside_one_that_is_seen_is_refused() -> None:
    model = Made(lambda s, x: Hidden.apply(x, s.w) * s.w, w=param(4)).double()
    with GradientVariance(model) as variance:
        model(X).square().mean(1).mean().backward()
    with pytest.raises(RuntimeError, match=r"reached w by a way that cannot be seen"):
        variance.trace()


def test_packed_sequences_are_refused() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.r(pack_padded_sequence(x, [3, 2, 1], batch_first=True))[1][0]

    model = Made(forward, r=nn.LSTM(4, 3, batch_first=True)).double()
    with GradientVariance(model), pytest.raises(NotImplementedError, match="packed sequences"):
        model(torch.randn(3, 3, 4).double())


# -- the loader knows


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.randn(4, generator=torch.Generator().manual_seed(index)), "kind": index % 3}


def scheduled(model: nn.Module) -> tuple[CABS, AdaptiveLoader, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(Data(), batch_size=16)
    return CABS(model, optimizer, loader, min_batch_size=4, max_batch_size=64), loader, optimizer


def test_a_batch_is_followed_from_the_loader() -> None:
    """Cut in two, made wider, and given to the model behind a vector that has nothing to do with it."""
    model = Made(lambda s, settings, x: s.l(x * settings), l=nn.Linear(4, 3))
    scheduler, loader, optimizer = scheduled(model)
    batch = next(iter(loader))
    x = batch["x"].to(torch.float64).to(torch.float32)
    loss = torch.cat([model(torch.ones(4), part).square().mean(1) for part in (x[:5], x[5:])]).mean()
    loss.backward()
    with scheduler.variance.paused():
        expected = reference(lambda i: model(torch.ones(4), x[i : i + 1]).square().mean(), [trained(model)], 16)
    optimizer.step()
    scheduler.step(loss)
    assert scheduler.last is not None
    assert scheduler.last.examples == 16
    assert scheduler.last.variance == pytest.approx(float(expected.trace), rel=1e-4)


def test_a_part_of_the_batch_is_refused() -> None:
    model = nn.Linear(4, 3)
    scheduler, loader, _ = scheduled(model)
    loss = model(next(iter(loader))["x"][:9]).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"handed out 16 examples .* with 9 of them"):
        scheduler.step(loss)


def test_other_inputs_than_the_batch_are_refused() -> None:
    model = nn.Linear(4, 3)
    _, loader, _ = scheduled(model)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="16 examples"):
        model(torch.randn(7, 4))


# -- checks that anyone can run


@pytest.mark.parametrize("name", FAMILIES)
def test_a_change_of_one_example_moves_its_own_rows(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]().double(), torch.randn(4, 6, 4).double()
    with GradientVariance(model, check_owners=True) as variance:
        model(inputs).square().flatten(1).mean(1).mean().backward()
    assert variance.examples == 4


def crosstalk() -> nn.Module:
    """What one example does to another goes through a plain number, which nobody can follow."""
    return Made(lambda s, x: s.last(s.first(x * x.detach().sum().item())), first=nn.Linear(4, 3), last=nn.Linear(3, 2))


def test_examples_that_secretly_depend_on_one_another_are_found() -> None:
    model = crosstalk()
    with GradientVariance(model, check_owners=True), pytest.raises(RuntimeError, match=r"first: a change of example"):
        model(torch.randn(6, 4))
    model = crosstalk()
    scheduler, loader, _ = scheduled(model)
    with pytest.raises(RuntimeError, match=r"first: a change of example"):
        model(next(iter(loader))["x"])
    scheduler.close()


def test_the_check_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    x = torch.randn(6, 4)
    outcomes = []
    for check in (False, True):
        torch.manual_seed(0)
        with warnings.catch_warnings(), GradientVariance(model, check_owners=check) as variance:
            warnings.simplefilter("ignore")
            for module in model:
                module.train()
            model[1].reset_running_stats()
            model.zero_grad()
            model(x).square().mean().backward()
        buffers = [b.clone() for b in model.buffers()]
        outcomes.append([variance.trace(), torch.rand(3), *buffers, *(p.grad.clone() for p in trained(model))])
        assert model.training
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_verify() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 2)).double()
    variance = GradientVariance(model)
    batch = {"x": X, "y": torch.randint(0, 2, (6,))}
    before = torch.random.get_rng_state()
    found = variance.verify(lambda b: F.cross_entropy(model(b["x"]), b["y"]), batch)
    assert found.exact
    assert found.examples == 6
    assert "exact: 6 examples, 4 parameters" in str(found)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, torch.random.get_rng_state())


def test_verify_names_the_parameters_that_differ() -> None:
    model = crosstalk().double()
    found = GradientVariance(model).verify(lambda b: model(b.x).square().mean(), Box(X))
    assert not found.exact
    assert {one.name for one in found.wrong} <= {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert "first.weight" in str(found)


def test_verify_with_a_split_of_ones_own() -> None:
    model = nn.EmbeddingBag(9, 4, mode="mean").double()
    tokens, offsets = torch.randint(0, 9, (11,)), torch.tensor([0, 3, 4, 9])
    parts = tokens.tensor_split([3, 4, 9])
    variance = GradientVariance(model, count_examples=lambda tokens, offsets: len(offsets))
    split = lambda batch, i: (parts[i], torch.tensor([0]))  # noqa: E731
    assert variance.verify(lambda b: model(*b).square().mean(), (tokens, offsets), split=split).exact
    with pytest.raises(ValueError, match="single examples"):
        GradientVariance(model, "paper").verify(lambda b: model(*b).sum(), (tokens, offsets))
