"""A schedule of batch sizes by examples, with nothing measured.

Schedules put no hook into the model and cost nothing. They count examples, whatever the sizes were before.

    python examples/schedule_only.py
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from cabs import AdaptiveLoader, BatchSizeScheduler, rules  # cabs

# Ten clouds of points in 20 dimensions: which one does a point belong to?
torch.manual_seed(0)
centres, clouds = torch.randn(10, 20), torch.randint(10, (6000,))
dataset = TensorDataset(centres[clouds] + torch.randn(6000, 20), clouds)


def train(rule: rules.Rule) -> None:
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = AdaptiveLoader(dataset, batch_size=16, shuffle=True)  # cabs: in place of DataLoader
    scheduler = BatchSizeScheduler(model, optimizer, loader, rule, min_batch_size=16, max_batch_size=512)  # cabs
    for epoch in range(1, 5):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(loss)  # cabs: sets the size of the next batch
        last = scheduler.last
        print(f"epoch {epoch}: loss {last.loss_average:.3f}, batch size {last.batch_size}")


print("From 6,000 examples on batches of 32, and so on:")
train(rules.Steps("0:16 6k:32 12k:64 18k:128"))

print("Where a cosine over 24,000 examples would make the learning rate smaller, larger batches:")
train(rules.DecayToBatch(partial(CosineAnnealingLR, T_max=100), start=16, every=240))
