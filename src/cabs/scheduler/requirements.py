"""What the scheduler refuses, before anything has changed, each with what to do about it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from cabs import rules
from cabs.couplings import AssumedSGD, Coupled, Coupling, coupling_of
from cabs.loader import AdaptiveLoader
from cabs.parallel import Shards, Team
from cabs.rules import Rule


class HasBatchSize(Protocol):
    """A loader whose ``batch_size`` may be set at any time."""

    batch_size: int


def integer(name: str, value: Any, least: int) -> int:
    """A whole number, of Python's or numpy's, as an int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}: it must be an integer")
    if value < least:
        raise ValueError(f"{name} is {value}: it must be at least {least}")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: it must be True or False")
    return value


def bounds(least: Any, most: Any, multiple_of: Any, rule: Any = None) -> tuple[int, int, int]:
    """The bounds as integers."""
    least, most = integer("min_batch_size", least, -(2**63)), integer("max_batch_size", most, -(2**63))
    multiple_of = integer("multiple_of", multiple_of, 1)
    if least < 2 and getattr(rule, "measures", True):
        raise ValueError(f"min_batch_size is {least}: one example has no variance, so it must be at least 2")
    if least < 1:
        raise ValueError(f"min_batch_size is {least}: it must be at least 1")
    if least > most:
        raise ValueError(f"min_batch_size {least} is above max_batch_size {most}")
    if most // multiple_of * multiple_of < least:
        raise ValueError(f"there is no multiple of {multiple_of} from {least} to {most}: widen the bounds")
    return least, most, multiple_of


