"""A training run: an optimizer on a problem with a rule for the batch size, resumable at any moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cabs import AdaptiveLoader, BatchSizeScheduler
from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.problems import problem
from cabs.experiments.problems.augment import Share
from cabs.experiments.problems.problem import Data, Examples
from cabs.experiments.runs.crew import Crew, Follower
from cabs.experiments.runs.directory import RunDirectory
from cabs.experiments.runs.display import Display, Evaluation, Silent
from cabs.experiments.runs.optimizers import OPTIMIZERS
from cabs.experiments.runs.schedules import learning_rate_factor

EVALUATION_BATCH = 100
# Keeps the augmentation's random numbers apart from those of weights and order, whose seeds are the run's.
_AUGMENTATION_SEED = 2**32


class Diverged(CommandError):
    """The loss or the gradients are no longer finite."""


def crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of ``every`` was reached on the way from one count of examples to another."""
    return before // every != after // every


class Trainer:
    """The state of a run, and the loop that moves it.

    All processes of a crew have the same state, and none of it depends on how many they are.

    Args:
        run: The open run directory; its configuration says what to do.
        data: The problem's data.
        display: Where to show progress.
        crew: The processes that make the run; this process alone if left out.
    """

    def __init__(
        self, run: RunDirectory | Follower, data: Data, display: Display | None = None, crew: Crew | None = None
    ) -> None:
        self.run = run
        self.crew = crew or Crew()
        self.config = config = run.config
        self.display = display or Silent()
        self.problem = problem(config.problem)
        self.device = self.crew.device(config.device)
        self.test = data.test
        self.train_sample = data.train.sample(self.problem.train_sample)
        torch.manual_seed(config.seed)
        self.augmentation = torch.Generator().manual_seed(config.seed + _AUGMENTATION_SEED)
        self.network = self.problem.network(config.seed).to(self.device)
        self.model = self.crew.model(self.network, self.device)
        self.optimizer = OPTIMIZERS[config.optimizer].optimizer(self.network, config.lr, config.weight_decay)
        (low, _), there = config.bounds, len(data.train)
        if low > there:
            raise UsageError(f"batches of {low:,} cannot be drawn from {there:,} training examples")
        first = min(config.first_batch_size, there)
        self.loader = AdaptiveLoader(
            data.train.dataset(), batch_size=first, shuffle=True, seed=config.seed, stream=True
        )
        self.scheduler = self._scheduler()
        self.examples = 0
        self.step = 0
        self.seconds = 0.0
        self.input_seconds = 0.0

    def _scheduler(self) -> BatchSizeScheduler:
        config = self.config
        low, high = config.bounds
        try:
            return BatchSizeScheduler(
                self.model,
                self.optimizer,
                self.loader,
                rule=config.kind.rule(vars(config)),
                min_batch_size=low,
                max_batch_size=high,
                smoothing=config.smoothing,
                estimator=config.estimator,
                max_examples=None if config.measure == "all" else "auto",
                measure_every=1 if config.measure == "all" else "auto",
                assume_sgd=not config.kind.measures,  # a rule that measures nothing assumes nothing
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UsageError(f"--rule {config.rule} with --optimizer {config.optimizer}: {error}") from error

    def train(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until the budget is used up.

        Args:
            stop: Asked after each step whether to stop early, leaving a checkpoint.

        Returns:
            Whether the run is finished.

        Raises:
            Diverged: If the loss or the gradients stop being finite.
        """
        config = self.config
        if self.examples == 0:
            self._evaluate()
        batches = iter(self.loader)
        while self.examples < config.examples:
            before = self.examples
            self.make_step(batches)
            finished = self.examples >= config.examples
            if finished or crossed(before, self.examples, config.eval_every):
                self._evaluate()
            stopping = not finished and stop()
            if finished or stopping or crossed(before, self.examples, config.checkpoint_every):
                self.run.save_checkpoint(self.state_dict())
            if stopping:
                return False
        return True

    def make_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Trains on the next batch, and notes what it showed."""
        start = time.perf_counter()
        factor = learning_rate_factor(self.scheduler.rule, self.config.lr_decay, self.examples, self.config.examples)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * factor
        examples, targets = next(batches)
        crew, delivery = self.crew, self.loader.delivery
        batch_size = len(targets) if crew.size == 1 else delivery.examples
        share = None if crew.size == 1 else Share.of_rank(crew.rank, crew.size, self.examples, batch_size)
        inputs = self.problem.inputs.train(examples.to(self.device), self.augmentation, share)
        self.input_seconds += time.perf_counter() - start
        loss = self.problem.loss(self.model(inputs), targets.to(self.device))
        mean = crew.mean(loss.detach(), delivery.share, batch_size)  # on its way while the backward pass runs
        self.optimizer.zero_grad()
        loss.backward()
        value = mean()
        if not math.isfinite(value):
            raise Diverged(f"the run diverged: the loss is {value} after {self.examples:,} examples; lower --lr")
        self.optimizer.step()
        self._choose_batch_size(loss, value)
        before, self.examples = self.examples, self.examples + batch_size
        self.step += 1
        self.seconds += time.perf_counter() - start
        last = self.scheduler.last
        noise = None if last is None else _known(last.noise_share)
        if self.step == 1 or crossed(before, self.examples, self.config.log_every):
            self._write(
                loss=value,
                batch_size=batch_size,
                variance=None if last is None else _known(last.variance),
                noise_share=noise,
                lr=self.optimizer.param_groups[0]["lr"],
            )
        self.display.step(self.examples, value, batch_size, noise)

    def _choose_batch_size(self, loss: Tensor, value: float) -> None:
        try:
            self.scheduler.step(loss)
        except ValueError as error:
            # A batch that the network gets right beyond doubt has loss 0 and no gradient: it says nothing about
            # the next batch size, which stays as it is. Anything else that the scheduler refuses is the end.
            if value > 0:
                raise Diverged(f"the run stopped after {self.examples:,} examples: {error}") from error

    def _evaluate(self) -> None:
        if not self.crew.leads:
            return  # and wait for the first process at the next step
        train_loss, _ = self._loss_and_accuracy(self.train_sample)
        test_loss, accuracy = self._loss_and_accuracy(self.test)
        if not (math.isfinite(train_loss) and math.isfinite(test_loss)):
            raise Diverged(f"the run diverged: the loss is not finite after {self.examples:,} examples; lower --lr")
        scores = {metric.key: metric.of(test_loss, accuracy) for metric in self.problem.metrics}
        self._write(train_loss=train_loss, test_loss=test_loss, **scores)
        self.run.flush()
        evaluation = Evaluation(train_loss=train_loss, test_loss=test_loss, score=scores[self.problem.metric.key])
        self.display.evaluation(self.examples, evaluation)

    @torch.no_grad()
    def _loss_and_accuracy(self, examples: Examples) -> tuple[float, float]:
        """The mean loss, and the share of right answers."""
        self.network.eval()
        loss, correct, count = 0.0, 0, 0
        for inputs, targets in zip(*(part.split(EVALUATION_BATCH) for part in examples.dataset().tensors), strict=True):
            targets = targets.to(self.device)
            outputs = self.network(self.problem.inputs.evaluate(inputs.to(self.device)))
            loss += self.problem.loss(outputs, targets, reduction="sum").item()
            correct += int((outputs.argmax(dim=-1) == targets).sum())
            count += targets.numel()
        self.network.train()
        return loss / count, correct / count

    def _write(self, **values: Any) -> None:
        self.run.write_row({"examples": self.examples, "step": self.step, "seconds": round(self.seconds, 3), **values})

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            "examples": self.examples,
            "step": self.step,
            "seconds": self.seconds,
            "input_seconds": self.input_seconds,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loader": self.loader.state_dict(),
            "random": {"torch": torch.get_rng_state(), "augmentation": self.augmentation.get_state()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved state.

        Raises:
            ValueError: If it is not one of such a run; other errors are those of the parts that it is made of.
        """
        numbers = {name: state[name] for name in ("examples", "step", "seconds", "input_seconds")}
        if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in numbers.values()):
            raise ValueError("its counts are no counts")
        groups = [_shape(group) for group in self.optimizer.param_groups]
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        if not all(
            old.items() <= _shape(new).items() for old, new in zip(groups, self.optimizer.param_groups, strict=True)
        ):
            raise ValueError("its optimizer has other settings than the run's")
        self.scheduler.load_state_dict(state["scheduler"])
        self.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["random"]["torch"])
        self.augmentation.set_state(state["random"]["augmentation"])
        self.examples, self.step = int(numbers["examples"]), int(numbers["step"])
        self.seconds, self.input_seconds = float(numbers["seconds"]), float(numbers["input_seconds"])


def _known(value: float) -> float | None:
    """A number that is one, and was measured."""
    return value if math.isfinite(value) else None


def _shape(group: dict[str, Any]) -> dict[str, type]:
    """Which settings a group of parameters has, and of what kind they are."""
    return {name: type(value) for name, value in group.items()}
