"""Which optimizers are taken and how they are read, and what is said of the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from twin import KINDS, data, network

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, GradientVariance, couplings, rules
from cabs.couplings import Coupled, Coupling, coupling_of, register_coupling
from cabs.couplings.registry import COUPLINGS


class Loop:
    """A small training loop."""

    def __init__(self, optimizer: Any, rule: rules.Rule | None = None, model: nn.Module | None = None, **options: Any):
        self.model = network() if model is None else model
        self.optimizer = optimizer(self.model.parameters())
        self.loader = AdaptiveLoader(data(), batch_size=8, stream=True)
        bounds = {"min_batch_size": 2, "max_batch_size": 100}
        rule = rules.CABS(noise_share=0.004) if rule is None else rule
        self.scheduler = BatchSizeScheduler(
            self.model,
            self.optimizer,
            self.loader,
            rule,
            **{**bounds, **options},  # type: ignore[arg-type]
        )

    def step(self, count: int = 1) -> Any:
        for _, (inputs, targets) in zip(range(count), self.loader, strict=False):
            loss = F.cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
        return self.scheduler.last


def adam(parameters: Any, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, **{"lr": 0.01, **options})


# -- which is taken


class Slower(torch.optim.AdamW):
    """A subclass."""


class Signs(torch.optim.Optimizer):
    """An optimizer of one's own: w − lr g / (√v + ε), v the last square."""

    def __init__(self, parameters: Any, lr: float = 0.01, eps: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p]["v"] = p.grad.square()
                p.sub_(group["lr"] * p.grad / (v.sqrt() + group["eps"]))


def test_found_by_class() -> None:
    for kind in KINDS.values():
        parameters = list(network().parameters())
        assert coupling_of(kind.make(parameters, **kind.options)) is not None
    assert isinstance(coupling_of(Slower(network().parameters())), couplings.Adam)
    assert type(coupling_of(torch.optim.NAdam(network().parameters()))) is couplings.NAdam
    assert coupling_of(Signs(network().parameters())) is None


@pytest.mark.parametrize("name", ["Adadelta", "Adafactor", "ASGD", "LBFGS", "Muon", "Rprop", "SparseAdam"])
def test_refused_by_name_with_the_ways_out(name: str) -> None:
    model = nn.Linear(8, 3, bias=False).double()
    with pytest.raises(ValueError, match=f"{name} .*coupling=.*register_coupling.*assume_sgd"):
        Loop(getattr(torch.optim, name), model=model)


def test_one_of_your_own_in_five_lines() -> None:
    with pytest.raises(ValueError, match="Signs is not known"):
        Loop(Signs)
    try:

        @register_coupling(Signs)
        class OfSigns(Coupling):
            def weights(self, group: Any, state: Any) -> Tensor | None:
                return 1 / (state["v"].sqrt() + group["eps"]) if state else None

        loop = Loop(Signs, max_examples=None, measure_every=1)
        loop.step(3)
        assert loop.step().variance > 0
    finally:
        del COUPLINGS[Signs]
    by_hand = Loop(Signs, coupling=OfSigns(), max_examples=None, measure_every=1)
    by_hand.step(3)
    assert by_hand.step() == loop.scheduler.last
    with pytest.raises(TypeError, match="no coupling"):
        register_coupling(Signs)(dict)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="classes of optimizers"):
        register_coupling(Signs(network().parameters()))  # type: ignore[arg-type]


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer around another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_wrappers_are_looked_into() -> None:
    inside = Loop(adam)
    outside = Loop(lambda parameters: Wrapper(Wrapper(adam(parameters))))
    assert inside.step(8) == outside.step(8)


def test_another_coupling_than_the_class_has() -> None:
    assumed, told, own = (
        Loop(adam, max_examples=None, measure_every=1, **options)
        for options in ({"assume_sgd": True}, {"coupling": couplings.AssumedSGD()}, {})
    )
    first, second, third = (loop.step(4) for loop in (assumed, told, own))
    assert first == second
    assert third.variance > 10 * first.variance


# -- α and P


@pytest.mark.parametrize("variant", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_however_the_step_is_computed(kind: Any, variant: dict[str, bool]) -> None:
    read = []
    for options in ({}, variant):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))]
        optimizer = kind(parameters, lr=torch.tensor(0.01) if "maximize" in options else 0.01, **options)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
        coupled = Coupled(optimizer, coupling_of(optimizer))
        weights = [coupled.weights(p) for p in parameters] if coupled.diagonal else []
        read.append((coupled.alphas(), weights))
    assert read[0][0] == pytest.approx(read[1][0])
    torch.testing.assert_close(read[0][1], read[1][1])


def test_the_step_is_alpha_times_the_weights_times_an_average_with_unit_gain() -> None:
    """With the same gradient at every step, all of them move by α P g, once their averages have forgotten the start."""
    for name, kind in KINDS.items():
        w = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        g = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.1], dtype=torch.float64)
        about = {"centered": False} if "centered" in kind.options else {}  # about its mean, nothing is left of it
        optimizer = kind.make([w], **{**kind.options, **about, "weight_decay": 0})
        for _ in range(400):
            before, w.grad = w.detach().clone(), g.clone()
            optimizer.step()
        coupled = Coupled(optimizer, coupling_of(optimizer))
        weights = coupled.weights(w) if coupled.diagonal else torch.ones(5)
        moved = before - w.detach()
        torch.testing.assert_close(moved, coupled.alphas()[0] * weights * g, rtol=1e-3, atol=0, msg=name)


