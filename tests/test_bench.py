"""The benchmark itself: it times what it says, and every contender finds the same trace."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from cabs.bench.contenders import CONTENDERS, installed, quiet
from cabs.bench.measure import as_json, measure, peak_bytes
from cabs.bench.networks import Network, networks
from cabs.bench.report import markdown

TINY = Network(
    lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)),
    lambda m: torch.randn(m, 1, 6, 6),
    lambda m: torch.randint(0, 4, (m,)),
)


def test_exact_contenders_agree() -> None:
    traces = {}
    for name in ("exact", "vmap(grad)", "BackPACK BatchL2Grad", "BackPACK SumGradSquared", "Opacus"):
        if not installed(name):
            continue
        torch.manual_seed(0)
        model, inputs, targets = TINY.build(), TINY.inputs(6), TINY.targets(6)
        with quiet():
            traces[name] = CONTENDERS[name][0](TINY, model)(inputs, targets)
    assert traces == pytest.approx(dict.fromkeys(traces, traces["exact"]), rel=1e-4)


def test_the_authors_way_is_the_estimator_paper() -> None:
    traces = []
    for name in ("paper", "authors' squared convolution"):
        torch.manual_seed(0)
        model, inputs, targets = TINY.build(), TINY.inputs(6), TINY.targets(6)
        traces.append(CONTENDERS[name][0](TINY, model)(inputs, targets))
    assert traces[0] == pytest.approx(traces[1], rel=1e-4)


def test_a_result_and_its_table() -> None:
    result = measure("tiny", TINY, 8, ["plain", "default", "exact"], 0.1, lambda message: None)
    assert result.rounds >= 3
    assert result.time["plain"] == 1.0
    assert result.memory["plain"] == 1.0
    assert result.plain_ms > 0
    table = markdown(as_json([result], "cabs bench"))
    assert "| tiny | 8 |" in table
    assert torch.__version__ in table


def test_a_contender_that_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(network: Network, model: nn.Module) -> None:
        raise TypeError("not this one")

    monkeypatch.setitem(CONTENDERS, "exact", (refuse, None))
    result = measure("tiny", TINY, 8, ["plain", "exact"], 0.0, lambda message: None)
    assert result.refused == {"exact": "TypeError: not this one"}
    assert "exact on tiny: TypeError" in markdown(as_json([result], "cabs bench"))


def test_peaks_are_of_the_size_that_is_allocated() -> None:
    def step() -> None:
        x = torch.empty(1 << 20)
        y = x + 1
        del x, y

    assert peak_bytes(step, nn.Linear(1, 1)) == pytest.approx(8 << 20, rel=0.01)


@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_networks_give_a_loss(name: str) -> None:
    network = networks()[name]
    loss = network.loss(network.build()(network.inputs(2)), network.targets(2))
    assert loss.shape == ()
    assert loss > 0


@pytest.mark.parametrize("option", [["--network", "nonsense"], ["--contender", "nonsense"], ["--out", "nowhere/x"]])
def test_bad_options(option: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "cabs", "bench", *option], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert option[1].split("/")[0] in done.stderr
