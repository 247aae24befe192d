"""What the Trainer cannot do with moving batch sizes, said before it trains."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType

DATA_PARALLEL = {
    name
    for name in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU")
    if hasattr(DistributedType, name)
}
"""How accelerate calls one process, and DistributedDataParallel on several kinds of devices."""


def check_processes(accelerator: Any) -> None:
    """Refuses ways to train with several processes that nobody has tried."""
    kind = accelerator.distributed_type.name
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if getattr(parallelism, f"{name}_size", 1) > 1:
            kind = f"{name}_size = {getattr(parallelism, f'{name}_size')}"
    if kind not in DATA_PARALLEL:
        raise NotImplementedError(
            f"moving batch sizes work in one process and with DistributedDataParallel, not with {kind}: start the "
            "script with torchrun or `accelerate launch --multi_gpu`, without it"
        )


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
