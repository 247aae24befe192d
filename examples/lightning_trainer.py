"""Lightning with a batch size that moves at every step: one callback, and everything else as always.

pip install "torch-cabs[lightning]"
python examples/lightning_trainer.py
"""

from __future__ import annotations

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cabs.integrations.lightning import CABSCallback


def spirals(examples: int) -> TensorDataset:
    """Three arms of a spiral, with some noise."""
    arms = torch.randint(0, 3, (examples,))
    along = torch.rand(examples)
    angle = 4 * along + arms * 2 * torch.pi / 3 + 0.3 * torch.randn(examples)
    return TensorDataset(torch.stack([along * angle.cos(), along * angle.sin()], dim=1), arms)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, points: Tensor) -> Tensor:
        return self.net(points)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, arms = batch
        return F.cross_entropy(self(points), arms)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points, arms = batch
        self.log("accuracy", (self(points).argmax(dim=1) == arms).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Report(lightning.Callback):
    """Prints a line after every validation."""

    def __init__(self, autopilot: CABSCallback) -> None:
        self.autopilot = autopilot

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        scheduler = self.autopilot.scheduler
        if scheduler is not None and scheduler.last is not None:
            last, accuracy = scheduler.last, float(trainer.callback_metrics["accuracy"])
            print(f"{last.examples_total:6,} examples: next batch {last.batch_size:4}, accuracy {accuracy:.1%}")


def main() -> None:
    torch.set_num_threads(1)  # the network is tiny
    lightning.seed_everything(0)
    autopilot = CABSCallback(min_batch_size=8, max_batch_size=512)
    trainer = lightning.Trainer(
        max_epochs=4,
        callbacks=[autopilot, Report(autopilot)],
        val_check_interval=0.5,  # of the epoch's examples
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, held_out = spirals(6000), spirals(1000)
    trainer.fit(Classifier(), DataLoader(train, batch_size=8, shuffle=True), DataLoader(held_out, batch_size=500))


if __name__ == "__main__":
    main()
