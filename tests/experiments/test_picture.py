"""The picture of a run, also of one that has little to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_up
import pytest
from PIL import Image

from cabs.experiments.config import RunConfig
from cabs.experiments.picture import draw_run, interesting_from
from cabs.experiments.problems import DIGITS

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
    assert interesting_from([0, 100, 2_000], [0.1, 0.9, 0.98]) == pytest.approx(0.9 - 0.004 - 0.002)
    assert interesting_from([0, 40, 2_000], [0.1, 0.5, 0.98]) > 0.9
    assert interesting_from([0], [0.0]) == 0.0
