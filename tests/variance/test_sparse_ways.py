"""Models that leave something out: experts without tokens, exits that nobody takes, memory that is never written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Linear

from cabs import GradientVariance
from cabs.variance.reference import reference
from compare import assert_equal, trained
from families import Made, param

X = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).double()


def per(output: Tensor) -> Tensor:
    return output.flatten(1).tanh().square().sum(1)


def exact(model: nn.Module, x: Tensor = X, loss: Callable[[Tensor], Tensor] = per) -> None:
    model = model.double()
    for weights in (None, {p: torch.rand_like(p) for p in trained(model)}):
        with GradientVariance(model, weights=weights) as variance:
            loss(model(x)).mean().backward()
        expected = reference(lambda i: loss(model(x[i : i + 1])).sum(), [trained(model)], len(x), weights=weights)
        assert_equal(variance, expected)


def routed(put: Callable[[Tensor, Tensor, Tensor], Tensor | None]) -> Callable[[Any, Tensor], Tensor]:
    """A layer of experts, the first and the last of which get no tokens."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x).flatten(0, 1)
        chosen = 1 + (h[:, 0] > 0).long()
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero().flatten()
            changed = put(out, tokens, expert(h[tokens]))
            out = out if changed is None else changed
        return self.b((h + out).view(x.shape))

    return forward


def wide(tokens: Tensor, source: Tensor) -> Tensor:
    return tokens.unsqueeze(1).expand_as(source)


PUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor | None]] = {
    "index_add_": lambda out, tokens, y: out.index_add_(0, tokens, y),
    "index_add": lambda out, tokens, y: out.index_add(0, tokens, y),
    "index_copy": lambda out, tokens, y: out.index_copy(0, tokens, y),
    "scatter_add": lambda out, tokens, y: out.scatter_add(0, wide(tokens, y), y),
    "scatter_": lambda out, tokens, y: out.scatter_(0, wide(tokens, y), y),
    "scatter_reduce": lambda out, tokens, y: out.scatter_reduce(0, wide(tokens, y), y, "sum"),
    "index_put": lambda out, tokens, y: out.index_put((tokens,), y),
    "index_put_, added": lambda out, tokens, y: out.index_put_((tokens,), y, accumulate=True),
    "brackets": lambda out, tokens, y: out.__setitem__(tokens, y),  # type: ignore[func-returns-value]
    "into a view": lambda out, tokens, y: (out.view(-1, 3, 4).flatten(0, 1).index_add_(0, tokens, y), out)[1],
    "then something else": lambda out, tokens, y: out.index_add(0, tokens, y).mul(2).clone(),
}


@pytest.mark.parametrize("name", PUTS)
def test_experts_without_tokens(name: str) -> None:
    experts = nn.ModuleList([Linear(4, 4) for _ in range(4)])
    exact(Made(routed(PUTS[name]), a=Linear(4, 4), experts=experts, b=Linear(4, 2)))


def exits(self: Any, x: Tensor) -> Tensor:
    """Nobody leaves by the first exit."""
    h = self.a(x).mean(1)
    result = h.new_zeros(len(x), 3)
    for k, head in enumerate(self.heads):
        leave = torch.arange(len(x))[torch.full((len(x),), k > 0)]
        result = result.index_copy(0, leave, head(h[leave]))
    return result


