"""Compiled models keep their compiled code: a few examples are measured beside it, exactly, or all of it is refused."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from cabs import CABS, AdaptiveLoader, GradientVariance
from cabs.scheduler import auto_every

# What compile's own tracing says of a model that runs in parts, and what inductor imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

FEW, WORDS = 4, 9


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    gc.collect()  # of other tests that took a batch and left, which lets nothing be compiled until they are gone
    torch._dynamo.reset()
    counters.clear()
    yield
    assert torch._dynamo.eval_frame._stance.stance == "default"


class Compiled:
    """A backend that counts: how many graphs were compiled, and how often they were run."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        return aot_autograd(fw_compiler=self._compile, bw_compiler=nop)(graph, inputs)

    def _compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return make_boxed_func(run)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3), nn.Linear(3 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)).flatten(1))


class Words(nn.Module):
    """Tokens in, logits of all positions in one dimension out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout, batch_first=True)
        self.head = nn.Linear(6, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens))).flatten(0, 1)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(torch.tanh(self.inside(x.transpose(0, 1)))).mean(2).transpose(1, 0)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.auxiliary = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.body(x))
        return {"logits": self.head(hidden), "more": (self.auxiliary(hidden), hidden.argmax(1)), "name": "several"}


class Routed(nn.Module):
    """Rows go to one of many experts, of which a few examples reach a few."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0].abs() * 3).long().clamp(max=5) == number
            if bool(rows.any()):
                out = out.index_put((rows.nonzero()[:, 0],), expert(x[rows]))
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return self.head(hidden)


