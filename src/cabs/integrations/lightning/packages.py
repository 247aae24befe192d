"""Lightning under either of its names: ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cabs.integrations import missing

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError as first:
        try:
            from pytorch_lightning import Callback, LightningModule, Trainer
        except ModuleNotFoundError:
            raise missing("lightning", first) from first

__all__ = ["Callback", "LightningModule", "Trainer"]
