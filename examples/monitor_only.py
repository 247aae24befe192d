"""Only look: what would the autopilot choose?

The loop keeps torch's DataLoader and its batch size. The noise share, the part of the loss that is gradient noise, says
whether that size fits the learning rate. CABS keeps it at a quarter: well above, larger batches would help, well below,
smaller ones would do.

    python examples/monitor_only.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cabs import CABS  # cabs

# Ten clouds of points in 20 dimensions: which one does a point belong to?
torch.manual_seed(0)
centres, clouds = torch.randn(10, 20), torch.randint(10, (6000,))
dataset = TensorDataset(centres[clouds] + torch.randn(6000, 20), clouds)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=20, shuffle=True)
scheduler = CABS(model, optimizer, loader, monitor_only=True)  # cabs

for epoch in range(1, 4):
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # cabs: measures, and leaves the loader alone
    last = scheduler.last
    print(
        f"epoch {epoch} in batches of {loader.batch_size}: loss {last.loss_average:.3f}, "
        f"noise share {last.noise_share:.2f}, CABS would take batch size {last.batch_size}"
    )