class InParts(nn.Module):
    """Parts of it are compiled, as large models are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def vectors(m: int) -> Tensor:
    return torch.randn(m, 4)


def pixels(m: int) -> Tensor:
    return torch.randn(m, 1, 6, 6)


def tokens(m: int) -> Tensor:
    return torch.randint(0, 7, (m, 3))


def stacked(m: int) -> Tensor:
    return torch.randn(m, 3, 4)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "convolutional": (Convolutional, pixels),
    "sequential": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)), vectors),
    "words": (Words, tokens),
    "time first": (TimeFirst, stacked),
    "several outputs": (Several, vectors),
    "routed": (Routed, vectors),
    "checkpointed": (Checkpointed, vectors),
}


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def its_forward(model: nn.Module, backend: Any) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


WAYS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "compile": lambda model, backend: torch.compile(model, backend=backend),
    "in place": in_place,
    "forward": its_forward,
}


def losses(output: Any) -> Tensor:
    """One for each example, of whatever a model returns."""
    if isinstance(output, dict):
        return losses(output["logits"]) + 0.5 * losses(output["more"][0])
    if output.shape[1] == WORDS:
        output = output.view(-1, 3, WORDS)
    return output.flatten(1).square().sum(1) - output.flatten(1).sum(1)


def expected(model: nn.Module, inputs: Tensor, few: int, loss: Callable[[Any], Tensor] = losses) -> tuple[Tensor, ...]:
    """‖g_i‖² of few examples, evenly spaced, and the mean gradient, by plain autograd on a copy."""
    model, m = copy.deepcopy(model), len(inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    every = range(m) if m <= few else range(0, m // few * few, m // few)

    def square(value: Tensor) -> Tensor:
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        return torch.stack([g.square().sum() for g in found if g is not None]).sum()

    norms = [square(loss(model(inputs[i : i + 1])).sum()) for i in every]
    return torch.stack(norms), square(loss(model(inputs)).mean())


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check(
    variance: GradientVariance,
    plain: nn.Module,
    called: Callable[[Tensor], Any],
    inputs: Tensor,
    loss: Callable[[Any], Tensor] = losses,
    few: int = FEW,
) -> None:
    norms, square = expected(plain, inputs, few, loss)
    variance.reset()
    plain.zero_grad()
    loss(called(inputs)).mean().backward()
    torch.testing.assert_close(variance.squared_norms(), norms)
    torch.testing.assert_close(variance.mean_squared_norm, square)
    torch.testing.assert_close(variance.trace(), norms.mean() - square)
    assert sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None) == pytest.approx(square)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_exact_beside_compiled_code(name: str, way: str) -> None:
    make, inputs = MODELS[name]
    plain, backend = make(), Compiled()
    twin = copy.deepcopy(plain)
    compiled = WAYS[way](plain, backend)
    with GradientVariance(compiled, max_examples=FEW, check_owners=True) as variance:
        for m in (12, 13, 4, 9):
            before = backend.runs
            norms, square = expected(twin, batch := inputs(m), FEW)
            variance.reset()
            plain.zero_grad()
            losses(compiled(batch)).mean().backward()
            assert backend.runs > before
            torch.testing.assert_close(variance.squared_norms(), norms)
            torch.testing.assert_close(variance.mean_squared_norm, square)


@pytest.mark.parametrize("name", ["convolutional", "sequential"])
def test_the_module_may_be_given_instead_of_what_compile_returned(name: str) -> None:
    make, inputs = MODELS[name]
    plain, backend = make(), Compiled()
    compiled = torch.compile(plain, backend=backend)
    compiled(inputs(3))  # and compiled before it is measured
    with GradientVariance(plain, max_examples=FEW) as variance:
        for m in (12, 13):
            check(variance, plain, compiled, inputs(m))


@pytest.mark.parametrize("given", ["compiled", "module"])
def test_one_graph_and_no_recompilation_as_sizes_move(given: str) -> None:
    plain, backend = Convolutional(), Compiled()
    compiled = torch.compile(plain, backend=backend, fullgraph=True)
    with GradientVariance(compiled if given == "compiled" else plain, max_examples=FEW) as variance:
        for step, m in enumerate((8, 9, 12, 13, 20, 31, 8, 5, 64, 7)):
            variance.pause(step % 3 == 2)
            variance.reset()
            losses(compiled(pixels(m))).mean().backward()
    assert backend.graphs <= 2
    assert not counters["graph_break"]


def test_with_inductor() -> None:
    torch.set_default_dtype(torch.float32)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    compiled = torch.compile(plain, dynamic=True)
    with GradientVariance(compiled, max_examples=FEW) as variance:
        for m in (12, 13):
            check(variance, plain, compiled, vectors(m))


def test_parts_that_are_compiled() -> None:
    plain, backend = InParts(), Compiled()
    twin = copy.deepcopy(plain)
    for block in plain.blocks:
        block.compile(backend=backend)
    plain.head = torch.compile(plain.head, backend=backend)
    with GradientVariance(plain, max_examples=FEW) as variance:
        for m in (12, 13):
            norms, square = expected(twin, batch := vectors(m), FEW)
            variance.reset()
            losses(plain(batch)).mean().backward()
            torch.testing.assert_close(variance.squared_norms(), norms)
            torch.testing.assert_close(variance.mean_squared_norm, square)
    assert backend.runs > 0


def test_two_calls_on_the_same_examples() -> None:
    plain = MODELS["sequential"][0]()
    compiled = torch.compile(plain, backend=Compiled())

    def twice(x: Tensor, model: Any = compiled) -> Tensor:
        return model(x) * model(x.flip(1))

    batch = vectors(12)
    with GradientVariance(compiled, max_examples=FEW) as variance:
        losses(twice(batch)).mean().backward()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain

        def forward(self, x: Tensor) -> Tensor:
            return twice(x, self.inner)

    norms, square = expected(Twice(), batch, FEW)
    torch.testing.assert_close(variance.squared_norms(), norms)
    torch.testing.assert_close(variance.mean_squared_norm, square)


def test_weights_and_groups() -> None:
    plain = Convolutional()
    compiled = torch.compile(plain, backend="aot_eager")
    weights = {p: torch.rand_like(p) for p in plain.parameters()}
    groups = [list(plain.first.parameters()), list(plain.last.parameters())]
    with GradientVariance(compiled, max_examples=FEW, weights=weights, groups=groups) as variance:
        batch = pixels(13)
        losses(compiled(batch)).mean().backward()
    scaled = copy.deepcopy(plain)
    found = []
    for i in (0, 3, 6, 9):
        gradients = torch.autograd.grad(losses(scaled(batch[i : i + 1])).sum(), list(scaled.parameters()))
        found.append(sum((w * g.square()).sum() for w, g in zip(weights.values(), gradients, strict=True)))
    torch.testing.assert_close(variance.squared_norms(), torch.stack(found))
    square = sum((w * p.grad.square()).sum() for p, w in weights.items())
    torch.testing.assert_close(variance.mean_squared_norm, square)
    assert len(variance.traces()) == 2


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return losses(self.inner(x)).mean()


class Sideways(nn.Module):
    """Examples are sorted, so that no row of the output is known to be an example's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[x[:, 0].argsort()])


