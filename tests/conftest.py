import os
from pathlib import Path

# Some virtual machines announce AMX and do not have it; torch itself then dies in bfloat16 kernels.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

# Tensors of tests are tiny: a second thread only waits, and the more so where other programs run.
torch.set_num_threads(1)

SLOW = {"benchmarks", "distributed", "experiments", "soak", "test_cli.py", "test_compile.py", "test_lightning.py"} | {
    "test_budgets.py", "test_fuzz.py", "test_horizon.py", "test_probe_command.py", "test_sizes.py",
    "test_transformers.py", "test_transformers_requirements.py", "test_transformers_resuming.py",
}  # fmt: skip
"""Folders and files of tests that start processes, train, compile, draw or make many steps: not in the quick run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if SLOW & set(item.path.relative_to(here).parts):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
