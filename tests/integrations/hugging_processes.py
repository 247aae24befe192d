"""Trainings that are the same in one process and in several: ``torchrun … hugging_processes.py DIRECTORY``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from cabs import AdaptiveLoader, rules
from cabs.integrations.accelerate import prepare
from cabs.integrations.transformers import CABSCallback, CABSTrainer
from hugging import BOUNDS, History, arguments, classifier, language_model, seen, sentences, texts, trainer

X = torch.randn(150, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
ALL: dict[str, Any] = {**BOUNDS, "max_examples": None}
"""Measured of all examples: some of them would be others for two processes."""


def counted_wrongly() -> nn.Module:
    """A language model of which the Trainer does not know that it shifts labels: it counts one too many for each."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


class OwnLoss(CABSTrainer):
    """A loss that knows nothing of num_items_in_batch."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return F.cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"])


def trained(path: Path, processes: int, model: nn.Module, data: Any, rule: Any = None, **options: Any) -> History:
    kind = options.pop("kind", CABSTrainer)
    # The first size and the microbatches are those of one process.
    backend = {"ddp_backend": "gloo"} if processes > 1 else {}
    args = arguments(path, per_device_train_batch_size=8 // processes, **backend, **options)
    callback = CABSCallback(rule, **ALL if rule is None else {"min_batch_size": 2})
    one, recorder = trainer(model, args, data, callback, kind)
    one.train()
    logged = [logs["loss"] for logs in one.state.log_history if "loss" in logs]
    assert not logged or abs(logged[0] - recorder.history[0][1]) < 1e-4 * logged[0]
    return recorder.history


def loop(accelerator: Accelerator, microbatches: bool = False, **options: Any) -> History:
    """A loop with accelerate."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    loader: Any = DataLoader(TensorDataset(X, Y), batch_size=16 // accelerator.num_processes, shuffle=True)
    if microbatches:
        most = 4 // accelerator.num_processes
        loader = AdaptiveLoader(TensorDataset(X, Y), batch_size=16, shuffle=True, seed=4, max_microbatch_size=most)
    torch.manual_seed(4)  # the order of the DataLoader is drawn
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, **{**ALL, **options})
    history = []
    for _ in range(2):
        for batch in loader:
            if microbatches:
                for inputs, targets in batch:
                    scheduler.backward(F.cross_entropy(model(inputs), targets))
                loss = None
            else:
                inputs, targets = batch
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step(loss)
            history.append(seen(scheduler))
            optimizer.zero_grad()
    total = accelerator.gather(torch.tensor([loader.delivery.share])).sum()
    assert int(total) == history[-1][0]
    scheduler.close()
    return history


def trainings(path: Path, processes: int) -> dict[str, History]:
    numbers = [{**each, "labels": each["labels"].float()} for each in sentences(50)]
    few: Any = rules.Steps("0:8 40:3 46:17 80:2")  # fewer examples than make two for each process
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the examples of a batch have from")
        warnings.filterwarnings("ignore", message="the loss of one example depends on others")  # of the same
        return {
            "classes": trained(path, processes, classifier(), sentences(120), logging_steps=1),
            "tokens": trained(
                path, processes, language_model(), texts(80, unequal=True), learning_rate=4e-2, logging_steps=1
            ),
            "uncounted": trained(path, processes, counted_wrongly(), texts(80), learning_rate=4e-2, logging_steps=1),
            "tokens of each": trained(
                path, processes, language_model(), texts(80), learning_rate=4e-2, average_tokens_across_devices=False
            ),
            "few": trained(path, processes, language_model(), texts(90, unequal=True), few, logging_steps=1),
            "numbers": trained(path, processes, classifier(num_labels=1), numbers, logging_steps=1),
            "own loss": trained(path, processes, classifier(), sentences(50), kind=OwnLoss, logging_steps=1),
            "checkpointing": trained(path, processes, classifier(), sentences(50), activation_checkpointing=True),
            "accelerate": loop(Accelerator(cpu=True)),
            "accelerate, microbatches": loop(Accelerator(cpu=True), microbatches=True),
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    histories = trainings(directory / "run", accelerator.num_processes)
    (directory / f"rank{accelerator.process_index}.json").write_text(json.dumps(histories))
    accelerator.end_training()
