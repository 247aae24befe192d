"""Every Python snippet of the README and the guides runs as it stands, those of one page after one another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


SCRIPT = "# train.py\n"


def code(page: str) -> list[str]:
    blocks = re.findall(r"^```(python|diff)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [after(text) if kind == "diff" else text for kind, text in blocks]


def after(diff: str) -> str:
    """What a diff makes of a file."""
    return "".join(line[2:] or "\n" for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def snippets(page: str) -> list[str]:
    return [text for text in code(page) if not text.startswith(SCRIPT)]


def scripts() -> list[str]:
    return [text for page in PAGES for text in code(page) if text.startswith(SCRIPT)]


@pytest.mark.filterwarnings("ignore:the model was being measured already")
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_snippets(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs, targets = torch.randn(600, 6), torch.randint(0, 3, (600,))
    scope = {
        "model": torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)),
        "dataset": TensorDataset(inputs, targets),
        "inputs": inputs[:20],
        "targets": targets[:20],
    }
    for snippet in snippets(page):
        exec(compile(snippet, page, "exec"), scope)


@pytest.mark.slow
@pytest.mark.parametrize("script", scripts(), ids=range(len(scripts())))
def test_scripts_run_with_two_processes(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(\[Gloo\] .*\n)*the last batch size is \d+\n", done.stdout)  # some releases greet


def test_the_readme_has_the_contract() -> None:
    (loop, *_) = snippets("README.md")
    assert "scheduler.step(loss)" in loop


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
