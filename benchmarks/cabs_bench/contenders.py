"""Ways to get tr Σ, each as a training step: ours, the paper authors', and those of other packages.

Every contender makes the same step on the mean loss and reads off a number for tr Σ (or the squared norms it
would take), so that all pay for what they deliver. The other packages are no dependencies: whichever is not
installed is listed as such.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cabs.couplings import Coupled, coupling_of
from cabs.scheduler import CABS
from cabs.variance import GradientVariance
from cabs_bench.networks import Network

Step = Callable[[Tensor, Tensor], float]
Maker = Callable[[Network, nn.Module], Step]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.0001),
}
chosen: dict[str, str] = {"optimizer": "sgd"}
"""The optimizer of all contenders."""

COMPILED = ["plain", "default"]
"""Who is timed with compiled networks: others look into the layers."""


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[chosen["optimizer"]](model.parameters())


def plain(network: Network, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """An ordinary step."""
    optimizer = optimizer or _optimizer(model)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = network.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


MICROBATCHES = 4


def in_microbatches(network: Network, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """An ordinary step whose gradient is accumulated over four backward passes, each of a quarter of the batch."""
    optimizer = optimizer or _optimizer(model)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.tensor_split(MICROBATCHES), targets.tensor_split(MICROBATCHES), strict=True):
            loss = network.loss(model(x), y) * (len(x) / len(inputs))
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def microbatch(network: Network, model: nn.Module) -> Step:
    """The same with the estimator that compares such passes."""
    optimizer = _optimizer(model)
    return _measured(in_microbatches(network, model, optimizer), GradientVariance(model, "microbatch"), optimizer)


def ours(estimator: str, max_examples: Any) -> Maker:
    """A step with ``GradientVariance`` attached."""

    def make(network: Network, model: nn.Module) -> Step:
        optimizer = _optimizer(model)
        variance = GradientVariance(model, estimator, max_examples=max_examples)
        return _measured(plain(network, model, optimizer), variance, optimizer)

    return make


def _measured(step: Step, variance: GradientVariance, optimizer: torch.optim.Optimizer) -> Step:
    coupled = Coupled(optimizer, coupling_of(optimizer))
    if coupled.diagonal:
        variance.weigh(coupled.weights, trusted=True)
    variance.attach()

    def measured(inputs: Tensor, targets: Tensor) -> float:
        step(inputs, targets)
        trace = math.nan if variance.unweighed else variance.trace().item()  # before the first step there is no P
        variance.reset()
        return trace

    return measured


def scheduler(network: Network, model: nn.Module) -> Step:
    """A step with the scheduler and its defaults, which measures at some steps and holds the variance at others."""
    optimizer = _optimizer(model)
    autopilot = CABS(model, optimizer, None, monitor_only=True)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = network.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(autopilot.step(loss))

    return step


def squared_convolution(network: Network, model: nn.Module) -> Step:
    """As the paper's authors: the weight gradient again, of squared inputs and squared output gradients."""
    squares: list[Tensor] = []

    def tap(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        x = args[0].detach()

        def hook(delta: Tensor) -> None:
            a, d = x.square(), delta.square()
            if isinstance(layer, nn.Conv2d):
                options = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups)
                mask = [False, True, layer.bias is not None]
                bias = None if layer.bias is None else [layer.out_channels]
                found = torch.ops.aten.convolution_backward(d, a, layer.weight, bias, *options, mask)
                squares.extend(part.sum() for part in found if part is not None)
            else:
                squares.append((d.flatten(0, -2).T @ a.flatten(0, -2)).sum())
                if layer.bias is not None:
                    squares.append(d.sum())

        output.register_hook(hook)

    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(tap)
    step = plain(network, model)

    def measured(inputs: Tensor, targets: Tensor) -> float:
        step(inputs, targets)
        mean_norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        trace = float(torch.stack(squares).sum() * len(inputs) - mean_norm)
        squares.clear()
        return trace

    return measured


def backpack(extension: str) -> Maker:
    """BackPACK: squared norms of single gradients, or the sum of their squares."""

    def make(network: Network, model: nn.Module) -> Step:
        import backpack
        from backpack import extensions

        kind = getattr(extensions, extension)
        model = backpack.extend(model)
        criterion = backpack.extend(nn.CrossEntropyLoss())
        optimizer = _optimizer(model)

        def step(inputs: Tensor, targets: Tensor) -> float:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            with backpack.backpack(kind()):
                loss.backward()
            optimizer.step()
            name = "batch_l2" if extension == "BatchL2Grad" else "sum_grad_squared"
            second_moment = sum(getattr(p, name).sum() for p in model.parameters()) * len(inputs)
            return float(second_moment - sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))

        return step

    return make


def opacus(network: Network, model: nn.Module) -> Step:
    """Opacus: the gradients of single examples."""
    from opacus import GradSampleModule

    sampled = GradSampleModule(model, loss_reduction="mean")
    optimizer = _optimizer(sampled)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = network.loss(sampled(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norms = sum(p.grad_sample.flatten(1).square().sum(1) for p in sampled.parameters())
        mean_norm = sum(p.grad.square().sum() for p in sampled.parameters() if p.grad is not None)
        for p in sampled.parameters():
            p.grad_sample = None
        return float(norms.mean() - mean_norm)

    return step


def vmap(network: Network, model: nn.Module) -> Step:
    """torch.func: vmap over the gradient of one example, 16 examples at a time so that it fits in memory."""
    optimizer = _optimizer(model)
    parameters = dict(model.named_parameters())

    def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return network.loss(torch.func.functional_call(model, values, (x.unsqueeze(0),)), y.unsqueeze(0))

    every = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))

    def step(inputs: Tensor, targets: Tensor) -> float:
        values = {name: p.detach() for name, p in parameters.items()}
        norms = 0.0
        optimizer.zero_grad()
        for x, y in zip(inputs.split(16), targets.split(16), strict=True):
            for name, gradients in every(values, x, y).items():
                norms += gradients.square().sum().item()
                total = gradients.sum(0) / len(inputs)
                p = parameters[name]
                p.grad = total if p.grad is None else p.grad + total
        mean_norm = sum(p.grad.square().sum() for p in parameters.values() if p.grad is not None)
        optimizer.step()
        return float(norms / len(inputs) - mean_norm)

    return step


CONTENDERS: dict[str, tuple[Maker, str | None]] = {
    "plain": (plain, None),
    "default": (scheduler, None),
    "exact": (ours("exact", None), None),
    "paper": (ours("paper", None), None),
    "plain, in 4 microbatches": (in_microbatches, None),
    "microbatch, in 4 microbatches": (microbatch, None),
    "authors' squared convolution": (squared_convolution, None),
    "BackPACK BatchL2Grad": (backpack("BatchL2Grad"), "backpack"),
    "BackPACK SumGradSquared": (backpack("SumGradSquared"), "backpack"),
    "Opacus": (opacus, "opacus"),
    "vmap(grad)": (vmap, None),
}
"""Each contender, and the package it needs."""


OURS = ["plain", "default", "exact", "paper", "plain, in 4 microbatches", "microbatch, in 4 microbatches"]


def installed(name: str) -> bool:
    package = CONTENDERS[name][1]
    return package is None or importlib.util.find_spec(package) is not None


@contextmanager
def quiet() -> Iterator[None]:
    """Other packages' warnings are not ours to show."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
