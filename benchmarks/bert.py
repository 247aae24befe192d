"""Peak memory of the default on BERT, called with and without ``token_type_ids``, as a ratio to a plain step's.

    python benchmarks/bert.py [--examples 32] [--length 128] [--out FILE]

Needs ``transformers``. The model is made from a configuration, with random weights: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from cabs import CABS, __version__, hardware
from cabs.scheduler import auto_every
from cabs_bench.measure import peak_bytes

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


def peak(arguments: argparse.Namespace, optimizer: str, with_types: bool, measured: bool) -> int:
    """The largest peak of as many steps as share a measurement."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    model: nn.Module = BertForSequenceClassification(config)
    steps = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    scheduler = CABS(model, steps, None, monitor_only=True) if measured else None
    tokens = torch.randint(0, config.vocab_size, (arguments.examples, arguments.length))
    extra = {"token_type_ids": torch.zeros_like(tokens)} if with_types else {}
    targets = torch.randint(0, 2, (arguments.examples,))

    def step() -> Tensor:
        loss = F.cross_entropy(model(tokens, **extra).logits, targets)
        steps.zero_grad()
        loss.backward()
        steps.step()
        if scheduler is not None:
            scheduler.step(loss)
        return loss

    step()  # an optimizer's state is made at the first step
    count = auto_every(arguments.examples) if measured else 1
    return max(peak_bytes(step, model) for _ in range(count + 1))


def main() -> None:
    """Prints a table, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    machine = hardware.describe()
    lines = [
        "# Peak memory of the default on BERT",
        "",
        f"`{shlex.join(['python', 'benchmarks/bert.py', *sys.argv[1:]])}`, {time.strftime('%Y-%m-%d')}, "
        f"cabs {__version__}, torch {torch.__version__}, {machine['processor']}; 4 layers of width 256, "
        f"m = {arguments.examples}, {arguments.length} tokens.",
        "",
        "| optimizer | token_type_ids | plain, MiB | default, ratio |",
        "| --- | --- | ---: | ---: |",
    ]
    for optimizer in OPTIMIZERS:
        for with_types in (True, False):
            plain, ours = (peak(arguments, optimizer, with_types, measured) for measured in (False, True))
            given = "given" if with_types else "left out"
            lines.append(f"| {optimizer} | {given} | {plain / 2**20:.0f} | {ours / plain:.2f} |")
    print("\n".join(lines))
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
