"""Parts of a model that are called on parameters instead of examples, and data that only look like examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear

from cabs import GradientVariance
from cabs.variance.reference import reference
from compare import assert_equal, trained
from families import Made, param

X = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).double()


def per(output: Tensor) -> Tensor:
    return output.flatten(1).tanh().square().sum(1)


STATES: dict[str, Callable[[Any, int], Tensor]] = {
    "expanded": lambda s, m: s.q(s.st.expand(m, -1)).unsqueeze(1),
    "as it is": lambda s, m: s.q(s.st),
    "as it is, as many as examples": lambda s, m: s.q(s.five).sum(0),
    "of another length": lambda s, m: s.q(s.seven).mean(0),
    "made of others": lambda s, m: s.q((s.st.tanh() * 2).expand(m, -1)).unsqueeze(1),
    "made of a product": lambda s, m: s.q(F.normalize(s.five @ s.square)).sum(0),
    "by its rows": lambda s, m: s.q(s.five[1:4]).sum(0),
}


@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore:the model was called with")
def test_a_part_of_the_model_called_on_parameters(name: str, first: bool, loader: bool) -> None:
    """They hold no examples, however many rows they have, and whether the model was called before or not."""
    model = Made(
        lambda s, x: s.e(x), e=Linear(4, 4), q=Linear(4, 4), st=param(4), five=param(5, 4), seven=param(7, 4),
        square=param(4, 4),
    ).double()  # fmt: skip

    def losses(x: Tensor) -> Tensor:
        state = STATES[name](model, len(x)) if first else None
        output = model(x)
        return per(output * (STATES[name](model, len(x)) if state is None else state))

    measure = GradientVariance(model, check_owners=True)
    measure.attach()
    try:
        for batch in (X.flip(0), X):
            measure.reset()
            model.zero_grad()
            if loader:
                measure.expect(batch, len(batch))
            losses(batch).mean().backward()
        assert_equal(measure, reference(lambda i: losses(X[i : i + 1]).sum(), [trained(model)], 5))
    finally:
        measure.detach()


def shared(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.o((self.a(x) + self.a(positions)).tanh().mean(1))


@pytest.mark.parametrize("sizes", [(4, 5), (3, 5, 4, 5), (6, 5, 5)])
def test_a_shared_tensor_that_was_seen_to_be_none_of_the_examples(sizes: tuple[int, ...]) -> None:
    """It has as many rows as there are examples in some batches."""
    model = Made(shared, a=Linear(4, 4), o=Linear(4, 3)).double()
    positions = torch.randn(5, 4).double()
    measure = GradientVariance(model).attach()
    for size in sizes:
        measure.reset()
        model.zero_grad()
        x = torch.randn(size, 5, 4).double()
        measure.expect({"x": x, "positions": positions}, size)
        per(model(x, positions)).mean().backward()
    measure.detach()
    assert_equal(measure, reference(lambda i: per(model(x[i : i + 1], positions)).sum(), [trained(model)], size))


@pytest.mark.parametrize("loader", [False, True])
def test_a_shared_tensor_in_the_first_batch_is_refused_for_what_it_is(loader: bool) -> None:
    model = Made(shared, a=Linear(4, 4), o=Linear(4, 3)).double()
    batch = {"x": torch.randn(5, 5, 4).double(), "positions": torch.randn(5, 4).double()}
    measure = GradientVariance(model).attach()
    if loader:
        measure.expect(batch, 5)
    loss = per(model(batch["x"], batch["positions"])).mean()
    with pytest.raises(RuntimeError, match=r"tensors of shape \(5, 4\) have as many rows as there are examples"):
        loss.backward()
    measure.detach()
    batch["positions"] = batch["positions"].unsqueeze(0)
    measure = GradientVariance(model).attach()
    if loader:
        measure.expect(batch, 5)
    per(model(batch["x"], batch["positions"])).mean().backward()
    measure.detach()
    assert_equal(
        measure, reference(lambda i: per(model(batch["x"][i : i + 1], batch["positions"])).sum(), [trained(model)], 5)
    )