def test_half_precision_and_elements_that_never_had_a_gradient() -> None:
    p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = adam([p])
    p.grad = torch.tensor([1.0, 0.0, -2.0], dtype=torch.bfloat16)
    optimizer.step()
    weights = Coupled(optimizer, coupling_of(optimizer)).weights(p)
    assert weights is not None
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([1.0, 0.0, 0.5], rel=0.02)


def test_parameters_that_made_fewer_steps() -> None:
    """α of a group is one number; where parameters differ in theirs, the rest is in P."""
    for kind, options in ((torch.optim.Adagrad, {"lr_decay": 0.5}), (torch.optim.RAdam, {"betas": (0.9, 0.9)})):
        often, seldom = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        optimizer = kind([often, seldom], lr=0.1, **options)  # type: ignore[operator]
        for step in range(40):
            often.grad = torch.ones(2)
            seldom.grad = torch.ones(2) if step % 2 else None
            optimizer.step()
        coupling = coupling_of(optimizer)
        assert coupling is not None
        coupled, group = Coupled(optimizer, coupling), optimizer.param_groups[0]
        for p in (often, seldom):
            whole = coupling.alpha(group, optimizer.state[p]) * coupling.weights(group, optimizer.state[p])  # type: ignore[operator]
            torch.testing.assert_close(coupled.alphas()[0] * coupled.weights(p), whole)  # type: ignore[operator]


def test_learning_rate_schedules_are_followed() -> None:
    loop = Loop(adam, max_examples=None, measure_every=1)
    loop.step(5)
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.0
    assert (loop.step().raw_batch_size, loop.step().batch_size) == (0.0, 2)


# -- no state yet, and other mishaps


def test_before_the_first_step_the_size_stays() -> None:
    loop = Loop(adam, max_examples=None, measure_every=1)
    first = loop.step()
    assert (first.batch_size, first.examples, first.examples_total, first.measured) == (8, 8, 8, False)
    assert math.isnan(first.variance)
    assert math.isnan(first.noise_share)
    assert loop.scheduler.state_dict()["averages"] is None
    second = loop.step()
    assert second.measured
    assert second.loss_average == pytest.approx(second.loss)
    assert second.noise_share == pytest.approx(0.004 * second.raw_batch_size / second.examples)


