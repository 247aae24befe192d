"""One model against the loop over its single examples."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cabs
from cabs import GradientVariance
from zoo_models.case import Batch, Case, Inputs

SHAPES = ((4, 8), (3, 7), (5, 5))
"""(examples, length): a length that the examples divide, one that they do not, and one equal to them."""

TOLERANCE = 1e-8
ROUGH = 1e-4
"""For models in float32."""

ROUNDING = 1e-6
"""Up to which batch and single examples may differ: parts of many models compute in float32 whatever they are given."""

SLACK, MOST = 10.0, 1e-5
"""How many times as far as batch and single examples are apart a measurement may then be off, and how far at most."""

SLOW = 20.0
"""From this multiple of a plain step on, measuring counts as slow."""

ORDER = ("WRONG", "error", "refused", "exact", "not independent", "does not run")
"""From what matters most for a model to what matters least."""

CHANCES = ("p", "prob", "drop_prob", "dropout", "dropout_prob", "layerdrop", "drop_connect_rate")
"""What modules call the probability to leave something out."""

NOT_OUTPUTS = ("loss", "past_key_values", "attentions", "cache_params", "state")
OWN = "own"

Report = Callable[[str], None]
LossOf = Callable[[Any], Tensor]
Row = dict[str, Any]


def prepare(case: Case) -> nn.Module:
    """Training mode without chance, in float64, with weights that are nowhere zero by design."""
    model = case.model.to(case.dtype).train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        for name in CHANCES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def check(case: Case, report: Report, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Row]:
    """A row for every shape of batch and every loss."""
    model = prepare(case)
    rows: list[Row] = []
    for examples, length in shapes:
        torch.manual_seed(2)
        ways = {"made": case.batch, "made, padded": case.padded, OWN: case.labelled}
        for loss, make in ways.items():
            report(f"plain, m = {examples}, length {length}, {loss} loss")
            row: Row = {"m": examples, "length": length, "loss": loss}
            try:
                batch = make(examples, length)
                if batch is None:
                    continue
                comparison = Comparison(model, batch, loss == OWN, TOLERANCE if case.dtype == torch.float64 else ROUGH)
            except Exception as error:
                rows.append(row | {"status": "does not run", "why": brief(error)})
                continue
            report(f"measured, m = {examples}, length {length}, {loss} loss")
            rows.append(row | comparison.verdict(timed=not rows))
    return rows


def summary(rows: Sequence[Row]) -> Row:
    """What a model's rows come to: the status that matters most, and why."""
    # A loss of the model's own that is no mean over examples says nothing against the other rows, nor does padding that
    # a model does not take.
    telling = [row for row in rows if row["loss"] == "made" or row["status"] in ORDER[:4]]
    telling = telling or list(rows)
    worst = min(telling, key=lambda row: ORDER.index(row["status"]))
    slow = max((row["times"] for row in rows if "times" in row), default=None)
    exact = sum(row["status"] == "exact" for row in rows)
    error = max((row["error"] for row in telling if "error" in row), default=None)
    why = worst.get("why", "")
    if where := worst.get("where"):
        why += f" in {', '.join(where[:4])}" + (f" and {len(where) - 4} more" if len(where) > 4 else "")
    return {"status": worst["status"], "why": why, "exact_rows": exact, "error": error, "slow": slow}


