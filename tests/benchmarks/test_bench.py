"""The benchmark itself: it times what it says, and every contender finds the same trace."""

from __future__ import annotations

import itertools
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cabs
from cabs_bench.contenders import COMPILED, CONTENDERS, OPTIMIZERS, OURS, chosen, installed, quiet
from cabs_bench.measure import as_json, measure, peak_bytes
from cabs_bench.networks import Network, networks
from cabs_bench.report import markdown

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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_its_step_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chosen, "optimizer", name)
    for contender in OURS:
        torch.manual_seed(0)
        model, inputs, targets = TINY.build(), TINY.inputs(8), TINY.targets(8)
        step = CONTENDERS[contender][0](TINY, model)
        step(inputs, targets)
        assert step(inputs, targets) > 0


def test_a_result_and_its_table() -> None:
    result = measure("tiny", TINY, 8, ["plain", "default", "exact"], 0.1, lambda message: None)
    assert result.rounds >= 3
    assert result.time["plain"] == 1.0
    assert result.memory["plain"] == 1.0
    assert result.plain_ms > 0
    table = markdown(as_json([result], "cabs bench"))
    assert "| tiny | 8 |" in table
    assert torch.__version__ in table


def test_microbatches_make_the_same_step_and_measure_it() -> None:
    updates, found = [], []
    for name in ("plain", "plain, in 4 microbatches", "microbatch, in 4 microbatches"):
        torch.manual_seed(0)
        model, inputs, targets = TINY.build(), TINY.inputs(10), TINY.targets(10)
        found.append(CONTENDERS[name][0](TINY, model)(inputs, targets))
        updates.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(updates[1], updates[0])
    torch.testing.assert_close(updates[2], updates[0])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] != pytest.approx(found[0])  # a variance, not a loss


def test_what_microbatches_cost_is_explained() -> None:
    result = measure("tiny", TINY, 8, ["plain", "plain, in 4 microbatches"], 0.0, lambda message: None, 1)
    assert result.rounds == 1
    assert "quotient of *microbatch, in 4 microbatches*" in markdown(as_json([result], "cabs bench"))


def test_a_contender_that_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(network: Network, model: nn.Module) -> None:
        raise TypeError("not this one")

    monkeypatch.setitem(CONTENDERS, "exact", (refuse, None))
    monkeypatch.setitem(CONTENDERS, "paper", (refuse, "a_package_that_nobody_has"))
    results = [measure("tiny", TINY, m, ["plain", "exact", "paper"], 0.0, lambda message: None) for m in (8, 9)]
    for result in results:
        assert result.refused == {"exact": "TypeError: not this one", "paper": "not installed"}
    table = markdown(as_json(results, "cabs bench"))
    assert "- exact on tiny, m = 8, 9: TypeError: not this one" in table
    assert "- paper on tiny, m = 8, 9: not installed" in table


@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("name", ["plain", "exact"])
def test_a_step_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    make = CONTENDERS[name][0]

    def tire(network: Network, model: nn.Module) -> Callable[[Tensor, Tensor], float]:
        step, made = make(network, model), itertools.count()

        def tiring(inputs: Tensor, targets: Tensor) -> float:
            if next(made) >= after:
                raise MemoryError("enough")
            return step(inputs, targets)

        return tiring

    monkeypatch.setitem(CONTENDERS, name, (tire, None))
    monkeypatch.setattr("cabs_bench.measure.REASONABLE", math.inf)  # a busy machine makes a single step of any length
    result = measure("tiny", TINY, 8, ["plain", "exact", "default"], 0.0, lambda message: None)
    assert result.refused == {name: "MemoryError: enough"}
    assert set(result.time) == ({"plain", "default"} if name == "exact" else set())
    assert f"- {name} on tiny, m = 8: MemoryError: enough" in markdown(as_json([result], "cabs bench"))


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


def _bench(*options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cabs", "bench", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **settings)


def test_results_are_written_and_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "bench"
    options = ["--network", "mnist", "--size", "4", "--contender", "exact", "--contender", "plain"]
    options += ["--seconds", "0", "--rounds", "2", "--out", str(out)]
    done = _bench(*options)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.with_suffix(".json").read_text())
    (result,) = report["results"]
    assert (result["network"], result["examples"], result["rounds"]) == ("mnist", 4, 2)
    assert set(result["time"]) == {"plain", "exact"}
    assert "| mnist | 4 | 2 |" in out.with_suffix(".md").read_text()
    again = _bench(*options)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


def test_outside_of_a_checkout_it_says_where_it_is(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(cabs.__file__).parent, tmp_path / "site-packages" / "cabs", ignore=ignored)
    done = _bench("--size", "16", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site-packages")})
    assert (done.returncode, done.stdout) == (1, "")
    assert "benchmarks/ of the repository" in done.stderr
    assert 'pip install -e ".[experiments]"' in done.stderr


def test_trees_are_compared_wherever_they_keep_the_benchmark(tmp_path: Path) -> None:
    """``compare.py`` times this tree beside one of before the benchmark left the package."""
    root = Path(cabs.__file__).parents[2]
    older = tmp_path / "older"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "src", older / "src", ignore=ignored)
    shutil.copytree(root / "benchmarks" / "cabs_bench", older / "src" / "cabs" / "bench", ignore=ignored)
    for path in (older / "src" / "cabs" / "bench").glob("*.py"):
        path.write_text(path.read_text().replace("cabs_bench", "cabs.bench"))
    side = runpy.run_path(str(root / "benchmarks" / "compare.py"))["Side"]
    for tree in (older, root):
        running = side(tree, "mnist", 2, ["exact"])
        try:
            assert running.memory["exact"] >= 1
            assert running.seconds("exact") > 0
        finally:
            running.close()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_networks_are_timed_against_the_compiled_plain_step() -> None:
    network = Network(
        lambda: nn.Sequential(nn.Linear(4, 3)), lambda m: torch.randn(m, 4), lambda m: torch.zeros(m).long()
    )
    result = measure("tiny", network, 16, COMPILED, 0.1, lambda message: None, compiled=True)
    assert set(result.time) == {"plain", "default"}
    assert not result.refused
