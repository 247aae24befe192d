"""The picture of a run, also of one that has little to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_up
import pytest
from PIL import Image

from cabs.experiments.problems import DIGITS
from cabs.experiments.problems.problem import ACCURACY, PERPLEXITY
from cabs.experiments.runs.config import RunConfig
from cabs.experiments.runs.picture import draw_run
from cabs.experiments.runs.ranges import interesting_range

CONFIG = RunConfig.make(DIGITS, {"examples": 10_000})
STEP = {"examples": 16, "step": 1, "seconds": 0.1, "loss": 2.0, "batch_size": 16, "variance": None, "lr": 0.1}
NOTHING_RIGHT = {"examples": 0, "step": 0, "seconds": 0.0, "train_loss": 2.3, "test_loss": 2.3, "test_accuracy": 0.0}


@pytest.mark.parametrize("rows", [[], [STEP], [NOTHING_RIGHT], [NOTHING_RIGHT, STEP]])
def test_a_run_that_has_hardly_begun(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Image.open(draw_run(path)) as image:
        assert image.size == (1152, 1216)


def test_a_whole_run(tmp_path: Path) -> None:
    path = made_up.write_run(tmp_path / "run", CONFIG)
    with Image.open(draw_run(path)) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**24)}
    assert {(0xD1, 0x49, 0x5B), (0x30, 0x63, 0x8E), (0x2E, 0x93, 0x3C)} <= colours  # batch size, loss, accuracy


def test_the_axis_of_accuracies_leaves_out_the_first_examples() -> None:
    low, high = interesting_range([([0, 200, 2_000], [0.1, 0.9, 0.98])], ACCURACY)
    assert low == pytest.approx(0.9 - 0.004 - 0.002)
    assert 0.98 < high < 0.99
    assert interesting_range([([0, 40, 2_000], [0.1, 0.5, 0.98])], ACCURACY)[0] > 0.9
    low, high = interesting_range([([0], [0.0])], ACCURACY)
    assert low == 0.0 < high


def test_the_axis_of_perplexities_does_so_at_its_other_end() -> None:
    low, high = interesting_range([([0, 200, 2_000], [65.0, 12.0, 5.0])], PERPLEXITY)
    assert 4 < low < 5
    assert 12 < high < 13
    assert interesting_range([([0, 40, 2_000], [65.0, 30.0, 5.0])], PERPLEXITY)[1] < 6
