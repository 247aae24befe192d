"""The Hugging Face Trainer with CABS: a tiny language model learns to count.

    pip install "torch-cabs[transformers]"
    python examples/trainer.py

The batch size of every step is chosen from the gradients; the Trainer's log has it as `cabs/batch_size`. Nothing is
downloaded: the model is made from a config, the data on the spot.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from cabs.integrations.transformers import CABSCallback, CABSTrainer


def counting(examples: int, tokens: int = 16, words: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from a random number."""
    starts = torch.randint(0, words, (examples, 1), generator=torch.Generator().manual_seed(0))
    sequences = (starts + torch.arange(tokens)) % words
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        args = TrainingArguments(
            directory,
            num_train_epochs=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            per_device_train_batch_size=16,  # at a time; larger batches are accumulated
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        callback = CABSCallback(min_batch_size=8, max_batch_size=256)
        trainer = CABSTrainer(LlamaForCausalLM(config), args, train_dataset=counting(2000), callbacks=[callback])
        trainer.train()
    assert callback.scheduler is not None
    print("the next batch would have", callback.scheduler.last_batch_size, "examples")


if __name__ == "__main__":
    main()
