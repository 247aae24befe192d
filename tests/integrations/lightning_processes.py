"""Trains with Lightning on some processes, and writes down what each of them did; run as a script."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from cabs import rules
from cabs.integrations.lightning import CABSCallback
from lightning_runs import OPTIONS, Manual, Module, fit, weights

CASES: dict[str, tuple[type[Module], str, dict[str, Any], dict[str, Any]]] = {
    "sgd": (Module, "sgd", {}, {}),
    "adamw": (Module, "adamw", {}, {}),
    "manual": (Manual, "sgd", {}, {}),
    "clipped": (Module, "momentum", {}, {"gradient_clip_val": 0.3}),
    "schedule": (Module, "sgd", {"rule": rules.Steps("0:5 20:9 50:16")}, {"val_check_interval": 0.5}),
}


class Sizes(Callback):
    """The examples of each step, of all processes and of this one."""

    def __init__(self, callback: CABSCallback) -> None:
        self.callback = callback
        self.steps: list[int] = []
        self.shares: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.callback.scheduler is not None
        assert self.callback.scheduler.last is not None
        self.steps.append(self.callback.scheduler.last.examples)
        self.shares.append(len(batch[0]))


def train(name: str, devices: int, **more: Any) -> tuple[dict[str, Any], int]:
    kind, optimizer, arguments, options = CASES[name]
    module, callback = kind(optimizer), CABSCallback(**OPTIONS, **arguments)
    sizes = Sizes(callback)
    callbacks = [sizes, *more.pop("callbacks", [])]
    strategy = "ddp" if devices > 1 else "auto"
    fit(module, callback, devices=devices, strategy=strategy, callbacks=callbacks, validates=True, **options, **more)
    found = {"steps": sizes.steps, "shares": sizes.shares, "weights": weights(module).tolist()}
    return {**found, "validated_after": module.validated_after}, module.global_rank


def main(devices: int, directory: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found, rank = {}, 0
    for name in CASES:
        found[name], rank = train(name, devices)
    saves = ModelCheckpoint(directory / f"of-{devices}", filename="{step}", save_top_k=-1, every_n_train_steps=10)
    train("sgd", devices, callbacks=[saves], enable_checkpointing=True)
    found["resumed"], _ = train("sgd", devices, ckpt_path=directory / f"of-{devices}" / "step=10.ckpt")
    if devices > 1:  # a checkpoint does not depend on the number of processes
        found["of one"], _ = train("sgd", devices, ckpt_path=directory / "of-1" / "step=10.ckpt")
    (directory / f"{devices}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
