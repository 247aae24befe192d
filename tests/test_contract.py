"""The two snippets that everything else leans on, to the letter."""

import pytest
import torch
from torch.utils.data import TensorDataset

from cabs.torch_internals import forward_hooks_of

TRAINING = """
import torch, torch.nn.functional as F
from cabs import CABS, AdaptiveLoader

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = AdaptiveLoader(dataset, batch_size=16)                  # a DataLoader whose batch_size may move
scheduler = CABS(model, optimizer, loader, min_batch_size=16, max_batch_size=2048)

for inputs, targets in loader:
    loss = F.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step(loss)                                         # loader.batch_size is now the next step's
"""

MEASURING = """
from cabs import GradientVariance

with GradientVariance(model, estimator="exact") as variance:     # hooks go in; on leaving they are gone
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
variance.trace()            # tr Σ
variance.squared_norms()    # ‖g_i‖², one per example measured
variance.mean_squared_norm  # ‖g‖²
"""


@pytest.mark.filterwarnings("ignore:the model was being measured already")
def test_the_contract() -> None:
    x, y = torch.randn(300, 6), torch.randint(0, 3, (300,))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    scope = {"model": model, "dataset": TensorDataset(x, y)}
    exec(TRAINING, scope)
    assert scope["scheduler"].last_batch_size == scope["loader"].batch_size
    exec(MEASURING, scope)
    variance = scope["variance"]
    assert variance.trace() > 0
    assert len(variance.squared_norms()) == len(scope["inputs"])
    assert not any(forward_hooks_of(module) for module in model.modules())
