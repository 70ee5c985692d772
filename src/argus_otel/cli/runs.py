"""``argus runs``: which runs a store holds."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from argus_otel._runtime.errors import ConfigError
from argus_otel.store.opening import default_store, open_store, read_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.tables.schemas import RunSummary

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WIDE: Final = 1000
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("runs")(runs)


def runs(
    store: Annotated[
        str | None,
        typer.Option(
            help="A folder, or jaeger+http://HOST:16686. Default: ARGUS_STORE, else ./argus-store."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only runs that sent something so long ago: 30m, 2h, 7d.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="'Name: value' to send with each request; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs in a store, newest first."""
    since_ns = None if since is None else time.time_ns() - read_age_ns(since)
    opened = open_store(store or default_store(), read_headers(header or ()))
    found = opened.runs(since_ns)
    if as_json:
        typer.echo(json.dumps({"schema": "argus.runs/1", "runs": [asdict(run) for run in found]}))
    elif found:
        console = Console()
        if not console.is_terminal:
            console.width = _WIDE  # one line a run, for grep and logs
        console.print(_table(found))
    else:
        Console(stderr=True).print("No runs yet.")


def read_age_ns(text: str) -> int:
    """Nanoseconds of ``30m``, ``2h``, ``7d``.

    Raises:
        ConfigError: It does not read so.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            "--since",
            got=repr(text),
            expected="a number and one of s, m, h, d, w",
            fix="For example: --since 2h",
        )
    return int(float(match[1]) * _UNITS_S[match[2]] * 1e9)


def _table(found: Sequence[RunSummary]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "nonce", "attempt", "role", "service", "ranks", "steps", "started", "last"):
        right = name in ("attempt", "ranks", "steps")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for run in found:
        table.add_row(
            run.run_id,
            run.run[:8],
            str(run.attempt),
            run.role,
            run.service,
            f"{run.ranks_seen}/{run.world_size}",
            str(run.steps),
            _when(run.first_ns),
            _when(run.last_ns),
        )
    return table


def _when(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
