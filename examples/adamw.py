"""The autopilot with AdamW.

AdamW divides each gradient by √v, which it averages itself. The scheduler reads this from the optimizer's state and
measures the variance of the step that AdamW makes: m = α·tr(PΣ)/F with P = 1/√v. Parameter groups work as always.

    python examples/adamw.py
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

model = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() <= 1]  # biases and norms: no weight decay
optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3)
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
    last = scheduler.last
    print(f"epoch {epoch}: loss {last.loss_average:.3f}, batch size {last.batch_size}")
