"""The ``argus`` command: puts the sub-commands together and turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Final

import typer
from rich.console import Console

from argus_otel._runtime.errors import ArgusError

BROKEN: Final = 70
"""Exit code of an error in argus itself: EX_SOFTWARE of sysexits.h."""
INTERRUPTED: Final = 130
"""128 and the number of SIGINT, as a shell has it."""
DEBUG_VARIABLE: Final = "ARGUS_DEBUG"
_REPORT: Final = (
    f"Please report it with the output of `argus doctor`; {DEBUG_VARIABLE}=1 shows the traceback."
)

# Module of each command, in the order that help lists them. Each has `register(app)`.
_COMMANDS = (
    "run",
    "demo",
    "doctor",
    "runs",
    "detect",
    "report",
    "compare",
    "watch",
    "simulate",
    "convert",
    "detectors",
    "serve",
    "stack",
)

app = typer.Typer(
    name="argus",
    help="See and diagnose distributed PyTorch training, as OpenTelemetry.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"argus-otel {version('argus-otel')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of the whole command."""
    del show_version


def register_commands(asked: str) -> None:
    """Add the command that was asked for, or all where that is none of ours.

    Loading just the one keeps ``argus run`` quick: pyarrow and plotly take a second each.
    """
    for name in (asked,) if asked in _COMMANDS else _COMMANDS:
        try:
            module = importlib.import_module(f"argus_otel.cli.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("argus_otel"):
                raise
            _register_missing(name, error.name)
        else:
            module.register(app)


def main() -> None:
    """Run ``argus``; never a traceback for what a person or a server did."""
    # Never cut at 80 columns: a log or an issue shall have the commands in one piece.
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        register_commands(asked)
        app()
    except ArgusError as error:
        console.print(f"argus: {error}", style="red", markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - 1, Python's code for it, says that something was found
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        command = f"argus {asked}" if asked in _COMMANDS else "argus"
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        console.print(f"argus: {command} failed for a reason of its own, {what}.\n{_REPORT}",
                      style="red", markup=False)  # fmt: skip
        sys.exit(BROKEN)


def _register_missing(name: str, package: str) -> None:
    def refuse() -> None:
        raise ArgusError(
            f"argus {name}",
            got=f"called without the package {package!r}",
            expected="the packages that reading and diagnosing needs",
            fix="Install them: pip install 'argus-otel[service]'",
        )

    app.command(
        name,
        help="Needs: pip install 'argus-otel[service]'",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(refuse)
