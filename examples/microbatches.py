"""Batches larger than memory come in microbatches.

The loader never hands out more than 32 examples at a time. Steps, losses and batch sizes are those of whole batches.

    python examples/microbatches.py
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = AdaptiveLoader(dataset, batch_size=16, shuffle=True, drop_last=True, max_microbatch_size=32)  # cabs
scheduler = CABS(model, optimizer, loader, min_batch_size=16, max_batch_size=2048)  # cabs

for epoch in range(1, 4):
    for batch in loader:  # cabs: a batch is a sequence of microbatches
        optimizer.zero_grad()
        sizes = []
        for inputs, targets in batch:
            loss = F.cross_entropy(model(inputs), targets)
            scheduler.backward(loss)  # cabs: in place of loss.backward(); weighs the microbatch by its examples
            sizes.append(len(inputs))
        optimizer.step()
        scheduler.step()  # cabs: knows the losses already
    last = scheduler.last
    print(
        f"epoch {epoch}: loss {last.loss_average:.3f}, "
        f"a batch of {last.examples} as {sizes}, next batch size {last.batch_size}"
    )
