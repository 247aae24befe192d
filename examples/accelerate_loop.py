"""A loop with accelerate and CABS: two lines of it are new.

pip install "torch-cabs[accelerate]"
python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py      # the same sizes
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from cabs.integrations.accelerate import prepare


def rings(examples: int) -> TensorDataset:
    """Points of the plane in three rings."""
    points = 1.5 * torch.randn(examples, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) > 1).long() + (points.norm(dim=1) > 2).long())


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    loader = DataLoader(rings(6000), batch_size=32 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, max_batch_size=512)

    for epoch in range(5):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step(loss)  # before zero_grad
            optimizer.zero_grad()
        last = scheduler.last
        accelerator.print(f"epoch {epoch + 1}: loss {last.loss_average:.3f}, next batch {last.batch_size} examples")
    accelerator.end_training()


if __name__ == "__main__":
    main()
