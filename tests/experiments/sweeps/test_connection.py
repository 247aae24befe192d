"""The way to a Ray cluster: addresses, resources, and what is said when there is no way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console
from test_ray import free_port, sweep
from typer.testing import CliRunner

from cabs.cli import _app
from cabs.experiments.errors import CommandError, UsageError
from cabs.experiments.sweeps.connection import Resources, check_address, parse_memory
from cabs.experiments.sweeps.grid import Grid
from cabs.experiments.sweeps.sweep import run_sweep


def test_the_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "distributed.md").read_text()
    lines = [line for line in guide.splitlines() if line.startswith("cabs sweep") and "--ray" in line]
    assert len(lines) >= 3
    monkeypatch.chdir(tmp_path)
    for line in lines:
        result = CliRunner().invoke(_app(), [*line.split()[1:], "--dry-run"])
        assert result.exit_code == 0, (line, result.output, result.exception)
        assert result.output.count("waiting") == 60


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for address in (f"127.0.0.1:{free_port()}", f"ray://127.0.0.1:{free_port()}"):
        code, said = sweep(tmp_path / "out", "--ray", address)
        assert code == 1
        assert f"--ray {address}: nobody answers" in said
        assert "ray start --head" in said
    assert not (tmp_path / "out").exists()


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    grid = Grid(problem="digits", examples=1000)
    with pytest.raises(CommandError, match=r"pip install \"torch-cabs\[ray\]\""):
        run_sweep(grid, tmp_path / "out", Console(), slots=None, retries=0, data=None, dry_run=False, ray="auto")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["", "local", "host", "host:", "http://host:1", "ray://host", "a b:1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="an address is auto, HOST:PORT or ray://HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize("address", ["auto", "host:6379", "ray://10.0.0.1:10001", "ray://[::1]:10001"])
def test_addresses(address: str) -> None:
    check_address(address)  # raises nothing


def test_resources() -> None:
    assert parse_memory("1.5GiB") == 3 * 2**29
    assert parse_memory("500M") == 500 * 2**20
    assert parse_memory("1024") == 1024
    for text in ("", "much", "-1G", "0"):
        with pytest.raises(UsageError, match="write it like 500M or 2G"):
            parse_memory(text)
    for wrong in ({"cpus": 0.0}, {"gpus": -1.0}):
        with pytest.raises(UsageError, match="-per-run"):
            Resources(**wrong)
    assert Resources(cpus=2.5).threads == 2
    assert Resources(cpus=0.5).threads == 1
    assert Resources(gpus=1).fit({"CPU": 1, "GPU": 1})
    assert not Resources(gpus=1).fit({"CPU": 1})
