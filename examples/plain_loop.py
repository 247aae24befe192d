"""The autopilot in a plain loop with SGD.

Lines marked with "cabs" are all that differs from a loop with a fixed batch size.

    python examples/plain_loop.py
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

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = AdaptiveLoader(dataset, batch_size=16, shuffle=True)  # cabs: in place of DataLoader
scheduler = CABS(model, optimizer, loader, min_batch_size=16, max_batch_size=2048)  # cabs

print(f"starts with batch size {loader.batch_size}")
for epoch in range(1, 4):
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # cabs: sets the size of the next batch
    last = scheduler.last  # the record of the step just made
    print(f"epoch {epoch}: loss {last.loss_average:.3f}, batch size {last.batch_size}")
