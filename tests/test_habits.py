"""What people do in notebooks and around training: cells run twice, models copied, saved and moved, things printed."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler, GradientVariance, rules


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 1, 6, 6, generator=generator), torch.randint(0, 5, (64,), generator=generator))


class Run:
    """A model in training, made as in a notebook."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = network() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=options.pop("momentum", 0.0))
        self.loader = AdaptiveLoader(dataset(), batch_size=8, shuffle=True, seed=1, stream=True)
        self.options = {"min_batch_size": 4, "measure_every": 1, **options}
        self.scheduler = CABS(self.model, self.optimizer, self.loader, **self.options)

    def steps(self, count: int, between: Callable[[], Any] = lambda: None) -> list[int]:
        """The sizes of some steps; ``between`` is called with a batch taken and its backward pass made."""
        for _, (x, y) in zip(range(count), self.loader, strict=False):
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            between()
            loss.backward()
            between()
            self.optimizer.step()
            self.scheduler.step(loss)
        return [self.scheduler.last_batch_size, self.scheduler.last.examples_total, self.scheduler.last.variance]


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "a schedule"])
def test_a_cell_that_is_run_again(measured: bool) -> None:
    """The new scheduler takes over wherever the old one was, which says so if it is used."""
    run = Run(keep_half_lives=16, momentum=0.9)
    if not measured:
        run.scheduler.close()
        run.scheduler = BatchSizeScheduler(run.model, run.optimizer, run.loader, rules.Constant(8), min_batch_size=4)
    run.steps(3)
    old = run.scheduler
    rule = rules.CABS() if measured else rules.Constant(16)
    with pytest.warns(UserWarning, match="already: the new scheduler takes over"):
        run.scheduler = BatchSizeScheduler(run.model, run.optimizer, run.loader, rule, **run.options)
    assert run.optimizer.param_groups[0]["momentum"] == 0.9  # as it was before the old one moved it
    run.steps(3)
    with pytest.raises(RuntimeError, match="closed, by close\\(\\) or by one that was made after it"):
        old.step(1.0)
    run.scheduler.close()
    assert run.optimizer.param_groups[0]["momentum"] == 0.9


def test_a_cell_that_cannot_be_run_leaves_the_old_scheduler_alone() -> None:
    run = Run()
    with pytest.raises(ValueError, match="smoothing"):
        CABS(run.model, run.optimizer, run.loader, smoothing=2.0)
    run.steps(2)


def test_a_schedule_and_a_monitor_go_together() -> None:
    run = Run()
    run.scheduler.close()
    schedule = BatchSizeScheduler(run.model, run.optimizer, run.loader, rules.Constant(8), min_batch_size=4)
    monitor = CABS(run.model, run.optimizer, None, monitor_only=True)
    for _, (x, y) in zip(range(3), run.loader, strict=False):
        loss = F.cross_entropy(run.model(x), y)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        schedule.step(loss)
        monitor.step(loss)
    assert monitor.last is not None
    assert monitor.last.examples_total == 24


def test_a_batch_that_is_taken_and_not_stepped_on() -> None:
    """`next(iter(loader))` to have a look, as people do."""
    looked, plain = Run(), Run()
    looked.steps(2)
    next(iter(looked.loader))
    looked.steps(3)
    plain.steps(5)
    assert looked.scheduler.last is not None
    assert plain.scheduler.last is not None
    assert looked.scheduler.last.measured


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_model_are_free(way: str) -> None:
    """In the middle of a batch, too; they compute the same, can be trained, and are not measured."""
    run, copies = Run(), list[nn.Module]()
    state = run.steps(4, lambda: copies.append(COPIES[way](run.model)))
    assert state == Run().steps(4)  # the copying is not noticed
    made = copies[-1]
    for module in made.modules():
        assert not any(type(hook).__module__.startswith("cabs") for hook in module._forward_hooks.values())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in made.parameters())
    inputs = torch.randn(5, 1, 6, 6)
    made.load_state_dict(run.model.state_dict())
    torch.testing.assert_close(made(inputs), run.model(inputs))
    made(inputs).sum().backward()
    other = Run(made)
    other.steps(2)
    run.steps(2)


def test_a_copy_that_runs_along_is_not_measured() -> None:
    """A teacher, or an average of weights, on the same batch."""
    run = Run()
    teacher = copy.deepcopy(run.model)
    for _, (x, y) in zip(range(3), run.loader, strict=False):
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        output = run.model(x)
        loss = F.cross_entropy(output, y) + F.cross_entropy(output, wanted)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        run.scheduler.step(loss)
        assert all(p.grad is None for p in teacher.parameters())


