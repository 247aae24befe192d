"""What the Trainer cannot do with moving batch sizes, said before it trains."""

from __future__ import annotations

from typing import Any

from cabs.integrations.accelerate import check_processes


def check_trainer(trainer: Any) -> None:
    """Refuses arguments of the Trainer that mean nothing when sizes move.

    Raises:
        NotImplementedError: it would train in a way that cannot be steered.
        ValueError: an argument counts what is not known.
    """
    args = trainer.args
    check_processes(trainer.accelerator)
    if args.n_gpu > 1:
        raise NotImplementedError(
            f"DataParallel over {args.n_gpu} GPUs cannot be steered: start one process for each, with torchrun"
        )
    if "lomo" in str(args.optim).lower():
        raise NotImplementedError(
            f"optim={str(getattr(args.optim, 'value', args.optim))!r} steps inside of its own backward pass: choose "
            "another, such as adamw_torch"
        )
    if args.max_steps > 0:
        return
    used = {
        "logging_steps": str(args.logging_strategy.value) == "steps",
        "eval_steps": str(args.eval_strategy.value) == "steps",
        "save_steps": str(args.save_strategy.value) == "steps",
    }
    for name, is_used in used.items():
        steps = getattr(args, name)
        if is_used and steps is not None and 0 < steps < 1:
            raise ValueError(
                f"{name}={steps} is a part of all steps, and how many there will be in num_train_epochs="
                f"{args.num_train_epochs:g} is not known when their sizes move: give a whole number of steps, or "
                "max_steps"
            )
