"""Several processes share every batch.

The sizes are those that one process would choose: try another number of processes, or `python examples/ddp.py`.

    torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader  # cabs

# Ten clouds of points in 20 dimensions: which one does a point belong to?
torch.manual_seed(0)
centres, clouds = torch.randn(10, 20), torch.randint(10, (6000,))
dataset = TensorDataset(centres[clouds] + torch.randn(6000, 20), clouds)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
if dist.is_torchelastic_launched():  # by torchrun
    dist.init_process_group("gloo")  # on GPUs "nccl", and the model and its inputs go to the process's device
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = AdaptiveLoader(dataset, batch_size=16, shuffle=True)  # cabs: no DistributedSampler, the scheduler shares out
scheduler = CABS(model, optimizer, loader, min_batch_size=16, max_batch_size=2048)  # cabs

for epoch in range(1, 4):
    for inputs, targets in loader:  # this process's share
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # cabs: all processes agree on the next size
    last = scheduler.last
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"epoch {epoch}: loss {last.loss_average:.3f}, batch size {last.batch_size}, shared by {loader.world_size}"
        )

if dist.is_initialized():
    dist.destroy_process_group()