class CheckpointedParts(InParts):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_compiled_parts_whose_activations_are_computed_again() -> None:
    """Compiled code that is run once more in the backward pass has to be the code that was run the first time."""
    plain, backend = CheckpointedParts(), Compiled()
    twin = copy.deepcopy(plain)
    for block in plain.blocks:
        block.compile(backend=backend)
    with GradientVariance(plain, max_examples=FEW) as variance:
        for step, m in enumerate((12, 13, 12)):
            variance.pause(step == 1)
            norms, square = expected(twin, batch := vectors(m), FEW)
            variance.reset()
            with nullcontext() if step else pytest.warns(UserWarning, match="checkpointing"):
                losses(plain(batch)).mean().backward()
            if step != 1:
                torch.testing.assert_close(variance.squared_norms(), norms)
                torch.testing.assert_close(variance.mean_squared_norm, square)
    assert backend.runs > 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (OwnLoss, "its own loss"),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)), "BatchNorm"),
        (Sideways, "in turn along one dimension"),
    ],
)
def test_what_cannot_run_beside_runs_as_plain_python(make: Callable[[], nn.Module], why: str) -> None:
    """And is measured as if it were not compiled, at the same step."""
    plain = make()
    twin, backend = copy.deepcopy(plain), Compiled()
    compiled = torch.compile(plain, backend=backend)
    loss = (lambda value: value.reshape(1)) if make is OwnLoss else losses
    batches = [vectors(12), vectors(13)]
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for model, called in ((compiled, compiled), (twin, twin)):
            with GradientVariance(model, max_examples=FEW) as variance:
                for batch in batches:
                    variance.reset()
                    loss(called(batch)).mean().backward()
                    found.append((variance.squared_norms(), variance.trace()))
    assert sum(why in str(one.message) and "plain Python" in str(one.message) for one in told) == 1
    torch.testing.assert_close(found[:2], found[2:])
    assert backend.runs == 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(7, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embedding(x).mean(1))


@pytest.mark.parametrize("case", ["tied", "penalty", "second root", "hook"])
def test_gradients_from_elsewhere(case: str) -> None:
    """Seen in the backward pass only: that step is not measured, and the next as plain Python."""
    plain = Tied()
    twin, compiled = copy.deepcopy(plain), torch.compile(plain, backend=Compiled())
    if case == "hook":
        for model in (plain, twin):
            model.body.weight.register_hook(lambda gradient: 2 * gradient)
    batches = [tokens(12), tokens(12), tokens(13)]

    def backward(model: Any, batch: Tensor, parameters: Tied) -> None:
        output = model(batch)
        if case == "tied":
            output = output @ parameters.embedding.weight.T[:, :5]
        loss, penalty = losses(output).mean(), parameters.body.weight.square().sum()
        if case == "second root":
            torch.autograd.backward([loss, penalty])
        else:
            (loss + penalty if case == "penalty" else loss).backward()

    found: dict[bool, list[Any]] = {True: [], False: []}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for model, parameters in ((compiled, plain), (twin, twin)):
            with GradientVariance(model, max_examples=FEW) as variance:
                for number, batch in enumerate(batches):
                    variance.reset()
                    backward(model, batch, parameters)
                    if case != "hook" and model is compiled and number == 0:
                        assert variance.unweighed
                        with pytest.raises(RuntimeError, match="could not be measured"):
                            variance.trace()
                    elif number:
                        found[model is compiled].append((variance.trace(), variance.mean_squared_norm))
    assert len([one for one in told if "plain Python" in str(one.message)]) == 1
    torch.testing.assert_close(found[True], found[False])


