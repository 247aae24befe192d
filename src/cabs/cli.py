"""The ``cabs`` command. Each sub-command is a function in a module of its own; here they are put together."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

_EXTRA = """the cabs command needs more packages than the library: {name} is missing. Install them with
  pip install "torch-cabs[experiments]\""""


def main() -> int:
    """Run the command.

    Returns:
        The exit code: 0, 1 for a failure, 2 for a mistake on the command line, 130 after Ctrl-C.
    """
    try:
        from cabs.experiments.errors import CommandError

        app = _command()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "cabs":
            raise
        return _fail(_EXTRA.format(name=error.name), 1)
    warnings.formatwarning = _format_warning

    def command() -> int:
        if _one_of_several() and sys.argv[1:2] != ["train"]:
            return _fail("torchrun goes with cabs train only; run other commands without it", 2)
        try:
            app(prog_name="cabs")
        except CommandError as error:
            return _fail(str(error), error.exit_code)
        except OSError as error:
            # The system says what is wrong with a file; it is no bug of the program.
            return _fail(f"{error.filename or 'a file'}: {error.strerror or error}; fix it, then try again", 1)
        except MemoryError:
            return _fail("there is not enough memory; end other programs, or choose smaller batches", 1)
        except KeyboardInterrupt:
            return _fail("stopped", 130)
        return 0

    if not _one_of_several():
        return command()
    from cabs.experiments.runs.crew import run_together

    return run_together(command)


def _one_of_several() -> bool:
    """Whether this process is one of several that torchrun started."""
    variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in variables) and os.environ["WORLD_SIZE"] != "1"


def _app() -> Any:
    import typer

    from cabs._version import __version__
    from cabs.experiments.commands import bench, data
    from cabs.experiments.commands.probe import probe
    from cabs.experiments.commands.report import report
    from cabs.experiments.commands.sweep import sweep
    from cabs.experiments.commands.train import train

    app = typer.Typer(
        name="cabs",
        help="The batch-size autopilot for PyTorch: train, compare and report, as in the paper's experiments.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )

    def version(value: bool) -> None:
        if value:
            print(f"cabs {__version__}")
            raise typer.Exit

    @app.callback()
    def common(
        show: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Show the version."),
    ) -> None:
        pass

    app.command("train")(train)
    app.command("sweep")(sweep)
    app.command("report")(report)
    app.command("probe")(probe)
    bench.add_to(app)
    app.add_typer(data.app)
    return app


def _command() -> Any:
    import typer

    return _plain_flags(typer.main.get_command(_app()))


def _plain_flags(command: Any, parent: Any = None) -> Any:
    """A command whose help shows flags as what they are: some versions of typer would say ``--force <bool>``."""
    context = command.context_class(command, parent=parent, **command.context_settings)
    for child in getattr(command, "commands", {}).values():
        _plain_flags(child, context)
    for option in (*command.params, command.get_help_option(context)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return command


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    # Where in the code a warning arose does not help somebody at the command line.
    return f"cabs: note: {message}\n"


def _fail(message: str, code: int) -> int:
    # Names of files may hold bytes that no encoding knows.
    print(f"cabs: {message}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return code
