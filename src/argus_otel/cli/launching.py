"""The environment in which a command's Python processes trace themselves, and its running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from opentelemetry.instrumentation import auto_instrumentation

from argus_otel._runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOT_FOUND_EXIT_CODE = 127
"""What a shell returns for a command that does not exist."""


NOT_RUNNABLE_EXIT_CODE = 126
"""What a shell returns for a file that is there and cannot be run."""


class CommandNotFoundError(ConfigError):
    """The command to run is not there."""

    exit_code = NOT_FOUND_EXIT_CODE


class CommandNotRunnableError(ConfigError):
    """The system refuses to run the command."""

    exit_code = NOT_RUNNABLE_EXIT_CODE


def traced_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment in which Python starts with argus in it.

    The same as ``opentelemetry-instrument`` does (its ``sitecustomize`` first on PYTHONPATH),
    and argus named as the distribution, in case another is installed too.
    """
    traced = dict(environ)
    hook = str(Path(auto_instrumentation.__file__).parent)
    rest = [part for part in traced.get("PYTHONPATH", "").split(os.pathsep) if part]
    cwd = str(Path.cwd())
    paths = [hook, *([] if cwd in rest else [cwd]), *(part for part in rest if part != hook)]
    traced["PYTHONPATH"] = os.pathsep.join(paths)
    traced.setdefault("OTEL_PYTHON_DISTRO", "argus")
    traced.setdefault("OTEL_PYTHON_CONFIGURATOR", "argus")
    traced["ARGUS_LAUNCHED"] = f"{time.time():.3f}"  # noqa: TID251 - Unix time for the run's name
    return traced


def find_command(command: Sequence[str]) -> list[str]:
    """The command with its program's full path.

    A program beside this Python (``torchrun`` of an environment that is not activated) is found
    too.

    Raises:
        CommandNotFoundError: There is no such program.
        CommandNotRunnableError: There is a file of that name, and it is not executable.
    """
    program = shutil.which(command[0]) or shutil.which(
        command[0], path=str(Path(sys.executable).parent)
    )
    if program is None and os.sep in command[0] and Path(command[0]).is_file():
        raise CommandNotRunnableError(
            "the command after --",
            got=f"{command[0]!r}, a file that is not executable",
            expected="a program, such as torchrun or python",
            fix=f"For a Python script: -- python {command[0]}; else: chmod +x {command[0]}",
        )
    if program is None:
        raise CommandNotFoundError(
            "the command after --",
            got=f"{command[0]!r}, which is not on the PATH",
            expected="a program, such as torchrun or python",
            fix="Install it, activate its environment, or give its full path.",
        )
    return [program, *command[1:]]


def become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Put the command in this process's place.

    Raises:
        CommandNotRunnableError: The system refuses it.
    """
    sys.stdout.flush()
    try:
        os.execve(command[0], command, environ)  # noqa: S606 - the user's own command
    except OSError as error:
        raise _not_runnable(command[0], error) from error


def run_and_wait(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command as a child, pass SIGINT and SIGTERM on to it, and wait for it.

    Returns:
        Its exit code; 128 + the signal's number where a signal ended it, as a shell says.

    Raises:
        CommandNotRunnableError: The system refuses it.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        # At a terminal Ctrl-C reaches the child by itself, being of the same group.
        if number == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty():
            return
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    # Before the child is there: a signal in between would leave it behind alone.
    previous = {
        number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        try:
            child = subprocess.Popen(command, env=dict(environ))  # noqa: S603 - the user's own
        except OSError as error:
            raise _not_runnable(command[0], error) from error
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _not_runnable(program: str, error: OSError) -> CommandNotRunnableError:
    return CommandNotRunnableError(
        "the command after --",
        got=f"{program!r}, which cannot be run ({error.strerror or error})",
        expected="a program, or a script with an interpreter in its first line",
        fix="For a Python script: argus run -- python SCRIPT.",
    )