SAVES = """
import io, sys, torch
from torch import nn
from cabs import GradientVariance
model = nn.Linear(2, 1)
GradientVariance(model).attach()
torch.save(model, sys.argv[1])
"""
LOADS = """
import sys
class Refused:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "cabs":
            raise ImportError("not installed here")
sys.meta_path.insert(0, Refused())
import torch
assert torch.load(sys.argv[1], weights_only=False)(torch.ones(3, 2)).shape == (3, 1)
"""


@pytest.mark.slow
def test_a_model_that_was_saved_whole_loads_where_cabs_is_not_installed(tmp_path: Any) -> None:
    for script in (SAVES, LOADS):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "model.pt")], check=True, timeout=120)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_of_a_loader_are_free(way: Callable[[AdaptiveLoader], AdaptiveLoader]) -> None:
    run = Run()
    run.steps(3)
    again = way(run.loader)
    assert again.on_delivery is None
    assert again.state_dict() == run.loader.state_dict()
    again.batch_size = 5
    assert run.loader.batch_size == run.scheduler.last_batch_size
    taken = [next(iter(loader)) for loader in (again, run.loader)]
    torch.testing.assert_close(taken[0][0][:4], taken[1][0][:4])
    run.steps(2)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_scheduler_is_not_copied_but_its_state_is(way: Callable[[Any], Any]) -> None:
    run = Run()
    run.steps(3)
    with pytest.raises(TypeError, match=r"CABS cannot be copied or pickled.*state_dict\(\)"):
        way(run.scheduler)
    with pytest.raises(TypeError, match="GradientVariance cannot be copied"):
        way(run.scheduler.variance)
    twin = Run(copy.deepcopy(run.model))
    twin.scheduler.load_state_dict(copy.deepcopy(run.scheduler.state_dict()))
    twin.loader.load_state_dict(run.loader.state_dict())
    assert twin.steps(3) == run.steps(3)


RULES: list[rules.Rule] = [
    rules.CABS(), rules.CABS(budget=1000), rules.NormTest(0.8), rules.GainPerCost(0.5), rules.NoiseScale(),
    rules.InnerProductTest(0.5, 1.0), rules.Constant(7), rules.Steps("0:5 20:9"), rules.Ramp(4, 30, 90),
    rules.Geometric(4, 2, 30), rules.OnPlateau(4, 2, 20),
    rules.Sequential([rules.Constant(5), rules.Repeat(rules.Ramp(4, 12, 30, "cosine"), 30)], [25]),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_say_what_they_are_and_can_be_copied(rule: rules.Rule) -> None:
    assert repr(rule).startswith(f"{type(rule).__name__}(")
    assert " object at 0x" not in repr(rule)
    assert repr(copy.deepcopy(rule)) == repr(pickle.loads(pickle.dumps(rule))) == repr(rule)


def test_what_is_printed_says_what_it_is() -> None:
    run = Run()
    run.steps(2)
    assert "CABS(" in repr(run.scheduler)
    assert "sizes 4 to 2048" in repr(run.scheduler)
    assert f"next {run.scheduler.last_batch_size}" in repr(run.scheduler)
    assert repr(run.loader).startswith("<AdaptiveLoader: 64 examples, shuffled, next batch ")
    assert repr(run.scheduler.variance) == "<GradientVariance: exact, measuring Sequential>"
    assert repr(run.scheduler.last).startswith("Step(examples=")
    run.scheduler.close()
    assert "closed" in repr(run.scheduler)
    assert "not measuring" in repr(GradientVariance(run.model))


def test_signatures_are_real() -> None:
    """What editors show: every argument by its name, with its kind and default, and nothing hidden in ``**``."""
    general = inspect.signature(BatchSizeScheduler).parameters
    particular = inspect.signature(CABS).parameters
    for parameters in (general, particular, inspect.signature(AdaptiveLoader).parameters):
        assert all(p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
        assert all(p.annotation is not p.empty for p in parameters.values())
    assert set(general) - {"rule"} <= set(particular)
    for name in set(general) & set(particular):
        assert particular[name].default == general[name].default


def test_a_model_that_is_moved_after_the_scheduler_is_made() -> None:
    run = Run()
    run.steps(2)
    run.model.double()
    x, y = next(iter(run.loader))
    loss = F.cross_entropy(run.model(x.double()), y)
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    run.scheduler.step(loss)
    assert run.scheduler.last is not None
    assert run.scheduler.last.measured


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated, by another kind of warning in torch 2.15
def test_scripted_and_exported() -> None:
    run = Run()
    run.steps(1)
    inputs = torch.randn(3, 1, 6, 6)
    exported = torch.export.export(run.model, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), run.model(inputs))
    with pytest.raises(AttributeError, match=r"cannot be scripted: close\(\) the scheduler first"):
        torch.jit.script(run.model)
    run.scheduler.close()
    torch.testing.assert_close(torch.jit.script(run.model)(inputs), run.model(inputs))