class Comparison:
    """The gradients of single examples by the loop, to hold a measurement against."""

    def __init__(self, model: nn.Module, batch: Batch, own: bool, tolerance: float) -> None:
        self.model, self.batch, self.own = model, batch, own
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        whole = self._call(batch.whole)
        singles = [self._call(inputs) for inputs in batch.singles]
        self.keys = self._keys(whole, singles)
        self.apart = self._kept_apart(whole, singles)
        rows = [self._gradient(self._loss(output, 1)) for output in singles]
        self.plain = self._gradient(self._loss(whole, batch.examples))
        del whole, singles
        rows = [[g.double() for g in row] for row in rows]
        norms = [sum(g.square().sum() for g in row) for row in rows]
        self.squared_norms = torch.stack([torch.as_tensor(norm, dtype=torch.float64) for norm in norms])
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        self.squares = torch.stack([column.square().sum() / batch.examples for column in columns])
        means = [column.mean(0) for column in columns]
        self.mean_squared_norm = sum(mean.square().sum() for mean in means)
        self.trace = self.squared_norms.mean() - self.mean_squared_norm
        if not torch.isfinite(self.squared_norms).all() or not self.squared_norms.any():
            raise ValueError("the gradients of single examples are not finite, or all zero")
        self.largest = torch.stack([g.abs().max() for g in self.plain if g.numel()]).max()
        differences = [(a - b).abs().max() for a, b in zip(means, self.plain, strict=True) if a.numel()]
        gradients = float(torch.stack(differences).max() / self.largest)
        limit = ROUNDING if tolerance == TOLERANCE else ROUGH
        self.independent = self.apart <= limit and gradients <= ROUGH
        self.apart = max(self.apart, gradients)
        self.tolerance = max(tolerance, min(MOST, SLACK * self.apart))

    def _call(self, inputs: Inputs) -> Any:
        torch.manual_seed(3)
        return self.model(**inputs)

    def _keys(self, whole: Any, singles: Sequence[Any]) -> list[str]:
        if self.own:
            return ["loss"]
        examples = self.batch.examples
        found = {key: tensor.shape for key, tensor in tensors(whole) if tensor.dim() and len(tensor) == examples}
        for output in singles:
            shapes = {key: tensor.shape for key, tensor in tensors(output)}
            found = {key: s for key, s in found.items() if shapes.get(key) == (1, *s[1:])}
        if not found:
            raise ValueError("no output has a row for each example")
        return list(found)

    def _loss(self, output: Any, examples: int) -> Tensor:
        """The model's own loss, or a smooth function that no two numbers of an example's output enter alike."""
        if self.own:
            return output["loss"]
        outputs = dict(tensors(output))
        flat = torch.cat([usable(outputs[key]).reshape(examples, -1) for key in self.keys], 1)
        weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
        return ((weights * flat + flat.square()).sum(1) / math.sqrt(flat.shape[1])).mean()

    def _kept_apart(self, whole: Any, singles: Sequence[Any]) -> float:
        """The largest relative difference between outputs of the batch and of single examples."""
        if self.own:
            mean = torch.stack([output["loss"].detach() for output in singles]).mean()
            return float((mean - whole["loss"].detach()).abs() / mean.abs())
        batch, worst = dict(tensors(whole)), 0.0
        rows = [dict(tensors(output)) for output in singles]
        for key in self.keys:
            together = usable(batch[key].detach())
            alone = usable(torch.cat([row[key].detach() for row in rows]))
            worst = max(worst, float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-30)))
        return worst

    def _gradient(self, loss: Tensor) -> list[Tensor]:
        # Not autograd.grad: reversible networks fill .grad in a backward pass of their own.
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]

    def _step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self._loss(self._call(self.batch.whole), self.batch.examples).backward()

    def verdict(self, timed: bool) -> Row:
        """How a measurement compares with the loop."""
        row = self._measured(timed)
        if not self.independent:
            row["cabs"] = "silent" if row["status"] in ("exact", "WRONG") and not row.get("warned") else row["status"]
            row |= {"status": "not independent", "why": f"batch and single examples differ by {self.apart:.1e}"}
        return row

    def _measured(self, timed: bool) -> Row:
        row: Row = {}
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                variance = GradientVariance(self.model, **self.batch.options)
                with variance:
                    self._step()
                norms, square, trace = variance.squared_norms(), variance.mean_squared_norm, variance.trace()
        except Exception as error:
            return {"status": "refused" if deliberate(error) else "error", "why": brief(error)}
        if warned := [str(w.message) for w in caught if "examples" in str(w.message)]:
            row["warned"] = warned[0].splitlines()[0]
        row |= self._judge(norms, square, trace)
        if row["status"] == "WRONG":
            row["where"] = self._where()
        if timed:
            row["times"] = round(self._seconds(variance) / self._seconds(None), 1)
        return row

    def _judge(self, norms: Tensor, square: Tensor, trace: Tensor) -> Row:
        if norms.shape != self.squared_norms.shape:
            return {"status": "WRONG", "why": f"{len(norms)} squared norms for {self.batch.examples} examples"}
        scale = self.squared_norms.max()
        error = float(((norms - self.squared_norms).abs() / self.squared_norms.clamp(min=1e-6 * scale)).max())
        # tr Σ is a difference: what rounding does to it is as large as its terms' rounding.
        error = max(error, float((trace - self.trace).abs() / self.squared_norms.mean()))
        error = max(error, float((square - self.mean_squared_norm).abs() / self.squared_norms.mean()))
        after = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        differences = [(a - b).abs().max() for a, b in zip(after, self.plain, strict=True) if a.numel()]
        grads = float(torch.stack(differences).max() / self.largest)
        spread = float((trace - self.trace).abs() / self.squared_norms.mean())
        if self.own and spread <= self.tolerance < error and grads <= self.tolerance:
            # A penalty that the model adds to its loss is in the loop's gradients, alike in all, and not in cabs's.
            return {"status": "exact", "error": spread, "tolerance": self.tolerance, "why": "a penalty in the loss"}
        if not error <= self.tolerance:
            return {"status": "WRONG", "error": error, "why": f"relative error {error:.1e}"}
        if not grads <= self.tolerance:
            return {"status": "WRONG", "error": grads, "why": f".grad is off by {grads:.1e}"}
        return {"status": "exact", "error": error, "tolerance": self.tolerance}

    def _where(self) -> list[str]:
        """Of which parameters the measurement is wrong, as far as measuring them in groups of their own tells."""
        groups = [[parameter] for parameter in self.parameters]
        try:
            variance = GradientVariance(self.model, **self.batch.options, groups=groups)
            with variance:
                self._step()
            off = (variance.traces() + variance.mean_squared_norms() - self.squares).abs()
        except Exception as error:
            return [brief(error)]
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        wrong = (off > self.tolerance * self.squares.sum()).nonzero().flatten().tolist()
        return [names[id(self.parameters[i])] for i in wrong]

    def _seconds(self, variance: GradientVariance | None, rounds: int = 2) -> float:
        taken = []
        for _ in range(rounds):
            start = time.perf_counter()
            if variance is None:
                self._step()
            else:
                with variance:
                    self._step()
                variance.trace()
            taken.append(time.perf_counter() - start)
        return min(taken)


def tensors(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating outputs that depend on parameters, by where they are."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.requires_grad and output.numel():
            yield path or "output", output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name not in NOT_OUTPUTS:
                yield from tensors(value, f"{path}.{name}")
    elif isinstance(output, (list, tuple)):
        for i, value in enumerate(output):
            yield from tensors(value, f"{path}[{i}]")
    elif hasattr(output, "__dict__") and not isinstance(output, nn.Module):
        yield from tensors({name: v for name, v in vars(output).items() if not name.startswith("_")}, path)


def usable(output: Tensor) -> Tensor:
    """Without the −∞ of masked outputs."""
    return torch.where(output.abs() < 1e6, output, torch.zeros_like(output))


def deliberate(error: Exception) -> bool:
    """Whether an exception was raised by cabs itself rather than by something that failed inside it."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    home = Path(cabs.__file__).parent
    return home in Path(frames[-1].filename).parents and (frames[-1].line or "").startswith("raise ")


def brief(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
