"""The command-line reference as Markdown, from the commands themselves; run by ``make semconv``."""

from __future__ import annotations

import sys

import typer
from typer.cli import get_docs_for_click

from argus_otel.cli.main import app, register_commands

_EXIT_CODES = """
## Exit codes

| code | of | meaning |
|---|---|---|
| 0 | all | done; `argus detect`: nothing above info |
| 1 | `argus detect` | something above info was found |
| 1 | `argus watch --once` | something above info is open |
| 1 | `argus compare` | something is slower, with its whole interval beyond the threshold |
| 1 | `argus convert` | converted, but for files that were left out |
| 1 | `argus doctor` | something failed |
| 1 | `argus demo` | what was found is not what was planted |
| 1 | `argus stack status` | it is not running |
| 2 | all | wrong usage or a bad setting |
| 3 | `argus detect`, `watch --once`, `compare` | too little is there to judge by |
| 4 | `argus detect`, `runs`, `report`, `compare`, `watch --once` | the store could not be read |
| 5 | `argus stack` | it could not be built or started |
| 5 | `argus simulate --otlp` | the endpoint did not take the run |
| 70 | all | an error in argus itself, which says how to report it |
| 126, 127 | `argus run` | the command cannot be run, or is not there |
| 130 | all | ended with Ctrl-C, where that is not how it is meant to end |
| other | `argus run` | the command's own; 128 + the signal's number where one ended it |
"""


def render_page() -> str:
    """Every command with its arguments and options, and the exit codes."""
    register_commands("")
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="argus")
    text = get_docs_for_click(obj=command, ctx=context, name="argus", title="Command line")
    return text.rstrip() + "\n" + _EXIT_CODES


if __name__ == "__main__":
    sys.stdout.write(render_page())
