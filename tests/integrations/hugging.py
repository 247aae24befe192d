"""Tiny models and data for the Trainer, and the plain loop that it is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from cabs import CABS, AdaptiveLoader, BatchSizeScheduler
from cabs.integrations.transformers import CABSCallback, CABSTrainer

BOUNDS: dict[str, Any] = {"min_batch_size": 4, "max_batch_size": 48, "measure_every": 1}
History = list[tuple[int, float, int]]
"""Of each step: its examples, its loss, the size chosen for the next."""


def classifier(dropout: float = 0.0, **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    options = {"vocab_size": 30, "num_labels": 3, "max_position_embeddings": 16, **sizes, **changes}
    return BertForSequenceClassification(
        BertConfig(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **options)
    )


def language_model(**changes: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 20, **sizes, **tokens, **changes}))


def sentences(count: int = 200, tokens: int = 8, labels: int = 3) -> list[dict[str, Tensor]]:
    """Token sequences with a class that the first token tells."""
    words = torch.randint(0, 30, (count, tokens), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each, "labels": each[0] % labels} for each in words]


def texts(count: int = 200, tokens: int = 8, unequal: bool = False) -> list[dict[str, Tensor]]:
    """Token sequences that count up, all of whose tokens are labels, or the first few."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 20, (count,), generator=generator)
    lengths = torch.randint(3, tokens + 1, (count,), generator=generator)
    examples = []
    for start, length in zip(starts, lengths, strict=True):
        words = (start + torch.arange(tokens)) % 20
        labels = words.clone()
        if unequal:
            labels[length:] = -100
        examples.append({"input_ids": words, "labels": labels})
    return examples


def arguments(path: Path, **changes: Any) -> TrainingArguments:
    options = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
    }
    return TrainingArguments(str(path), **{**options, **changes})


class Recorder(TrainerCallback):
    """What happens at each step of a Trainer."""

    def __init__(self) -> None:
        self.history: History = []
        self.epochs: list[float] = []
        self.max_steps: list[int] = []
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (callback,) = (each for each in self.trainer.callback_handler.callbacks if isinstance(each, CABSCallback))
        self.history.append(seen(callback.scheduler))
        self.epochs.append(state.epoch)
        self.max_steps.append(state.max_steps)
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


def trainer(
    model: nn.Module,
    args: TrainingArguments,
    data: Any,
    callback: CABSCallback | None = None,
    kind: type[CABSTrainer] = CABSTrainer,
    **options: Any,
) -> tuple[CABSTrainer, Recorder]:
    """A Trainer, and what is going to happen in it."""
    recorder = Recorder()
    callbacks = [callback or CABSCallback(**BOUNDS), recorder, *options.pop("callbacks", [])]
    recorder.trainer = kind(model, args, train_dataset=data, callbacks=callbacks, **options)
    return recorder.trainer, recorder


def seen(scheduler: BatchSizeScheduler | None) -> tuple[int, float, int]:
    assert scheduler is not None
    assert scheduler.last is not None
    return scheduler.last.examples, scheduler.last.loss, scheduler.last.batch_size


def plain_loop(
    model: nn.Module, data: Any, args: TrainingArguments, divides: bool = False, **options: Any
) -> tuple[nn.Module, History]:
    """The loop of docs/distributed.md, with the optimizer and the clipping that the Trainer has by default.

    Args:
        model: the model, which computes its loss.
        data: the examples.
        args: sizes, epochs, learning rate and seed are these.
        divides: whether the loss is the sum over the tokens divided by those of the whole batch.
        **options: of the scheduler.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    first = args.per_device_train_batch_size * args.gradient_accumulation_steps
    loader = AdaptiveLoader(
        data,
        batch_size=first,
        shuffle=True,
        seed=args.seed,
        collate_fn=default_data_collator,
        max_microbatch_size=args.per_device_train_batch_size,
    )
    scheduler = CABS(model, optimizer, loader, **{**BOUNDS, **options})
    history = []
    model.train()
    for _ in range(int(args.num_train_epochs)):
        for batch in loader:
            optimizer.zero_grad()
            items = sum(int((each["labels"][:, 1:] != -100).sum()) for each in batch.load()) if divides else None
            for microbatch in batch:
                if items is None:
                    loss = model(**microbatch).loss
                else:
                    part = batch.examples / len(microbatch["labels"])
                    loss = part * model(**microbatch, num_items_in_batch=torch.tensor(items)).loss
                scheduler.backward(loss)
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            history.append(seen(scheduler))
    scheduler.close()
    return model, history


def same(ours: History, others: History, tolerance: float = 1e-4) -> None:
    """Equal sizes, and losses that differ by rounding."""
    assert [step[0] for step in ours] == [step[0] for step in others]
    assert [step[2] for step in ours] == [step[2] for step in others]
    losses = torch.tensor([[step[1] for step in one] for one in (ours, others)], dtype=torch.float64)
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=1e-6)


def same_model(one: nn.Module, other: nn.Module, tolerance: float = 1e-3) -> None:
    """Models that compute the same: of weights without a gradient, Adam makes much of rounding."""
    words = torch.randint(0, 20, (64, 8), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours, others = (model.eval()(input_ids=words).logits for model in (one, other))
    torch.testing.assert_close(ours, others, rtol=tolerance, atol=tolerance)
