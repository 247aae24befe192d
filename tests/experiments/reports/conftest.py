from __future__ import annotations

from pathlib import Path

import made_up
import pytest


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep")
    made_up.write_sweep(path, examples=400_000, seeds=(0, 1))
    return path