def with_nothing(use: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Uses of the sum of an expert's outputs that there are none of."""
    return lambda: Made(
        lambda s, x: s.b(s.a(x)).tanh() + use(s, s.e(s.a(x)[x[..., 0] > 99]).square().sum(0)),
        a=Linear(4, 4), b=Linear(4, 2), e=Linear(4, 2), p=param(2), q=Linear(2, 2),
    )  # fmt: skip


SPARSE: dict[str, Callable[[], nn.Module]] = {
    "an exit that nobody takes": lambda: Made(
        exits, a=Linear(4, 4), heads=nn.ModuleList([Linear(4, 3), Linear(4, 3), Linear(4, 3)])),
    "a sum of nothing": with_nothing(lambda s, none: none + 0 * s.q(s.p)),
    "times a parameter": with_nothing(lambda s, none: none * s.p + 0 * s.q(s.p)),
    "plus a parameter": with_nothing(lambda s, none: (none + s.p).sin() + 0 * s.q(s.p)),
    "plus a parameter, in place": with_nothing(lambda s, none: none.clone().add_(s.p) + 0 * s.q(s.p)),
    "into a layer": with_nothing(lambda s, none: s.q(none) * s.p),
    "into a view": with_nothing(lambda s, none: (none.view(1, 2)[0].mul_(s.p), none + s.q(s.p))[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
def test_nothing_comes_of_nothing(name: str) -> None:
    exact(SPARSE[name]())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_softmax_whose_tails_have_no_width() -> None:
    softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 12, [3, 6], div_value=8.0)
    targets = torch.tensor([0, 4, 7, 11, 2])
    model = Made(lambda s, x: s.s(s.l(x[:, 0]), targets).output, l=Linear(4, 4), s=softmax).double()
    with GradientVariance(model) as variance:
        (-model(X)).mean().backward()

    def alone(i: int) -> Tensor:
        return -softmax(model.l(X[i : i + 1, 0]), targets[i : i + 1]).output.sum()

    assert_equal(variance, reference(alone, [trained(model)], 5))


def experts(choose: Callable[[Tensor], Tensor], change: Callable[[Tensor, Tensor, Tensor], None]) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x).flatten(0, 1)
        chosen, out = choose(h), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            change(out, chosen == number, expert(h[chosen == number]))
        return self.b((h + out).view(x.shape))

    layers = nn.ModuleList([Linear(4, 4) for _ in range(3)])
    return Made(forward, a=Linear(4, 4), experts=layers, b=Linear(4, 2))


def add_at_mask(out: Tensor, mask: Tensor, y: Tensor) -> None:
    out[mask] += y


def add_at_places(out: Tensor, mask: Tensor, y: Tensor) -> None:
    out[mask.nonzero().squeeze(1)] += y


def write_twice(out: Tensor, mask: Tensor, y: Tensor) -> None:
    out[mask] = 0.5
    out[mask] = out[mask] * y


def write_columns(out: Tensor, mask: Tensor, y: Tensor) -> None:
    out[mask, 1:3] += y[:, :2]
    out[mask.unsqueeze(1).expand_as(out)] += y.flatten()


def write_picked(out: Tensor, mask: Tensor, y: Tensor) -> None:
    out[mask, torch.tensor(2)] -= y[:, 0]


CHANGES = [add_at_mask, add_at_places, write_twice, write_columns, write_picked]
CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "all experts": lambda h: (h[:, 0] > 0).long() + (h[:, 1] > 0).long(),
    "not the first": lambda h: (h[:, 0] > 0).long() + 1,
    "not the last": lambda h: (h[:, 0] > 0).long(),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("change", CHANGES)
def test_experts_that_add_where_a_mask_is(change: Callable[[Tensor, Tensor, Tensor], None], name: str) -> None:
    exact(experts(CHOICES[name], change))


def test_parameters_put_where_a_mask_is() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[x[..., 0] > 0] = self.p
        return self.b(out + x)

    exact(Made(forward, p=param(4), b=Linear(4, 2)))


DEFAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mode": lambda h: h.mode().values,
    "mode(-1)": lambda h: h.mode(-1, True).values,
    "mode(1)": lambda h: h.mode(1).values,
    "kthvalue": lambda h: h.kthvalue(2).values,
    "kthvalue(-1)": lambda h: h.kthvalue(2, -1).values,
    "kthvalue(1)": lambda h: h.kthvalue(2, 1).values,
    "median": lambda h: h.median(-1).values,
    "nanmedian": lambda h: h.nanmedian(1, keepdim=True).values,
    "max": lambda h: h.max(1).values,
    "cummax": lambda h: h.cummax(1).values,
    "sort": lambda h: h.sort().values,
    "sort descending": lambda h: h.sort(descending=True).values,
    "sort, stable": lambda h: h.sort(stable=True).values,
    "topk": lambda h: h.topk(2).values,
    "topk(1)": lambda h: h.topk(2, 1).values,
    "argmax": lambda h: h.gather(-1, h.argmax(-1, keepdim=True)),
    "argsort": lambda h: h.gather(-1, h.argsort()),
    "logcumsumexp": lambda h: h.logcumsumexp(-1),
    "glu": lambda h: F.glu(h),
    "glu, other parts": lambda h: F.glu(h[:, :2], 1),
    "cross": lambda h: torch.linalg.cross(h[..., :3], h[..., 1:]),
    "cosine": lambda h: F.cosine_similarity(h, h.flip(-1)),
    "normalized": lambda h: F.normalize(h),
    "stack": lambda h: torch.stack([h[:, 0], h[:, 1]]).transpose(0, 1),
    "cat": lambda h: torch.cat([h[:, 0], h[:, 1]]).view(2, -1, 4).prod(0),
    "unbind": lambda h: h.transpose(0, 1).unbind()[1],
    "split": lambda h: h.transpose(0, 1).split(1)[1].squeeze(0),
    "chunk": lambda h: h.transpose(0, 1).chunk(3)[2].squeeze(0),
    "quantile": lambda h: h.quantile(0.3, -1),
    "aminmax": lambda h: torch.stack(list(h.aminmax(dim=1))).prod(0),
    "std": lambda h: h.std(-1),
    "logsumexp": lambda h: h.logsumexp(1),
    "diff": lambda h: h.diff(),
    "unflatten": lambda h: h.flatten(0, 1).unflatten(0, (-1, 3)),
    "roll": lambda h: h.roll(1, 1),
    "renorm": lambda h: h.renorm(2, 0, 0.5),
    "norm": lambda h: h.norm(dim=-1),
    "trapezoid": lambda h: torch.trapezoid(h),
    "cumsum": lambda h: h.cumsum(-1).cumprod(1),
    "istft": lambda h: torch.istft(
        torch.stft(h.flatten(1), 4, 2, window=torch.ones(4, dtype=h.dtype), return_complex=True) * (1 + 0.5j), 4, 2,
        window=torch.ones(4, dtype=h.dtype)),
    "fold": lambda h: F.fold(h.repeat(1, 4, 1), (3, 3), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_is_what_the_operation_says(name: str) -> None:
    exact(Made(lambda s, x: DEFAULTS[name](s.a(x)).tanh() * s.p, a=Linear(4, 4), p=param(1)))


MANY = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(1)).double()

DISTANCES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rows and centres": lambda s, h: torch.cdist(h.flatten(0, 1), s.few).view(len(h), 7, -1),
    "rows and many centres": lambda s, h: torch.cdist(h.flatten(0, 1), s.many).view(len(h), 7, -1),
    "centres and rows": lambda s, h: torch.cdist(s.many, h.flatten(0, 1)).view(-1, len(h), 7).transpose(0, 1),
    "of each to itself": lambda s, h: torch.cdist(h.repeat(1, 4, 1), h.repeat(1, 4, 1) + 1),
    "of each to centres": lambda s, h: torch.cdist(h.repeat(1, 4, 1), s.many),
    "of each to centres of its own": lambda s, h: torch.cdist(h, s.many.expand(len(h), -1, -1)),
    "by products always": lambda s, h: torch.cdist(h, s.few, compute_mode="use_mm_for_euclid_dist"),
    "a codebook": lambda s, h: s.many[torch.cdist(h.flatten(0, 1), s.many).argmin(-1)].view(h.shape) * h,
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_of_many_rows(name: str) -> None:
    exact(Made(lambda s, x: DISTANCES[name](s, s.a(x)), a=Linear(4, 4), few=param(3, 4), many=param(30, 4)), MANY)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_of_each_examples_own(transposed: bool, dims: int, groups: int) -> None:
    """The examples are folded into the channels, with a group for each, or two."""
    names = {1: (F.conv1d, F.conv_transpose1d), 2: (F.conv2d, F.conv_transpose2d)}
    convolve: Callable[..., Tensor] = names[dims][transposed]
    inputs, outputs, kernel = 4, 6, (2,) * dims

    def forward(self: Any, x: Tensor) -> Tensor:
        m, h = len(x), x.transpose(1, 2).unflatten(2, (-1,) + (1,) * (dims - 1))
        ways = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
        weights = self.w(x.mean(1)).view(m * ways[0], ways[1], *kernel)
        h = F.pad(h, (1, 1) * dims).reshape(1, m * inputs, *(n + 2 for n in h.shape[2:]))
        return convolve(h, weights, self.b(x[:, 0]).flatten(), groups=m * groups).view(m, outputs, -1)

    exact(Made(forward, w=Linear(4, inputs * outputs // groups * 2**dims), b=Linear(4, outputs)))


def slots(write: Callable[[Any, Tensor, Tensor], None], read: Callable[[Tensor], Tensor]) -> nn.Module:
    """A buffer of which some slots are written, each for all examples, and which is read whole."""

    def forward(self: Any, x: Tensor) -> Tensor:
        buffer = torch.zeros(4, len(x), 4, dtype=x.dtype)
        write(self, buffer, x)
        return self.o(read(buffer))

    return Made(forward, a=Linear(4, 4), c=Linear(4, 4), o=Linear(4, 2), p=param(4))


def one_slot(self: Any, buffer: Tensor, x: Tensor) -> None:
    buffer[0] = self.a(x[:, 0]) + self.c(x[:, 1]) * self.p


def middle_slot(self: Any, buffer: Tensor, x: Tensor) -> None:
    buffer[2] = self.a(x[:, 0]) + self.c(x[:, 1])
    buffer[2].mul_(self.p)


def last_slot_after_one_read(self: Any, buffer: Tensor, x: Tensor) -> None:
    buffer[0] = self.a(x[:, 0])
    buffer[3] = self.c(buffer.sum(0)) * self.p


def last_slot_transposed(self: Any, buffer: Tensor, x: Tensor) -> None:
    buffer[1].copy_(self.a(x[:, 0]))
    buffer.transpose(0, 1)[:, 3] = self.c(x[:, 1]) * self.p


WRITES = [one_slot, middle_slot, last_slot_after_one_read, last_slot_transposed]
READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda b: b.mean(0),
    "of some": lambda b: b[:3].sum(0) + b[1:].prod(0),
    "transposed": lambda b: b.transpose(0, 1).exp().sum(1),
    "flattened": lambda b: b.view(-1, 4).view(4, -1, 4)[::2].sum(0) * 2 + b.view(4, -1, 4)[1::2].sum(0),
    "unfolded": lambda b: b.unfold(0, 2, 1).sum((0, 3)),
}


@pytest.mark.parametrize("name", READINGS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:the model was called with")
def test_memory_that_nobody_wrote_to_is_nobodys(write: Callable[[Any, Tensor, Tensor], None], name: str) -> None:
    exact(slots(write, READINGS[name]))


def test_a_layer_on_what_nobody_wrote_to_is_refused() -> None:
    with pytest.raises(RuntimeError, match="rows that are no example's"):
        exact(slots(one_slot, lambda buffer: buffer.transpose(0, 1).tanh()))


@pytest.mark.parametrize("layer", [False, True])
def test_parameters_in_memory_beside_examples_are_refused(layer: bool) -> None:
    def write(self: Any, buffer: Tensor, x: Tensor) -> None:
        buffer[0] = self.a(x[:, 0]) if layer else x[:, 0]
        buffer[1].add_(self.p)

    with pytest.raises((NotImplementedError, RuntimeError), match=r"beside others|rows that are no example's"):
        exact(slots(write, READINGS["mean"]))


def test_parameters_in_memory_before_the_examples_are_refused() -> None:
    def write(self: Any, buffer: Tensor, x: Tensor) -> None:
        buffer[1].add_(self.p)
        buffer[0] = self.a(x[:, 0])

    with pytest.raises(NotImplementedError, match="made of parameters"):
        exact(slots(write, READINGS["mean"]))


def test_more_data_beside_the_examples_is_not_nobodys() -> None:
    model = nn.Sequential(Linear(4, 4), nn.Tanh(), Linear(4, 2)).double()
    data = torch.cat([X, X])
    with GradientVariance(model):
        loss = per(model(data[:5])).mean() + model[0](data).square().mean()
        with pytest.raises(RuntimeError, match="a view of more memory than the examples have"):
            loss.backward()


@pytest.mark.parametrize("penalized", [False, True])
def test_an_auxiliary_loss_of_nothing(penalized: bool) -> None:
    """An expert's own loss when it has no tokens is added like a number, by itself or with a penalty."""
    model = Made(lambda s, x: s.b(s.a(x)), a=Linear(4, 4), b=Linear(4, 2), e=Linear(4, 2)).double()
    with GradientVariance(model) as variance:
        loss = per(model(X)).mean()
        extra = F.relu(model.e(model.a(X)[X[..., 0] > 99])).sum()
        if penalized:
            extra = extra + model.b.weight.square().sum()
        (loss + extra).backward()
    expected = reference(lambda i: per(model(X[i : i + 1])).sum(), [trained(model)], 5)
    torch.testing.assert_close(variance.squared_norms(), expected.squared_norms)


ONLY_ONE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "scatter": lambda s, h, k: torch.zeros_like(h).scatter(0, k.unsqueeze(1).expand(-1, 4), h[k]),
    "scatter_add": lambda s, h, k: torch.zeros_like(h).scatter_add(0, k.unsqueeze(1).expand(-1, 4), h[k]),
    "scatter, columns": lambda s, h, k: torch.zeros_like(h).scatter(1, torch.arange(3).expand(len(k), 3), h[k, :3]),
    "index_add": lambda s, h, k: torch.zeros_like(h).index_add(0, k, h[k]),
    "index_put": lambda s, h, k: torch.zeros_like(h).index_put((k,), h[k]),
    "masked_scatter": lambda s, h, k: torch.zeros_like(h).masked_scatter(F.one_hot(k, len(h)).T.bool(), h[k]),
}


@pytest.mark.parametrize("name", ONLY_ONE)
def test_rows_beside_those_of_a_single_example_are_not_its_own(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(ONLY_ONE[name](self, self.a(x[:, 0]), (x[:, 0, 0] == X[0, 0, 0]).nonzero().flatten()))

    with pytest.raises(RuntimeError, match="rows that are no example's"):
        exact(Made(forward, a=Linear(4, 4), b=Linear(4, 2)))


def test_rows_of_an_example_each_scattered_along_other_dimensions() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        chosen = x.argmax(-1, keepdim=True)
        return self.a(torch.zeros_like(x).scatter(-1, chosen, x.gather(-1, chosen))) * self.p

    exact(Made(forward, a=Linear(4, 4), p=param(4)))
