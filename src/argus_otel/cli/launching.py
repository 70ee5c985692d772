"""The environment in which a command's Python processes trace themselves, and its running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.instrumentation import auto_instrumentation

from argus_otel._runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOT_FOUND_EXIT_CODE = 127
"""What a shell returns for a command that does not exist."""


class CommandNotFoundError(ConfigError):
    """The command to run is not there."""

    exit_code = NOT_FOUND_EXIT_CODE


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
    """
    program = shutil.which(command[0]) or shutil.which(
        command[0], path=str(Path(sys.executable).parent)
    )
    if program is None:
        raise CommandNotFoundError(
            "the command after --",
            got=f"{command[0]!r}, which is not on the PATH",
            expected="a program, such as torchrun or python",
            fix="Install it, activate its environment, or give its full path.",
        )
    return [program, *command[1:]]


def run_and_wait(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command as a child, pass SIGINT and SIGTERM on to it, and wait for it.

    Returns:
        Its exit code; 128 + the signal's number where a signal ended it, as a shell says.
    """
    child = subprocess.Popen(command, env=dict(environ))  # noqa: S603 - the user's own command
    previous = {}

    def pass_on(number: int, _frame: object) -> None:
        # At a terminal Ctrl-C reaches the child by itself, being of the same group.
        if number != signal.SIGINT or not sys.stdin.isatty():
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, pass_on)
    try:
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