def check_kinds(model: object, optimizer: object, loader: object) -> None:
    """Refuses arguments in the wrong places."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {_a(model)}: the arguments are (model, optimizer, loader), and model must be a torch.nn.Module"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is {_a(optimizer)}: the arguments are (model, optimizer, loader), and optimizer must be a "
            "torch.optim.Optimizer"
        )
    if isinstance(loader, (nn.Module, torch.optim.Optimizer)):
        raise TypeError(
            f"loader is {_a(loader)}: the arguments are (model, optimizer, loader), and loader must be a "
            "cabs.AdaptiveLoader"
        )


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_rule(rule: Rule, least: int, most: int, multiple_of: int) -> None:
    if not isinstance(rule, Rule):
        raise TypeError(
            f"unknown rule {rule!r}: pass one of cabs.rules, such as CABS(), NormTest(0.8), GainPerCost(lipschitz=10) "
            "or Constant(128), or a subclass of cabs.rules.Rule"
        )
    if rule.budget is not None and rule.budget < least:
        raise ValueError(f"the budget of {rule.budget} examples is smaller than min_batch_size = {least}: lower that")
    if rule.budget is not None and rule.budget % multiple_of:
        raise ValueError(
            f"the budget of {rule.budget} examples is no multiple of {multiple_of}, as all sizes are (multiple_of, "
            "accumulation): change one or the other"
        )
    first = rule.first_batch_size()
    if first is not None and not least - 0.5 <= first < most + 0.5:
        raise ValueError(
            f"{rule!r} begins with {first:g}, outside of the bounds {least} to {most}: widen them (min_batch_size, "
            "max_batch_size)"
        )
    if isinstance(rule, rules.Constant) and rule.batch_size % multiple_of:
        raise ValueError(f"Constant({rule.batch_size}) is no multiple of {multiple_of}: change it, or multiple_of")


def check_seen(rule: Rule, examples_total: int, least: int) -> None:
    """Refuses to go on with a budget that was used up long ago."""
    if rule.budget is not None and examples_total >= rule.budget + least:
        raise ValueError(
            f"the rule's budget is {rule.budget:,} examples, and the state has seen {examples_total:,}: give a budget "
            "that counts all examples, those seen and those to come"
        )


def inner_bounds(least: int, most: int, multiple_of: int) -> tuple[int, int]:
    """The outermost sizes that can be chosen."""
    return -(-least // multiple_of) * multiple_of, most // multiple_of * multiple_of


def check_smoothing(smoothing: Any) -> None:
    if isinstance(smoothing, bool) or not isinstance(smoothing, Real) or not 0 <= float(smoothing) < 1:
        raise ValueError(f"smoothing is {smoothing!r}: μ must be a number in [0, 1); the paper uses 0.95")


def check_loader(loader: HasBatchSize | None, least: int, monitor_only: bool, accumulation: int) -> None:
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
    if accumulation > 1 and getattr(loader, "max_microbatch_size", None) is not None:
        raise ValueError(
            "the loader makes microbatches (max_microbatch_size), which are accumulated by scheduler.backward(loss): "
            "leave accumulation out, or max_microbatch_size"
        )
    try:
        size = len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return
    if size < least and not monitor_only:
        raise ValueError(f"the dataset has {size} examples, fewer than min_batch_size = {least}: lower min_batch_size")


def check_parameters(optimizer: Any, model: nn.Module) -> None:
    known = {id(p) for p in model.parameters()}
    if foreign := sum(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"the optimizer steps {foreign} parameters that are not in the model, so their variance would be missed: "
            "put all modules that are trained into one, torch.nn.ModuleList([model, criterion])"
        )


def coupled(optimizer: Any, rule: Rule, coupling: Any, assume_sgd: bool, monitor_only: bool) -> Coupled:
    """What the optimizer does with a gradient, which a rule that goes by it must know."""
    if coupling is not None and not isinstance(coupling, Coupling):
        hint = ": make one, with ()" if isinstance(coupling, type) and issubclass(coupling, Coupling) else ""
        raise TypeError(f"coupling is {coupling!r}: it must be one of cabs.couplings, or your own{hint}")
    if coupling is not None and assume_sgd:
        raise ValueError("assume_sgd takes the step for plain SGD's, and coupling says what it is: choose one of them")
    found = AssumedSGD() if assume_sgd else coupling or coupling_of(optimizer)
    if found is None and rule.measures and rule.coupled:
        why = (
            f"m = α tr(PΣ) / F is derived for steps w − α P u with a diagonal P, and {type(optimizer).__name__} is not "
            "known to make such: "
        )
        ways = (
            "pass coupling=, a cabs.couplings.Coupling that says its α and P (or make that known with "
            "cabs.couplings.register_coupling), or assume_sgd=True to take its learning rate for plain SGD's"
        )
        if not monitor_only:
            raise ValueError(why + ways)
        warnings.warn(f"{why}what is shown is plain SGD's; {ways}", stacklevel=4)
        found = AssumedSGD()
    return Coupled(optimizer, found)


def check_interval(measure_every: object) -> None:
    if measure_every != "auto" and (
        isinstance(measure_every, bool) or not isinstance(measure_every, Integral) or measure_every < 1
    ):
        raise ValueError(f"measure_every is {measure_every!r}: it must be a positive integer or 'auto'")


def check_grad_scaler(grad_scaler: object) -> None:
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler is {_a(grad_scaler)}: it must be the torch.amp.GradScaler in use, or left out")


def check_trial(loader: HasBatchSize | None, trial: object) -> None:
    auto = getattr(loader, "max_microbatch_size", None) == "auto"
    if auto and trial is None:
        raise ValueError(
            'max_microbatch_size="auto" is found by trying: pass trial=, a function of a batch that returns its loss '
            "as your loop computes it, or give the loader a number"
        )
    if trial is not None and not callable(trial):
        raise TypeError(f"trial is {trial!r}: it must be a function of a batch that returns its loss")


def check_team(
    team: Team | None, loader: HasBatchSize | None, monitor_only: bool, estimator: str, accumulation: int
) -> None:
    if team is None:
        return
    if not monitor_only and not isinstance(loader, AdaptiveLoader):
        raise TypeError(
            f"{type(loader).__name__} cannot hand out each process's share of a batch: use cabs.AdaptiveLoader, or "
            "pass monitor_only=True"
        )
    if accumulation > 1:
        raise NotImplementedError(
            "with several processes the gradients of accumulated batches would be weighed wrongly: give the loader "
            "max_microbatch_size, and call scheduler.backward(loss) for each microbatch"
        )
    if isinstance(team, Shards) and estimator == "microbatch":
        raise NotImplementedError(
            "with fully_shard the gradient of a microbatch is never whole in any place: choose estimator='exact'"
        )


def check_dots(rule: Rule, team: Team | None, estimator: str) -> None:
    """Refuses what Var⟨g_i, g⟩ cannot be measured with."""
    if rule.measures_dots and (isinstance(team, Shards) or estimator != "exact"):
        what = "fully_shard" if isinstance(team, Shards) else f"estimator={estimator!r}"
        raise NotImplementedError(
            f"{type(rule).__name__} needs Var⟨g_i, g⟩, which is measured where every process has the whole model, with "
            f"estimator='exact': not with {what}; NormTest needs norms alone"
        )


def scalar_loss(loss: Any) -> Tensor | float:
    """A loss as ``step`` takes it: a number, a scalar tensor, or the losses of single examples."""
    if isinstance(loss, Tensor):
        return loss.detach()
    if isinstance(loss, bool) or not isinstance(loss, Real):
        raise TypeError(f"the loss is {loss!r}: pass the mean loss of the batch, a tensor or a number")
    return float(loss)


def check_loss(loss: float, rule: Rule) -> None:
    """Refuses a loss that a rule can make nothing of."""
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}: training has diverged; lower the learning rate")
    floor = rule.loss_floor
    if floor is not None and loss <= floor:
        if floor == 0:
            raise ValueError(
                f"the loss is {loss:g}, and m = α tr Σ / F needs a positive one: give the rule a lower bound of "
                "your loss, rules.CABS(loss_floor=…), and leave penalties out of what you pass to step()"
            )
        raise ValueError(f"the loss is {loss:g}, at or below loss_floor = {floor:g}: give a floor that is below it")


def size_from(rule: Rule, raw: Any) -> float:
    """What a rule returned, which must be a number."""
    if isinstance(raw, Tensor) and raw.numel() == 1:
        raw = raw.item()
    number = isinstance(raw, (float, int, Real))
    if not number or isinstance(raw, bool) or math.isnan(raw):
        raise ValueError(f"the rule {rule!r} returned {raw!r}: it must return the batch size, a number (not NaN)")
    return float(raw)


def check_state(state: Any, version: int, keys: set[str], averaged: int, least: int, most: int) -> None:
    """Refuses a state that is not a scheduler's, or of another kind of run."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a scheduler's state is a dict, not {_a(state)}")
    if missing := keys - set(state):
        raise ValueError(f"not the state of a BatchSizeScheduler: it has no {', '.join(sorted(missing))}")
    if state["version"] != version:
        raise ValueError(
            f"the state is of version {state['version']}, this is {version}: use the cabs it was saved with"
        )
    averages = state["averages"]
    if averages is not None and len(averages) != averaged:
        raise ValueError("the state was saved with other parameter groups or another kind of rule")
    held = state["held"] or {}
    numbers = {
        "averages": averages or [],
        "weight": [state["weight"]],
        "steps": [state["steps"]],
        "examples_total": [state["examples_total"]],
        "unmeasured": [state["unmeasured"]],
        "held": [*held.get("variances", []), *held.get("norms", []), held.get("examples", 0), held.get("step", 0)],
    }
    for name, values in numbers.items():
        if any(isinstance(v, bool) or not isinstance(v, Real) or not math.isfinite(v) for v in values):
            raise ValueError(f"the state's {name} is not made of finite numbers: it is damaged, or of a diverged run")
    if not least <= integer("the state's last_batch_size", state["last_batch_size"], 0) <= most:
        raise ValueError(
            f"the state's batch size {state['last_batch_size']} is outside of the bounds "
            f"{least} to {most}: make the scheduler with bounds that hold it"
        )
