"""Stop in the middle of an epoch and resume.

Scheduler and loader have states as optimizers do. The resumed run goes on at the same example, with the same sizes.

    python examples/resume.py
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from cabs import CABS, AdaptiveLoader

# Ten clouds of points in 20 dimensions: which one does a point belong to?
torch.manual_seed(0)
centres, clouds = torch.randn(10, 20), torch.randint(10, (6000,))
dataset = TensorDataset(centres[clouds] + torch.randn(6000, 20), clouds)


class Run:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.loader = AdaptiveLoader(dataset, batch_size=16, shuffle=True, stream=True)
        self.scheduler = CABS(self.model, self.optimizer, self.loader)
        self.parts = {"model": self.model, "optimizer": self.optimizer}
        self.parts |= {"scheduler": self.scheduler, "loader": self.loader}  # cabs: two more states

    def train(self, examples: int) -> list[int]:
        """Goes on until all steps together have had so many examples, and says the sizes of those made now."""
        sizes = []
        for inputs, targets in self.loader:
            loss = F.cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
            sizes.append(self.scheduler.last.examples)
            if self.scheduler.last.examples_total >= examples:
                break
        last = self.scheduler.last
        print(f"{last.examples_total:6,} examples: loss {last.loss_average:.3f}, batch size {last.batch_size}")
        return sizes

    def save(self, path: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, path)

    def load(self, path: Path) -> None:
        for name, state in torch.load(path, weights_only=True).items():
            self.parts[name].load_state_dict(state)


with tempfile.TemporaryDirectory() as folder:
    checkpoint = Path(folder, "checkpoint.pt")
    run = Run()
    run.train(9_000)  # an epoch and a half
    run.save(checkpoint)
    print("without a stop:")
    uninterrupted = run.train(15_000)

    print("resumed:")
    run = Run()
    run.load(checkpoint)
    resumed = run.train(15_000)
print(f"{len(resumed)} steps after the stop, and their sizes are the same: {resumed == uninterrupted}")
