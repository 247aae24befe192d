"""Run directories with made-up curves, for tests of what reads runs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from cabs.experiments.files import write_json
from cabs.experiments.problems import PROBLEMS, Problem
from cabs.experiments.problems.problem import ACCURACY
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.naming import run_name
from cabs.experiments.sweeps.grid import Grid


def write_run(
    path: Path, config: RunConfig, *, status: str = "finished", speed: float = 1.0, perplexity: bool = True
) -> Path:
    """A run whose loss falls with examples, the faster the greater ``speed``."""
    metrics = PROBLEMS[config.problem].metrics if config.problem in PROBLEMS and perplexity else (ACCURACY,)
    path.mkdir(parents=True)
    write_json(path / "config.json", config.to_json())
    noise = random.Random(f"{config.method}{config.lr}{config.seed}")
    with open(path / "metrics.jsonl", "w", encoding="utf-8") as file:
        points = 40
        for point in range(points + 1 if status == "finished" else points // 2):
            examples = config.examples * point // points
            progress = speed * point / points
            loss = 2.3 * math.exp(-4 * progress) * noise.uniform(0.93, 1.07)
            size = config.batch_size or max(16, round(400 * progress * config.lr**0.3 * noise.uniform(0.9, 1.1)))
            row: dict[str, Any] = {"examples": examples, "step": examples // 50, "seconds": examples / 2000}
            step = {**row, "loss": loss * 1.1, "batch_size": size, "variance": 3.0, "lr": config.lr}
            accuracy = 1 - 0.9 * math.exp(-3 * progress) + noise.uniform(-0.004, 0.004)
            scores = {metric.key: metric.of(loss * 1.2, accuracy) for metric in metrics}
            evaluation = {**row, "train_loss": loss, "test_loss": loss * 1.2, **scores}
            file.write(json.dumps(step) + "\n" + json.dumps(evaluation) + "\n")
    if status != "unfinished":
        write_json(path / "summary.json", {"status": status})
    return path


def write_sweep(out: Path, declared: Problem = PROBLEMS["cifar10"], **grid: Any) -> list[Path]:
    """The runs of a grid: CABS is fastest, small and large constant sizes are slower, 0.3 diverges for 16."""
    paths = []
    for config in Grid(problem=declared.name, **grid).configs(1, None):
        distance = abs(math.log10(config.lr / 0.06))
        by_role = {"ours": 1.25 - 0.2 * distance, "rival": 1.0 - 0.5 * distance}
        size = config.batch_size or 0
        speed = by_role.get(config.kind.role, 1.05 - abs(math.log2(size / 100 or 1)) * 0.08 - 0.45 * distance)
        diverges = size == 16 and config.lr == 0.3
        status = "diverged" if diverges else "finished"
        paths.append(write_run(out / run_name(config), config, status=status, speed=max(speed, 0.1)))
    return paths
