"""What the probe refuses, before anything is computed, each with what to do about it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from cabs.hooks import Hook
from cabs.loader import AdaptiveLoader
from cabs.parallel import team_of
from cabs.probe.task import Task
from cabs.probe.timing import Fits
from cabs.scheduler import requirements
from cabs.torch_internals import forward_hooks_of

ORDER = "the arguments are (model, dataset, loss, optimizer)"
ESTIMATORS = ("exact", "microbatch")


def check_kinds(model: Any, dataset: Any, loss: Any, optimizer: Any) -> None:
    """Refuses arguments of the wrong kind."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {a(model)}: {ORDER}, and model must be a torch.nn.Module")
    check_dataset(dataset)
    check_loss_function(loss)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {a(optimizer)}: {ORDER}, and optimizer must be a torch.optim.Optimizer")


def check_dataset(dataset: Any) -> None:
    """Refuses what examples cannot be drawn from, and what is too small for a variance."""
    if isinstance(dataset, DataLoader | AdaptiveLoader):
        raise TypeError(
            f"dataset is {a(dataset)}: batches of many sizes are tried, so pass its dataset (loader.dataset), and its "
            "collate_fn if it has one of its own"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"dataset is {a(dataset)}, and random examples are drawn from it, so it must have __getitem__ and __len__: "
            "of a stream, pass a list of some thousand of its examples"
        )
    tensors = isinstance(dataset, tuple) and all(isinstance(one, Tensor) for one in dataset)
    if tensors or isinstance(dataset, dict | str | Tensor):
        raise TypeError(
            f"dataset is {a(dataset)}: it must give one example for each index; make tensors a TensorDataset"
        )
    if len(dataset) < 2:
        what = "is empty" if not len(dataset) else "has one example, and one example has no variance"
        raise ValueError(f"the dataset {what}: at least two are needed")


def check_loss_function(loss: Any) -> None:
    """Refuses what is not a function of one batch."""
    hint = "loss must be a function of a batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1])"
    if not callable(loss):
        raise TypeError(f"loss is {a(loss)}: {ORDER}, and {hint}")
    if isinstance(loss, nn.Module) and type(loss).__module__ == nn.CrossEntropyLoss.__module__:
        raise TypeError(f"loss is {a(loss)}, which compares outputs with targets: {hint}")
    if needed(loss) > 1:
        raise TypeError(f"loss needs {needed(loss)} arguments, and is called with one, the batch: {hint}")


def needed(function: Callable[..., Any]) -> int:
    """How many arguments a function cannot be called without; 1 where that cannot be seen."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    must = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return sum(one.kind in must and one.default is inspect.Parameter.empty for one in parameters)


def check_model(model: nn.Module, optimizer: Any) -> None:
    """Refuses a model that is trained by several processes, or measured by somebody else."""
    requirements.check_parameters(optimizer, model)
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has no parameter that is trained: all of them have requires_grad=False")
    if team_of(model, [list(group["params"]) for group in optimizer.param_groups]) is not None:
        raise NotImplementedError(
            "several processes train this model, and the probe is for one: run it on the bare module in one process, "
            "before DistributedDataParallel or fully_shard"
        )
    if any(isinstance(hook, Hook) for module in model.modules() for hook in forward_hooks_of(module)):
        raise RuntimeError(
            "a scheduler or a GradientVariance is measuring this model, and the probe would end that: probe before it "
            "is made, or after scheduler.close()"
        )


def check_sizes(batch_size: Any, least: Any, most: Any, dataset_size: int) -> tuple[int, int, int]:
    """The present size, the smallest and the largest, as integers."""
    least, most, _ = requirements.bounds(least, most, 1)
    if least > dataset_size:
        least = dataset_size
    if batch_size is None:
        return min(max(32, least), most, dataset_size), least, most
    size = requirements.integer("batch_size", batch_size, 1)
    if size > dataset_size:
        raise ValueError(f"batch_size is {size}, and the dataset has {dataset_size} examples: lower it")
    return size, least, max(size, most)


def check_gradients(task: Task, optimizer: Any) -> None:
    """Refuses a loss without gradients, and weights that do not stay, on a batch that fits if any does."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    task.backward(2)  # some models set their weights in their first pass
    before = [p.detach().clone() for p in parameters]
    task.backward(2)
    if not all(torch.equal(p, one) for p, one in zip(parameters, before, strict=True)):
        raise ValueError(
            "the weights change in a forward and backward pass, so nothing can be measured at them: probe without what "
            "steps the optimizer there, a hook or the loss function itself"
        )
    if all(p.grad is None for p in parameters):
        raise ValueError(
            "no gradient reached a parameter of the optimizer, or none was left there: the loss must be computed with "
            "the model that is passed, and no hook may take gradients away"
        )
    task.clear()


def check_mean(task: Task, size: int = 8) -> None:
    """Refuses a loss that is a sum over the examples: its gradients would be taken for those of a mean."""
    indices = task.draw(2 * size)
    with torch.no_grad():
        found = [task.loss(task.batch_of(part)) for part in (indices, indices[:size], indices[size:])]
    if not all(isinstance(one, Tensor) and one.dim() == 0 for one in found):
        return  # one for each example, or something that is refused as soon as it is needed
    whole, *halves = (one.item() for one in found)
    # A mean of both halves is half of their sum, but for dropout and normalization.
    if abs(whole - sum(halves)) < 0.1 * abs(whole - sum(halves) / 2):
        raise ValueError(
            f"the loss of {2 * size} examples is the sum of the losses of its halves, {whole:.4g}, and everything here "
            "is about a mean: return the mean over the examples (reduction='mean'), or a vector of their losses"
        )


def check_numbers(seconds: Any, loss_floor: Any, estimator: Any) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < float(seconds) < math.inf:
        raise ValueError(f"seconds is {seconds!r}: it must be a positive number")
    if isinstance(loss_floor, bool) or not isinstance(loss_floor, Real) or not math.isfinite(loss_floor):
        raise ValueError(f"loss_floor is {loss_floor!r}: it must be a finite number below the loss")
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")


def check_alphas(alphas: tuple[float, ...]) -> None:
    """Refuses an optimizer that stands still."""
    if not any(alphas):
        raise ValueError(
            "the learning rate is 0, and which size is useful depends on it: give the optimizer the learning rate that "
            "you are going to train with (a warm-up's peak, say)"
        )


def check_fits(size: int, fits: Fits) -> None:
    """Refuses a present size that is out of reach."""
    if fits.bound == "memory" and size >= 2 * fits.size:
        raise ValueError(
            f"batches of batch_size = {size} should not fit into memory at once, to judge by smaller ones: {fits.size} "
            "is the largest that was tried and does. Pass the size that is computed at a time, your microbatch"
        )


def a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