def test_a_head_that_the_loss_applies() -> None:
    """Its uses are seen as ever, and those of compiled code beside it."""
    plain, head = nn.Linear(4, 6), nn.Linear(6, 5)
    both = nn.ModuleDict({"body": plain, "head": head})
    both["body"] = torch.compile(plain, backend=Compiled())

    class Together(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = plain, head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    batch = vectors(12)
    with GradientVariance(both, max_examples=FEW) as variance:
        losses(head(torch.tanh(both["body"](batch)))).mean().backward()
    norms, square = expected(Together(), batch, FEW)
    torch.testing.assert_close(variance.squared_norms(), norms)
    torch.testing.assert_close(variance.mean_squared_norm, square)


def test_everything_is_measured_as_plain_python() -> None:
    plain, backend = Convolutional(), Compiled()
    compiled = torch.compile(plain, backend=backend)
    with GradientVariance(compiled) as variance:
        check(variance, plain, compiled, pixels(7), few=7)
    assert backend.runs == 0
    compiled(pixels(7))
    assert backend.runs == 1


# -- with a scheduler


def train(make: Callable[[], nn.Module], way: str | None, inputs: Callable[[int], Tensor], **options: Any) -> Any:
    """The sizes, variances and parameters of some steps, compiled in some way or not at all."""
    torch.manual_seed(3)
    plain, backend = make(), Compiled()
    model = plain if way is None else WAYS[way](plain, backend)
    given = plain if options.pop("given", "compiled") == "module" else model
    kind = options.pop("optimizer", torch.optim.SGD)
    optimizer = kind(plain.parameters(), lr=options.pop("lr", 0.05))
    data = torch.utils.data.TensorDataset(inputs(96))
    loader = AdaptiveLoader(data, batch_size=12, shuffle=True, seed=1, **options.pop("loader", {}))
    defaults = {"min_batch_size": 8, "max_batch_size": 32, "max_examples": 4, "measure_every": 2}
    scheduler = CABS(given, optimizer, loader, **(defaults | options))
    pieces, seen = loader.max_microbatch_size is not None, []
    scaler, parts = options.get("grad_scaler"), options.get("accumulation", 1)
    total = 0.0
    for _ in range(3):
        for number, batch in enumerate(loader, start=1):
            if pieces:
                for (x,) in batch:
                    scheduler.backward(losses(model(x)).mean() + 30)
            else:
                loss = (losses(model(batch[0])).mean() + 30) / parts
                (loss if scaler is None else scaler.scale(loss)).backward()
                total += loss.item()
            if number % parts:
                continue
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            scheduler.step() if pieces else scheduler.step(total)
            optimizer.zero_grad()
            total = 0.0
            seen.append((scheduler.last_batch_size, scheduler.last.variance, scheduler.last.gradient_norm_squared))
    scheduler.close()
    return seen, [p.detach() for p in plain.parameters()], backend


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": torch.optim.AdamW, "lr": 0.01},
        {"given": "module"},
        {"accumulation": 2},
        {"loader": {"max_microbatch_size": 5}, "max_examples": 8},
        {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=64.0)},
    ],
    ids=["SGD", "AdamW", "the module given", "accumulation", "microbatches", "scaled"],
)
@pytest.mark.parametrize("name", ["convolutional", "words"])
def test_the_run_is_that_of_the_plain_model(name: str, options: dict[str, Any]) -> None:
    make, inputs = MODELS[name]
    plain, parameters, _ = train(make, None, inputs, **copy.copy(options))
    compiled, compiled_parameters, backend = train(make, "compile", inputs, **copy.copy(options))
    torch.testing.assert_close(compiled, plain, equal_nan=True)
    torch.testing.assert_close(compiled_parameters, parameters)
    # What compile made of a module is not known before it has called the module.
    assert backend.runs >= len(plain) - (options.get("given") == "module")


def test_autocast() -> None:
    torch.set_default_dtype(torch.float32)
    plain = Convolutional()
    found = []
    for model in (torch.compile(plain, backend="aot_eager"), plain):
        with GradientVariance(model, max_examples=FEW) as variance, torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(0)
            losses(model(pixels(12)).float()).mean().backward()
        found.append(variance.trace())
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0.0)


