"""A training run: SGD on a problem with a rule for the batch size, resumable at any moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cabs import AdaptiveLoader, BatchSizeScheduler
from cabs.experiments.augment import Share
from cabs.experiments.config import RunConfig
from cabs.experiments.data import ImageData, ImageSet
from cabs.experiments.display import Display, Evaluation, Silent
from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.problems import problem
from cabs.experiments.rundir import RunDirectory
from cabs.experiments.workers import Crew, Follower
from cabs.rules import CABS, Constant, GainPerCost, NormTest, Rule

# The training loss is measured on this many training examples, the same in every run of a problem.
TRAIN_SAMPLE = 5_000
EVALUATION_BATCH = 100
# Keeps the augmentation's random numbers apart from those of weights and order, whose seeds are the run's.
_AUGMENTATION_SEED = 2**32


class Diverged(CommandError):
    """The loss or the gradients are no longer finite."""


def rule_of(config: RunConfig) -> Rule:
    """The rule for the batch size that a configuration asks for."""
    if config.rule == "constant":
        assert config.batch_size is not None
        return Constant(config.batch_size)
    if config.rule == "norm-test":
        assert config.theta is not None
        return NormTest(config.theta)
    if config.rule == "gain-per-cost":
        assert config.lipschitz is not None
        return GainPerCost(config.lipschitz)
    return CABS()


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights, which decay, and biases, which do not; one group when nothing decays."""
    if weight_decay == 0:
        return [{"params": list(network.parameters())}]
    weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in network.parameters() if parameter.ndim <= 1]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": biases}]


def crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of ``every`` was reached on the way from one count of examples to another."""
    return before // every != after // every


class Trainer:
    """The state of a run, and the loop that moves it.

    All workers of a crew have the same state, and none of it depends on how many they are.

    Args:
        run: The open run directory; its configuration says what to do.
        data: The problem's data.
        display: Where to show progress.
        crew: The workers that make the run; this process alone if left out.
    """

    def __init__(
        self, run: RunDirectory | Follower, data: ImageData, display: Display | None = None, crew: Crew | None = None
    ) -> None:
        self.run = run
        self.crew = crew or Crew()
        self.config = config = run.config
        self.display = display or Silent()
        self.problem = problem(config.problem)
        self.device = self.crew.device(config.device)
        self.test = data.test
        self.train_sample = data.train.sample(TRAIN_SAMPLE)
        torch.manual_seed(config.seed)
        self.augmentation = torch.Generator().manual_seed(config.seed + _AUGMENTATION_SEED)
        self.network = self.problem.network(config.seed).to(self.device)
        self.model = self.crew.model(self.network, self.device)
        groups = parameter_groups(self.network, config.weight_decay)
        self.optimizer = torch.optim.SGD(groups, lr=config.lr)
        constant = config.batch_size
        low, high = (constant, constant) if constant else (config.min_batch_size, config.max_batch_size)
        if low > len(data.train):
            raise UsageError(f"batches of {low:,} cannot be drawn from {len(data.train):,} training examples")
        self.loader = AdaptiveLoader(data.train.dataset(), batch_size=low, shuffle=True, seed=config.seed, stream=True)
        self.scheduler = BatchSizeScheduler(
            self.model,
            self.optimizer,
            self.loader,
            rule=rule_of(config),
            min_batch_size=low,
            max_batch_size=high,
            smoothing=config.smoothing,
            estimator=config.estimator,
            max_examples=None if config.measure == "all" else "auto",
            measure_every=1 if config.measure == "all" else "auto",
        )
        self.examples = 0
        self.step = 0
        self.seconds = 0.0
        self.input_seconds = 0.0

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
            self._step(batches)
            finished = self.examples >= config.examples
            if finished or crossed(before, self.examples, config.eval_every):
                self._evaluate()
            stopping = not finished and stop()
            if finished or stopping or crossed(before, self.examples, config.checkpoint_every):
                self.run.save_checkpoint(self.state_dict())
            if stopping:
                return False
        return True

    def _step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        start = time.perf_counter()
        images, labels = next(batches)
        crew, delivery = self.crew, self.loader.delivery
        batch_size = len(labels) if crew.size == 1 else delivery.examples
        share = None if crew.size == 1 else Share.of_worker(crew.rank, crew.size, self.examples, batch_size)
        inputs = self.problem.inputs.train(images.to(self.device), self.augmentation, share)
        self.input_seconds += time.perf_counter() - start
        loss = F.cross_entropy(self.model(inputs), labels.to(self.device))
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
        if self.step == 1 or crossed(before, self.examples, self.config.log_every):
            last = self.scheduler.last
            self._write(
                loss=value,
                batch_size=batch_size,
                variance=last.variance if last is not None and self.scheduler.rule.measures else None,
                lr=self.optimizer.param_groups[0]["lr"],
            )
        self.display.step(self.examples, value, batch_size)

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
            return  # and wait for the first worker at the next step
        train_loss, _ = self._loss_and_accuracy(self.train_sample)
        test_loss, test_accuracy = self._loss_and_accuracy(self.test)
        if not (math.isfinite(train_loss) and math.isfinite(test_loss)):
            raise Diverged(f"the run diverged: the loss is not finite after {self.examples:,} examples; lower --lr")
        self._write(train_loss=train_loss, test_loss=test_loss, test_accuracy=test_accuracy)
        self.run.flush()
        self.display.evaluation(
            self.examples, Evaluation(train_loss=train_loss, test_loss=test_loss, test_accuracy=test_accuracy)
        )

    @torch.no_grad()
    def _loss_and_accuracy(self, examples: ImageSet) -> tuple[float, float]:
        self.network.eval()
        loss, correct = 0.0, 0
        for images, labels in zip(
            examples.images.split(EVALUATION_BATCH), examples.labels.split(EVALUATION_BATCH), strict=True
        ):
            labels = labels.to(self.device)
            outputs = self.network(self.problem.inputs.evaluate(images.to(self.device)))
            loss += F.cross_entropy(outputs, labels, reduction="sum").item()
            correct += int((outputs.argmax(dim=1) == labels).sum())
        self.network.train()
        return loss / len(examples), correct / len(examples)

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
        """Go back to a saved state."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["random"]["torch"])
        self.augmentation.set_state(state["random"]["augmentation"])
        self.examples, self.step = state["examples"], state["step"]
        self.seconds, self.input_seconds = state["seconds"], state["input_seconds"]
