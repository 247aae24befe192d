"""A process ends well while a thread of gloo has yet to let go of its last sums."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LEAVING = """
import pathlib, sys, time
import torch, torch.distributed as dist
from cabs.parallel.sums import all_reduce_then, start_all_reduce

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

rank, ready = int(sys.argv[1]), pathlib.Path("ready")
dist.init_process_group("gloo", init_method=f"file://{pathlib.Path.cwd()}/store", rank=rank, world_size=2)
group = dist.group.WORLD  # as a model holds it, so that destroying it does not wait for its threads
while rank == 1 and not ready.exists():
    time.sleep(0.01)
futures = all_reduce_then(torch.ones(3), group, lambda summed: summed)
if rank == 0:
    futures[-1].add_done_callback(lambda future: time.sleep(0.5))  # so long has the thread yet to do
    ready.touch()
print(futures[-1].wait().tolist(), start_all_reduce(torch.ones(1))().item())
dist.destroy_process_group()
sys.slow = Slow()  # freed as the interpreter goes: the thread comes back meanwhile
"""


def test_the_interpreter_waits_for_callbacks(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    processes = [
        subprocess.Popen(
            [sys.executable, "leaving.py", str(rank)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert output.splitlines() == ["[2.0, 2.0, 2.0] 2.0"], errors
        assert (process.returncode, errors) == (0, "")
