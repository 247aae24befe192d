"""A run whose end is known.

Told how many examples training will see, CABS takes smaller batches for most of the way (more steps, more noise) and
larger ones towards the end (the noise goes away). The last batch ends just there, without any learning-rate schedule.
Here that ends lower than CABS without a budget. With clouds that overlap more (1.6 * torch.randn) it does not.

    python examples/budget.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader  # cabs

# Ten clouds of points in 20 dimensions: which one does a point belong to?
torch.manual_seed(0)
centres, clouds = torch.randn(10, 20), torch.randint(10, (6000,))
dataset = TensorDataset(centres[clouds] + torch.randn(6000, 20), clouds)
examples = 30_000


def train(budget: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = AdaptiveLoader(dataset, batch_size=16, shuffle=True, stream=True)  # cabs: one epoch runs into the next
    scheduler = CABS(model, optimizer, loader, budget=budget)  # cabs
    fifths = steps = 0
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # cabs
        last, steps = scheduler.last, steps + 1
        if last.examples_total >= (fifths + 1) * examples / 5:
            fifths += 1
            print(f"{last.examples_total:6,} examples: loss {last.loss_average:.3f}, batch size {last.examples}")
        if last.examples_total >= examples:
            break
    with torch.no_grad():
        final = F.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1])
    print(f"after {steps} steps the loss of the whole data is {final:.4f}")


print("CABS as if training never ended:")
train(budget=None)
print(f"CABS with a budget of {examples:,} examples:")
train(budget=examples)
