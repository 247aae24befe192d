import os
from pathlib import Path

# Some virtual machines announce AMX and do not have it; torch itself then dies in bfloat16 kernels.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

SLOW = {"benchmarks", "distributed", "experiments", "soak"}
"""Folders of tests that start processes, train or draw; the quick run leaves them out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
