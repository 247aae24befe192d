"""The progress of a sweep: a table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cabs.experiments.problems import metric_of
from cabs.experiments.runs.metrics import latest
from cabs.experiments.sweeps.jobs import Job, last_words
from cabs.experiments.wording import counted, duration

_MARKS = {
    "finished": "green",
    "diverged": "yellow",
    "interrupted": "yellow",
    "failed": "red",
    "damaged": "red",
    "running": "cyan",
}


class SweepDisplay:
    """Follows the jobs of a sweep.

    Args:
        console: Where to show them.
        jobs: The jobs.
        room: How many run at a time, in words.
    """

    def __init__(self, console: Console, jobs: list[Job], room: str) -> None:
        self._console = console
        self._jobs = jobs
        self._room = room
        self._live: Live | None = None
        self._start = time.monotonic()
        self._done_before = self._examples()
        self._recent: list[Job] = []

    def __enter__(self) -> SweepDisplay:
        for job in self._jobs:
            if job.status == "damaged":
                self._console.print(f"left alone: {job.trouble}", highlight=False, markup=False, soft_wrap=True)
        skipped = sum(job.skipped for job in self._jobs)
        note = f", {skipped} of them done before" if skipped else ""
        self._console.print(f"{counted(len(self._jobs), 'run')}{note}; {self._room}", highlight=False)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def changed(self, job: Job | None) -> None:
        """Take note of a change."""
        if job is None:
            return
        if job.done:
            self._recent = [*self._recent, job][-6:]
        if self._live is None:
            done = sum(other.done for other in self._jobs)
            self._console.print(
                f"[{done}/{len(self._jobs)}] {job.name}: {self._news(job)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def _news(self, job: Job) -> str:
        if job.status == "waiting":
            return f"{'lost' if job.losses else 'crashed'} ({last_words(job)}), trying again"
        if job.status in ("failed", "damaged"):
            return f"{job.status}: {last_words(job)}"
        values, metric = latest(job.path), metric_of(job.config.problem)
        score = values.get(metric.key)
        if job.status == "finished" and score is not None:
            return f"finished, test {metric.name} {metric.show(score)}"
        return "resumed" if job.status == "running" and values else job.status

    def _examples(self) -> int:
        return sum(job.config.examples if job.done else int(latest(job.path).get("examples", 0)) for job in self._jobs)

    def render(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
        metric = metric_of(self._jobs[0].config.problem)
        for heading in ("run", "", "examples", "loss", metric.name, "batch size"):
            table.add_column(heading, no_wrap=True, justify="left" if heading in ("run", "") else "right")
        for job in [*self._recent, *(job for job in self._jobs if job.status == "running")]:
            values = latest(job.path)
            table.add_row(
                Text(job.name, style=_MARKS.get(job.status, "")),
                ProgressBar(total=job.config.examples, completed=values.get("examples", 0), width=20)
                if job.status == "running"
                else Text(job.status, style=_MARKS.get(job.status, "")),
                _number(values.get("examples"), ",.0f"),
                _number(values.get("train_loss"), ".4f"),
                _number(values.get(metric.key), metric.format),
                _number(values.get("batch_size"), ",.0f"),
            )
        return Group(table, Text(), self._overall()) if table.row_count else self._overall()

    def _overall(self) -> RenderableType:
        total = sum(job.config.examples for job in self._jobs)
        done = self._examples()
        rate = (done - self._done_before) / max(time.monotonic() - self._start, 1e-9)
        left = f", {duration((total - done) / rate)} left" if rate > 0 else ""
        counts = Counter(job.status for job in self._jobs)
        words = ", ".join(f"{count} {status}" for status, count in counts.items())
        row = Table.grid(padding=(0, 2))
        row.add_row(ProgressBar(total=total, completed=done, width=40), f"{words}{left}")
        return row


def _number(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