class Late(nn.Module):
    """One of its layers has nothing to do at first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 3).double(), nn.Linear(8, 3).double()
        self.both = False

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x) if self.both else self.one(x)


def test_a_parameter_without_state_makes_a_step_unmeasured_once() -> None:
    model = Late()
    loop = Loop(adam, model=model, max_examples=None, measure_every=1)
    loop.step(4)
    before = loop.scheduler.last
    model.both = True
    assert before is not None
    assert (kept := loop.step()).batch_size == before.batch_size
    assert not kept.measured
    assert kept.variance == before.variance
    assert loop.step().measured


def test_by_default_some_examples_at_every_tenth_step_of_few() -> None:
    loop = Loop(adam)
    assert [loop.step().measured for _ in range(13)] == [False, True, *[False] * 9, True, False]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=1.0), "momentum is 1"),
        (lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=1.0), "momentum is 1"),
    ],
)
def test_an_average_that_never_forgets(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Loop(make)


@pytest.mark.parametrize(("place", "betas"), [(0, (1.0, 0.9)), (1, (0.9, 1.0))])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax])
def test_betas_of_one(kind: Any, place: int, betas: tuple[float, float]) -> None:
    loop = Loop(kind, max_examples=None, measure_every=1)
    loop.step(3)
    size = loop.scheduler.last_batch_size
    loop.optimizer.param_groups[0]["betas"] = betas
    loop.optimizer.step = lambda: loop.scheduler._observer.note_step()  # which itself would divide by zero
    with pytest.raises(ValueError, match=rf"betas\[{place}\] is 1"):
        loop.step()
    assert loop.scheduler.last_batch_size == size


def test_smoothing_of_one() -> None:
    loop = Loop(lambda p: torch.optim.RMSprop(p, lr=0.01), max_examples=None, measure_every=1)
    loop.step(2)
    loop.optimizer.param_groups[0]["alpha"] = 1.0
    with pytest.raises(ValueError, match="alpha is 1"):
        loop.step()


def test_an_optimizer_swapped_in() -> None:
    loop = Loop(adam, max_examples=None, measure_every=1)
    loop.step(3)
    with pytest.raises(AttributeError):
        loop.scheduler.optimizer = adam(loop.model.parameters())
    other = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.optimizer = other
    with pytest.warns(UserWarning, match="pass the optimizer that you step with"):
        loop.step()
    # What is meant: a new scheduler, which takes over the old one's averages.
    state = loop.scheduler.state_dict()
    loop.scheduler.close()
    scheduler = BatchSizeScheduler(loop.model, other, loop.loader, loop.scheduler.rule, min_batch_size=2)
    scheduler.load_state_dict(state)
    loop.scheduler = scheduler
    assert loop.step().measured


def test_wrong_weights_of_a_coupling_of_your_own() -> None:
    class Wrong(Coupling):
        def __init__(self, wrong: float | None) -> None:
            self.wrong = wrong

        def weights(self, group: Any, state: Any) -> Tensor | None:
            if not state:
                return None
            return torch.ones(2) if self.wrong is None else torch.full_like(state["momentum_buffer"], self.wrong)

    for wrong, words in ((-1.0, "at least 0"), (math.nan, "finite"), (None, r"have shape \(2,\)")):
        loop = Loop(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), coupling=Wrong(wrong))
        assert not loop.step().measured
        with pytest.raises(ValueError, match=words):
            loop.step()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


def test_complex_parameters() -> None:
    plain = Loop(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), model=Complex(), max_examples=None)
    assert plain.step(2).variance > 0
    loop = Loop(adam, model=Complex(), max_examples=None, measure_every=1)
    loop.step()
    with pytest.raises(NotImplementedError, match="real and the imaginary part"):
        loop.step()


# -- rules


def test_rules_that_do_not_go_by_the_step_take_any_optimizer() -> None:
    plain, rprop = (
        Loop(kind, rules.NormTest(0.8), max_examples=None, measure_every=1) for kind in (adam, torch.optim.Rprop)
    )
    assert math.isnan(plain.step(2).noise_share)
    assert plain.scheduler.last is not None
    assert plain.scheduler.last.measured
    assert math.isnan(rprop.step(2).noise_share)
    momentum = Loop(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), rules.NormTest(0.8), max_examples=None)
    last = momentum.step()
    assert last.noise_share == pytest.approx(0.1 * last.variance / (4 * last.examples * last.loss))


def test_gain_per_cost_goes_by_the_step() -> None:
    loop = Loop(adam, rules.GainPerCost(lipschitz=2.0), max_examples=None, measure_every=1)
    before = loop.step()
    assert math.isnan(before.variance)
    coupled = Coupled(loop.optimizer, coupling_of(loop.optimizer))
    weights = {p: coupled.weights(p).clone() for p in loop.model.parameters()}  # type: ignore[union-attr]
    model, (inputs, targets) = loop.model, data().tensors
    model.zero_grad()
    last = None
    loop.scheduler.variance.detach()  # type: ignore[union-attr]
    with GradientVariance(model, weights=weights) as variance:
        F.cross_entropy(model(inputs[8:16]), targets[8:16]).backward()
    loop.scheduler.variance.attach()  # type: ignore[union-attr]
    loop.optimizer.zero_grad()
    last = loop.step()
    assert last.variance == pytest.approx(variance.trace().item())
    assert last.gradient_norm_squared == pytest.approx(variance.mean_squared_norm.item())


def test_only_looking() -> None:
    x, y = data().tensors
    model = network()
    optimizer = adam(model.parameters())
    watcher = CABS(model, optimizer, None, monitor_only=True, max_examples=None, measure_every=1)
    for _ in range(3):
        loss = F.cross_entropy(model(x[:20]), y[:20])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watcher.step(loss)
    assert watcher.last is not None
    assert watcher.last.noise_share > 0


def test_clipping_and_other_gradients_do_not_disturb() -> None:
    """What is measured is of the examples; P is the optimizer's, whatever it was given. Nor do passes on the side."""
    x, y = data().tensors
    loader = AdaptiveLoader(TensorDataset(x, y), batch_size=12, stream=True)
    model = network()
    optimizer = adam(model.parameters())
    scheduler = CABS(model, optimizer, loader, max_examples=None, measure_every=1, min_batch_size=12, max_batch_size=12)
    weights: dict[Tensor, Tensor] = {}
    for number, (inputs, targets) in zip(range(3), loader, strict=False):
        loss = F.cross_entropy(model(inputs), targets)
        if number == 2:
            gradients = [
                torch.autograd.grad(F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]), list(weights))
                for i in range(12)
            ]
            expected = sum(
                (weights[p] * (g.square().mean(0) - g.mean(0).square())).sum().item()
                for p, g in zip(weights, map(torch.stack, zip(*gradients, strict=True)), strict=True)
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        scheduler.step(loss)
        coupled = Coupled(optimizer, coupling_of(optimizer))
        weights = weights if number == 2 else {p: coupled.weights(p) for p in model.parameters()}  # type: ignore[misc]
    assert scheduler.last is not None
    assert scheduler.last.variance == pytest.approx(expected)


def test_rules_and_bounds_may_be_moved() -> None:
    loop = Loop(adam, max_examples=None, measure_every=1)
    loop.step(3)
    loop.scheduler.rule = rules.CABS(noise_share=1e-6)
    loop.scheduler.max_batch_size = 50
    assert loop.step().batch_size == 50
