"""Compiled models: measured exactly, in ordinary Python; or by microbatches, at full speed."""

import gc
import subprocess
import sys

import pytest
import torch

from cabs import GradientVariance
from cases import CASES, losses
from compare import assert_equal, by_loop

# What compile's own tracing says of a model that runs in parts.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

NAMES = {str(case): case for case in CASES}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    gc.collect()  # measurements that tests left open keep compiled code from being used
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["mlp", "convolutional network", "tied, by module"])
@pytest.mark.parametrize("which", ["given the module", "given what compile returned", "compiled in place"])
def test_exact(name: str, which: str) -> None:
    model, inputs = NAMES[name].make(5)
    expected = by_loop(model, inputs)
    compiled = torch.compile(model, backend="aot_eager") if which != "compiled in place" else model
    if which == "compiled in place":
        model.compile(backend="aot_eager")
    with GradientVariance(compiled if which == "given what compile returned" else model) as variance:
        for _ in range(2):
            variance.reset()
            model.zero_grad()
            losses(compiled(inputs)).mean().backward()
    assert_equal(variance, expected)


@pytest.mark.parametrize("name", ["mlp", "convolutional network"])
def test_microbatch(name: str) -> None:
    model, inputs = NAMES[name].make(6)
    compiled = torch.compile(model, backend="aot_eager")
    with GradientVariance(compiled, "microbatch") as variance:
        for microbatch in inputs.split(1):
            (losses(compiled(microbatch)).sum() / 6).backward()
    torch.testing.assert_close(variance.trace(), by_loop(model, inputs).trace * 6 / 5)


SCRIPT = """
import torch
from torch import nn
from cabs import GradientVariance

model, inputs = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4)
compiled = torch.compile(model, backend="aot_eager")
with GradientVariance(model):
    compiled(inputs).square().mean().backward()
torch._dynamo.reset()
explanation = torch._dynamo.explain(model)(inputs)
assert explanation.graph_count == 1, explanation
assert explanation.graph_break_count == 0, explanation
"""


def test_compiled_code_is_used_again_after_measuring() -> None:
    """In a process of its own: what dynamo remembers of other tests would be in the way."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
