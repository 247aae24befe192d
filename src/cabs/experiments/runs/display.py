"""The progress of a run: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cabs.experiments.problems import metric_of
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.naming import headline
from cabs.experiments.wording import duration

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int) -> str:
    """A curve in one line of text: ``width`` blocks, each as high as the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(position * len(values) / width) for position in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


@dataclass
class Rate:
    """Examples per second over the last few seconds, evaluations included, to estimate the time left."""

    window: float = 10.0
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    def mark(self, examples: int, now: float) -> None:
        """Note how many examples had been seen at a time."""
        self._marks.append((now, examples))
        while len(self._marks) > 2 and now - self._marks[0][0] > self.window:
            self._marks.popleft()

    def per_second(self) -> float:
        """The rate; 0 before anything is known."""
        if len(self._marks) < 2:
            return 0.0
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start else 0.0


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The outcome of an evaluation; the score is what the problem's metric says."""

    train_loss: float
    test_loss: float
    score: float


class Display(Protocol):
    """Told of a run's progress."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """End, whatever the reason."""

    def step(self, examples: int, loss: float, batch_size: int, noise_share: float | None = None) -> None:
        """A step was taken; ``examples`` were seen in all, and so much of the loss is noise, if that is known."""

    def evaluation(self, examples: int, evaluation: Evaluation) -> None:
        """An evaluation was made."""


class Silent:
    """Says nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, examples: int, loss: float, batch_size: int, noise_share: float | None = None) -> None:
        pass

    def evaluation(self, examples: int, evaluation: Evaluation) -> None:
        pass


class PlainLines(Silent):
    """A line for each evaluation, for logs and pipes."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._console = console
        self._config = config
        self._rate = Rate(window=60.0)
        self._metric = metric_of(config.problem)
        self._batch_size = config.first_batch_size
        self._noise_share: float | None = None
        self._next_line = 0

    def __enter__(self) -> Self:
        self._console.print(headline(self._config), soft_wrap=True, markup=False, highlight=False)
        return self

    def step(self, examples: int, loss: float, batch_size: int, noise_share: float | None = None) -> None:
        self._batch_size, self._noise_share = batch_size, noise_share

    def evaluation(self, examples: int, evaluation: Evaluation) -> None:
        self._rate.mark(examples, time.monotonic())
        if examples < self._next_line:
            return
        self._next_line = min(examples + self._config.examples // 20, self._config.examples)
        line = (
            f"examples {examples:>10,} / {self._config.examples:,}"
            f"   train loss {evaluation.train_loss:.4f}"
            f"   test {self._metric.name} {self._metric.show(evaluation.score):>6}"
            f"   batch size {self._batch_size:>5,}"
        )
        if self._noise_share is not None:
            line += f"   noise share {self._noise_share:5.2f}"
        if rate := self._rate.per_second():
            left = duration(max(0, self._config.examples - examples) / rate)
            line += f"   {rate:,.0f} examples/s, {left} left"
        self._console.print(line, soft_wrap=True, highlight=False)


class LivePanel:
    """A panel that is redrawn as the run goes."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._config = config
        self._console = console
        self._rate = Rate()
        self._examples = 0
        self._loss: float | None = None
        self._evaluation: Evaluation | None = None
        self._metric = metric_of(config.problem)
        self._best = self._metric.worst
        # The batch size at evenly spaced counts of examples, as in the run's picture.
        self._spacing = max(1, config.examples // 1000)
        self._sizes: list[float] = []
        self._noise_share: float | None = None
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def step(self, examples: int, loss: float, batch_size: int, noise_share: float | None = None) -> None:
        self._noise_share = noise_share
        # A mini-batch's loss jumps about; the eye wants its trend.
        self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        passed = examples // self._spacing - self._examples // self._spacing
        self._sizes += [batch_size] * (passed if self._sizes else 1)
        self._examples = examples
        self._rate.mark(examples, time.monotonic())

    def evaluation(self, examples: int, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._best = max(self._best, evaluation.score, key=self._metric.goodness)

    def _render(self) -> RenderableType:
        width = min(self._console.width, 100)
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, ratio=1)
        table.add_row("examples", self._progress())
        table.add_row("batch size", self._batch_size(width - 26))
        if self._noise_share is not None:
            table.add_row("noise share", self._share(self._noise_share))
        table.add_row("loss", self._losses())
        table.add_row(self._metric.name, self._score())
        table.add_row("examples/s", self._speed())
        problem, _, rest = headline(self._config).partition(" · ")
        title = Text.assemble((problem, "bold"), f" · {rest}")
        return Panel(table, title=title, title_align="left", border_style="cyan", width=width)

    def _progress(self) -> RenderableType:
        done = min(self._examples, self._config.examples)
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(
            ProgressBar(total=self._config.examples, completed=done, finished_style="green"),
            f"[bold]{done:,}[/] / {self._config.examples:,}",
        )
        return row

    def _batch_size(self, width: int) -> Text:
        if not self._sizes:
            return Text("…")
        return Text.assemble(
            (f"{self._sizes[-1]:<8,.0f}", "bold"), (sparkline(self._sizes, max(8, width)), "bright_magenta")
        )

    def _share(self, share: float) -> Text:
        return Text.assemble((f"{share:<8.2f}", "bold"), ("of the loss is gradient noise", "dim"))

    def _losses(self) -> Text:
        trend = "…" if self._loss is None else f"{self._loss:<8.4f}"
        evaluated = f"training set {self._evaluation.train_loss:.4f}" if self._evaluation else ""
        return Text.assemble((trend, "bold"), (evaluated, "dim"))

    def _score(self) -> Text:
        if self._evaluation is None:
            return Text("…")
        return Text.assemble(
            (f"{self._metric.show(self._evaluation.score):<8}", "bold"),
            (f"on the test set, best {self._metric.show(self._best)}", "dim"),
        )

    def _speed(self) -> Text:
        rate = self._rate.per_second()
        if not rate:
            return Text("…")
        left = duration(max(0, self._config.examples - self._examples) / rate)
        return Text.assemble((f"{rate:<7,.0f} ", "bold"), (f"{left} left", "dim"))


def display_for(console: Console, config: RunConfig) -> Display:
    """The display that suits the place the output goes to."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LivePanel(console, config)
    return PlainLines(console, config)
