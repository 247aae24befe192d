"""The command as a user meets it: real processes, real signals, exit codes and words."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cabs import cli

# The norm test moves its batch sizes from the first steps on.
SHORT = (
    "--rule",
    "norm-test",
    "--theta",
    "0.6",
    "--examples",
    "2400",
    "--eval-every",
    "400",
    "--checkpoint-every",
    "300",
    "--log-every",
    "50",
)


def start(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "cabs", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    process = start(*arguments, cwd=cwd, **environment)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def in_process(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command, without a new process; for mistakes that are found early."""
    monkeypatch.setattr(sys, "argv", ["cabs", *arguments])
    try:
        return cli.main()
    except SystemExit as end:
        return int(str(end.code))


def numbers(path: Path) -> str:
    return re.sub(r'"seconds":[0-9.e-]+', "", (path / "metrics.jsonl").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    base = tmp_path_factory.mktemp("runs")
    code, out, err = run("train", "digits", "--out", "run", *SHORT, cwd=base)
    assert (code, err) == (0, "")
    assert "test accuracy" in out
    assert f"picture        {Path('run/picture.png')}" in out
    return base / "run"


def test_a_run_leaves_its_files(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    checkpoints = {"checkpoint.pt", "checkpoint-previous.pt"}
    assert names == {"config.json", "metrics.jsonl", *checkpoints, "summary.json", "picture.png"}
    assert json.loads((finished / "summary.json").read_text())["status"] == "finished"


def size_of(path: Path) -> int:
    """0 if there is no such file, which a run that starts over removes at any moment."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_killed_at_random_moments_and_resumed_it_is_the_same_run(finished: Path, tmp_path: Path) -> None:
    choice = random.Random(4)
    path = tmp_path / "run"
    arguments = ["train", "digits", "--out", str(path), *SHORT]
    kills = 0
    for _ in range(2):
        process = start(*arguments, cwd=tmp_path)
        wanted = size_of(path / "metrics.jsonl") + choice.randrange(1, 2500)
        while process.poll() is None:
            if size_of(path / "metrics.jsonl") >= wanted:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        process.communicate()
        arguments = ["train", "--out", str(path), "--resume"]
    assert kills > 0
    code, _, err = run(*arguments, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert numbers(path) == numbers(finished)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_leaves_a_run_that_resumes(finished: Path, tmp_path: Path, number: int, expected: int) -> None:
    path = tmp_path / "run"
    process = start("train", "digits", "--out", str(path), *SHORT, cwd=tmp_path)
    while not ((path / "metrics.jsonl").exists() and (path / "metrics.jsonl").stat().st_size > 1500):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == expected
    assert f"cabs train digits --out {path} --resume" in err
    assert "Traceback" not in err
    assert json.loads((path / "summary.json").read_text())["status"] == "interrupted"
    assert numbers(path) != numbers(finished)
    if number == signal.SIGINT:
        assert run("train", "--out", str(path), "--resume", cwd=tmp_path)[0] == 0
        assert numbers(path) == numbers(finished)


def test_a_second_run_is_refused_unless_asked_for(finished: Path, monkeypatch, capsys) -> None:
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert in_process(monkeypatch, "train", "digits", "--out", str(finished)) == 2
    assert "--resume" in capsys.readouterr().err
    assert in_process(monkeypatch, "train", "--out", str(finished), "--resume", "--force") == 2
    assert in_process(monkeypatch, "train", "--out", str(finished), "--resume", "--lr", "9") == 2
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "imagenet"], "no problem is called 'imagenet'"),
        (["train", "--rule", "constant"], "--batch-size"),
        (["train", "--examples", "lots"], "400k"),
        (["train", "--lr", "-1"], "--lr"),
        (["train", "--lr", "fast"], "--lr"),
        (["train", "--resume"], "--resume needs --out"),
        (["train", "--from-previous"], "it goes with --resume"),
        (["train", "--unknown"], "--unknown"),
        (["train", "--theta", "0.5"], "--theta goes with --rule norm-test"),
        (["nothing"], "nothing"),
        (["sweep"], "which problem"),
        (["sweep", "digits", "--jobs", "0"], "--jobs 0"),
        (["sweep", "digits", "--lrs", "x"], "lrs cannot be 'x'"),
        (["sweep", "digits", "--ray", "local"], "an address is auto, HOST:PORT or ray://HOST:PORT"),
        (["sweep", "digits", "--cpus-per-run", "2"], "--cpus-per-run goes with --ray"),
        (["sweep", "digits", "--ray", "auto", "--memory-per-run", "much"], "write it like 500M or 2G"),
        (["report"], "DIR"),
        (["report", "nowhere"], "no such directory"),
        (["report", ".", "--perplexity", "0.5"], "--perplexity 0.5: must be at least 1"),
        (["train", "--optimizer", "lion"], "no optimizer is called 'lion'"),
        (["sweep", "digits", "--optimizers", "lion"], "no optimizer is called 'lion'"),
        (["bench", "--size", "0"], "Invalid value for '--size'"),
        (["bench", "--size", "-16"], "Invalid value for '--size'"),
        (["bench", "--threads", "100000"], "Invalid value for '--threads'"),
        (["bench", "--network", "nonsense"], "no network 'nonsense': choose of mnist"),
        (["bench", "--contender", "nonsense"], "no contender 'nonsense': choose of plain"),
        (["bench", "--out", "nowhere/x"], "nowhere is not a directory"),
        (["report", ".", "--accuracy", "98"], "0.98"),
        (["data", "fetch", "imagenet"], "no data set is called 'imagenet'"),
        (["data", "fetch", "digits"], "comes with the package"),
    ],
)
def test_mistakes_get_two_and_a_word_about_it(monkeypatch, capsys, tmp_path, arguments, words) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, *arguments) == 2
    output = capsys.readouterr()
    assert words in re.sub(r"[│\s]+", " ", output.err)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_before_training_starts(monkeypatch, tmp_path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cabs.experiments.runs.session.train", interrupted)
    assert in_process(monkeypatch, "train", "--out", str(tmp_path / "run")) == 130


def test_processes_that_were_started_again_replace_nothing(monkeypatch, capsys, tmp_path) -> None:
    path = tmp_path / "run"
    short = ("--out", str(path), "--examples", "100", "--rule", "constant", "--batch-size", "50")
    assert in_process(monkeypatch, "train", *short) == 0
    before = (path / "metrics.jsonl").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert in_process(monkeypatch, "train", *short, "--force") == 2
    assert "use --resume" in capsys.readouterr().err
    assert (path / "metrics.jsonl").read_bytes() == before
    assert in_process(monkeypatch, "train", "--out", str(path), "--resume") == 0


def test_missing_data_gets_one_and_says_how_to_get_it(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("CABS_DATA", str(tmp_path))
    assert in_process(monkeypatch, "train", "mnist", "--out", str(tmp_path / "run")) == 1
    assert "cabs data fetch mnist" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [[], ["train"], ["sweep"], ["report"], ["bench"], ["data"], ["data", "fetch"]])
def test_help(monkeypatch, capsys, command) -> None:
    assert in_process(monkeypatch, *command, "-h") == 0
    short = capsys.readouterr().out
    assert in_process(monkeypatch, *command, "--help") == 0
    output = capsys.readouterr().out
    assert "Usage" in output
    assert output == short
    assert "--help" in output
    assert not re.search("bool", output, re.IGNORECASE)  # a flag takes no value


def test_version(monkeypatch, capsys) -> None:
    assert in_process(monkeypatch, "--version") == 0
    assert re.fullmatch(r"cabs \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_data_commands(monkeypatch, capsys, tmp_path) -> None:
    assert in_process(monkeypatch, "data", "list", "--data", str(tmp_path)) == 0
    listed = capsys.readouterr().out
    assert "in this package" in listed
    assert "cabs data fetch cifar100" in listed
    assert in_process(monkeypatch, "data", "check", "digits") == 0
    assert "1,438 training and 359 test images of 1×8×8" in capsys.readouterr().out


def test_without_the_extra_packages_the_command_says_which(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.main() == 1
    assert 'pip install "torch-cabs[experiments]"' in capsys.readouterr().err


def test_a_sweep_and_its_report(tmp_path: Path) -> None:
    grid = ("--rules", "cabs,constant", "--sizes", "32", "--lrs", "0.1", "--examples", "800", "--eval-every", "400")
    code, out, err = run("sweep", "digits", "--out", "sweep", "--jobs", "2", *grid, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "CABS" in out
    assert "Constant 32" in out
    code, out, err = run("report", "sweep", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "Digits, 800 examples: 2 methods, 2 runs" in out
    assert (tmp_path / "sweep" / "report" / "report.html").stat().st_size > 1_000_000
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["best"].keys() == {"CABS", "Constant 32"}