@pytest.mark.filterwarnings("ignore:the compiled model cannot be measured beside its compiled code. it draws random")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_nothing_but_the_sizes_is_changed_by_measuring(dropout: float) -> None:
    """Random numbers, buffers and attributes are those of a run that is not measured."""

    class Counting(Words):
        def __init__(self) -> None:
            super().__init__(dropout)
            self.calls = 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, tokens: Tensor) -> Tensor:
            self.seen += len(tokens)
            return super().forward(tokens)

    def run(measured: bool) -> tuple[list[Tensor], Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        plain = Counting()
        model = torch.compile(plain, backend="eager")
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
        scheduler = CABS(model, optimizer, None, monitor_only=True, measure_every=2) if measured else None
        for _ in range(5):
            loss = losses(model(tokens(12))).mean() + 30
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step(loss)
        return [p.detach() for p in plain.parameters()], plain.seen

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_dropout_is_measured_without_compiled_code() -> None:
    """Masks of a few examples alone would be others than those of the batch."""
    torch.manual_seed(5)
    plain = Words(dropout=0.2)
    compiled, batch = torch.compile(plain, backend="eager"), tokens(12)
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for model in (plain, compiled):
            with GradientVariance(model, max_examples=12) as variance:
                torch.manual_seed(6)
                for _ in range(3):
                    variance.reset()
                    losses(model(batch)).mean().backward()
                    found.append(variance.squared_norms())
    assert sum("it draws random numbers (dropout)" in str(one.message) for one in told) == 1
    torch.testing.assert_close(found[:3], found[3:])


def test_the_default_measures_few_and_seldom() -> None:
    plain, backend = Convolutional(), Compiled()
    model = torch.compile(plain, backend=backend)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    scheduler = CABS(model, optimizer, None, monitor_only=True)
    measured = []
    for _ in range(11):
        loss = losses(model(pixels(64))).mean() + 30
        optimizer.zero_grad()
        loss.backward()
        assert scheduler.variance is not None
        if scheduler.variance._passes:
            assert len(scheduler.variance.squared_norms()) == 8
        optimizer.step()
        scheduler.step(loss)
        assert scheduler.last is not None
        measured.append(scheduler.last.measured)
    assert measured == [step % auto_every(64) == 0 for step in range(11)]
    assert backend.runs == 11


def test_ctrl_c_in_compiled_code_and_beside_it() -> None:
    plain, backend = Convolutional(), Compiled()
    model = torch.compile(plain, backend=backend)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    loader = AdaptiveLoader(torch.utils.data.TensorDataset(pixels(400)), batch_size=12)
    scheduler = CABS(model, optimizer, loader, max_examples=4, measure_every=1)
    stops = {2: "first", 5: "last", 8: "backward"}
    step, done = 0, 0

    class Stop(KeyboardInterrupt):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    for (x,) in loader:
        step += 1
        where = stops.get(step)
        handle = None
        if where in ("first", "last"):
            handle = getattr(plain, where).register_forward_hook(stop)  # only plain Python runs hooks that are new
        try:
            loss = losses(model(x)).mean() + 30
            if where == "backward":
                loss.register_hook(stop)
            loss.backward()
        except Stop:
            optimizer.zero_grad()
            continue
        finally:
            if handle is not None:
                handle.remove()
        optimizer.step()
        assert scheduler.variance is not None
        assert len(scheduler.variance.squared_norms()) == 4
        scheduler.step(loss)
        optimizer.zero_grad()
        done += 1
        if done == 12:
            break
    assert step == 15
    assert backend.graphs <= 2


def test_an_evaluation_in_between_is_compiled() -> None:
    plain, backend = Convolutional(), Compiled()
    model = torch.compile(plain, backend=backend)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    scheduler = CABS(model, optimizer, None, monitor_only=True, measure_every=1)
    for _ in range(3):
        loss = losses(model(pixels(12))).mean() + 30
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        before = backend.runs
        with torch.no_grad():
            model(pixels(12))
        assert backend.runs == before + 1


def test_a_compiled_step_runs_as_plain_python_where_it_is_measured() -> None:
    plain, backend = Convolutional(), Compiled()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    loader = AdaptiveLoader(torch.utils.data.TensorDataset(pixels(200)), batch_size=12)
    scheduler = CABS(plain, optimizer, loader, max_examples=None, measure_every=2)
    whole = torch.compile(lambda x: losses(plain(x)).mean() + 30, backend=backend)
    measured = []
    for (x,) in loader:
        expected_norms, _ = expected(plain, x, len(x))
        before = backend.runs
        loss = whole(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert scheduler.variance is not None
        if scheduler.variance._passes:
            torch.testing.assert_close(scheduler.variance.squared_norms(), expected_norms)
            assert backend.runs == before
        else:
            assert backend.runs > before
        scheduler.step(loss)
        assert scheduler.last is not None
        measured.append(scheduler.last.measured)
    assert measured == [step % 2 == 0 for step in range(len(measured))]


def test_who_is_dropped_in_the_middle_of_a_batch_leaves_compiled_code_alone() -> None:
    model = Convolutional()
    variance = GradientVariance(model).attach()
    losses(model(pixels(6))).mean()  # and no backward pass
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    del variance, model
    gc.collect()
    assert torch._dynamo.eval_frame._stance.stance == "default"
