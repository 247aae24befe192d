"""What the scheduler refuses, before anything has changed, each with what to do about it."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn

from cabs import rules
from cabs.distributed import Shards, Team
from cabs.loader import AdaptiveLoader
from cabs.rules import Rule


class HasBatchSize(Protocol):
    """A loader whose ``batch_size`` may be set at any time."""

    batch_size: int


def check_rule(rule: Rule, least: int, most: int, multiple_of: int) -> None:
    if not isinstance(rule, Rule):
        raise TypeError(
            f"unknown rule {rule!r}: pass one of cabs.rules, such as CABS(), NormTest(0.8), GainPerCost(lipschitz=10) "
            "or Constant(128), or a subclass of cabs.rules.Rule"
        )
    if isinstance(rule, rules.Constant) and not least <= rule.batch_size <= most:
        raise ValueError(f"Constant({rule.batch_size}) is outside of the bounds {least} to {most}: widen them")
    if isinstance(rule, rules.Constant) and rule.batch_size % multiple_of:
        raise ValueError(f"Constant({rule.batch_size}) is no multiple of {multiple_of}: change it, or multiple_of")


def check_bounds(least: int, most: int, smoothing: float, multiple_of: int) -> None:
    for name, size in (("min_batch_size", least), ("max_batch_size", most), ("multiple_of", multiple_of)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}: it must be an integer")
    if least < 2:
        raise ValueError(f"min_batch_size is {least}: one example has no variance, so it must be at least 2")
    if least > most:
        raise ValueError(f"min_batch_size {least} is above max_batch_size {most}")
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}: it must be at least 1")
    if most // multiple_of * multiple_of < least:
        raise ValueError(f"there is no multiple of {multiple_of} from {least} to {most}: widen the bounds")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}: μ must be in [0, 1); the paper uses 0.95")


def check_loader(loader: HasBatchSize | None, least: int, monitor_only: bool) -> None:
    if loader is None:
        if not monitor_only:
            raise TypeError("there is no loader to set a batch size on: pass one, or monitor_only=True")
        return
    if not hasattr(loader, "batch_size"):
        raise TypeError(f"{type(loader).__name__} has no batch_size to set: wrap the dataset in cabs.AdaptiveLoader")
    if not monitor_only and isinstance(cast(object, loader), torch.utils.data.DataLoader):
        raise TypeError(
            "torch's DataLoader cannot change its batch size: replace it by cabs.AdaptiveLoader, which takes the same "
            "arguments, or pass monitor_only=True"
        )
    try:
        size = len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return
    if size < least and not monitor_only:
        raise ValueError(f"the dataset has {size} examples, fewer than min_batch_size = {least}: lower min_batch_size")


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, assume_sgd: bool) -> None:
    known = {id(p) for p in model.parameters()}
    if foreign := sum(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"the optimizer steps {foreign} parameters that are not in the model, so their variance would be missed: "
            "put all modules that are trained into one, torch.nn.ModuleList([model, criterion])"
        )
    if assume_sgd:
        return
    kind = type(optimizer).__name__
    plain = isinstance(optimizer, torch.optim.SGD)
    if plain and any(group["momentum"] for group in optimizer.param_groups):
        kind, plain = "SGD with momentum", False
    if not plain:
        raise ValueError(
            f"m = α tr Σ / F is derived for the step w − α g, and {kind} makes another: use torch.optim.SGD without "
            "momentum, or pass assume_sgd=True to take its learning rate for α all the same"
        )


def check_interval(measure_every: object) -> None:
    if measure_every != "auto" and (not isinstance(measure_every, int) or measure_every < 1):
        raise ValueError(f"measure_every is {measure_every!r}: it must be a positive integer or 'auto'")


def check_trial(loader: HasBatchSize | None, trial: object) -> None:
    auto = getattr(loader, "max_microbatch_size", None) == "auto"
    if auto and trial is None:
        raise ValueError(
            'max_microbatch_size="auto" is found by trying: pass trial=, a function of a batch that returns its loss '
            "as your loop computes it, or give the loader a number"
        )
    if trial is not None and not callable(trial):
        raise TypeError(f"trial is {trial!r}: it must be a function of a batch that returns its loss")


def check_team(team: Team | None, loader: HasBatchSize | None, monitor_only: bool, estimator: str) -> None:
    if team is None:
        return
    if not monitor_only and not isinstance(loader, AdaptiveLoader):
        raise TypeError(
            f"{type(loader).__name__} cannot hand out each worker's share of a batch: use cabs.AdaptiveLoader, or pass "
            "monitor_only=True"
        )
    if isinstance(team, Shards) and estimator == "microbatch":
        raise NotImplementedError(
            "with fully_shard the gradient of a piece is never whole in any place: choose estimator='exact'"
        )
