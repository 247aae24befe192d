"""Do other packages find the same squared norms? Ours beside BackPACK's and Opacus's on the models that they support.

    python benchmarks/agreement.py [OUT.md]

In an environment that has them: see README.md beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from cabs import GradientVariance
from cabs_bench.contenders import quiet
from cabs_bench.measure import environment
from cabs_bench.networks import Network, networks

EXAMPLES = 8


def ours(network: Network, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with GradientVariance(model) as variance:
        network.loss(model(inputs), targets).backward()
    return variance.squared_norms()


def backpack(network: Network, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    import backpack
    from backpack.extensions import BatchL2Grad

    model, criterion = backpack.extend(model), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(BatchL2Grad()):
        criterion(model(inputs), targets).backward()
    return sum(p.batch_l2 for p in model.parameters()) * len(inputs) ** 2


def opacus(network: Network, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    from opacus import GradSampleModule

    sampled = GradSampleModule(model, loss_reduction="mean")
    network.loss(sampled(inputs), targets).backward()
    return sum(p.grad_sample.flatten(1).square().sum(1) for p in sampled.parameters())


PEERS: dict[str, Callable[[Network, nn.Module, Tensor, Tensor], Tensor]] = {"BackPACK": backpack, "Opacus": opacus}


def compare(name: str, network: Network, peer: str) -> str:
    """The largest relative difference of an example's squared norm, or why there is none."""
    torch.manual_seed(0)
    model = network.build()
    inputs, targets = network.inputs(EXAMPLES), network.targets(EXAMPLES)
    expected = ours(network, model, inputs, targets)
    model.zero_grad()
    try:
        with quiet():
            theirs = PEERS[peer](network, model, inputs, targets)
    except Exception as error:
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
    return f"{float(((expected - theirs) / theirs).abs().max()):.1e}"


def main() -> None:
    lines = [
        "# Squared norms of single gradients, ours and others'",
        "",
        f"`python benchmarks/agreement.py`, {environment()}, {EXAMPLES} examples, float32.",
        "",
        "The largest relative difference over the examples of a batch:",
        "",
        "| network | " + " | ".join(PEERS) + " |",
        "| --- |" + " --- |" * len(PEERS),
    ]
    for name, network in networks().items():
        cells = [compare(name, network, peer) for peer in PEERS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1])
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
