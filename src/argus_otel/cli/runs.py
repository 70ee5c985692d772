"""``argus runs``: which runs a store holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from argus_otel.cli.options import Headers, Since, StoreUrl, begin_ns, newest_before, opened, when

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.tables.schemas import RunSummary

_WIDE: Final = 1000


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("runs")(runs)


def runs(
    store: StoreUrl = None,
    since: Since = None,
    header: Headers = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs in a store, newest first."""
    source, _ = opened(store, header)
    found = source.runs(begin_ns(since))
    if as_json:
        typer.echo(json.dumps({"schema": "argus.runs/1", "runs": [asdict(run) for run in found]}))
    elif found:
        console = Console()
        if not console.is_terminal:
            console.width = _WIDE  # one line a run, for grep and logs
        console.print(_table(found))
    else:
        newest = None if since is None else newest_before(source, since)
        text = "No runs yet." if newest is None else f"No run in the last {since}. {newest}"
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


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
            when(run.first_ns),
            when(run.last_ns),
        )
    return table
