"""Every case of the shared list, against the loop over single examples."""

import copy

import pytest
import torch

from cases import CASES, Case, losses
from compare import assert_equal, by_loop, measure


@pytest.mark.parametrize("examples", [2, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_loop(case: Case, examples: int) -> None:
    torch.manual_seed(examples)
    model, inputs = case.make(examples)
    assert_equal(measure(model, inputs, case.dim), by_loop(model, inputs, case.dim))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_loop_in_float32(case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.make(4, torch.float32)
    assert_equal(measure(model, inputs, case.dim), by_loop(model, inputs, case.dim), rtol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_leaves_outputs_and_gradients_as_they_are(case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.make(4)
    plain = copy.deepcopy(model)
    losses(plain(inputs), case.dim).mean().backward()
    measure(model, inputs, case.dim)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14, msg=name)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_some_of_the_examples(case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.make(7)
    variance = measure(model, inputs, case.dim, max_examples=3)
    expected = by_loop(model, inputs, case.dim)
    torch.testing.assert_close(variance.squared_norms(), expected.squared_norms[[0, 2, 4]], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(variance.mean_squared_norm, expected.mean_squared_norm, rtol=1e-10, atol=1e-12)
