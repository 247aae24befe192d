from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from cabs import cli


@pytest.fixture
def cabs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: gives its exit code, and what it says."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cabs", *arguments])
        capsys.readouterr()
        try:
            code = cli.main()
        except SystemExit as end:
            code = int(str(end.code))
        return code, *capsys.readouterr()

    return run
