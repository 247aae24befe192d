import os
import sys
from pathlib import Path

# Some virtual machines announce AMX and do not have it; torch itself then dies in bfloat16 kernels.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

# Helpers that tests share are plain modules beside them.
for folder in (".", "distributed", "scheduler", "variance"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
