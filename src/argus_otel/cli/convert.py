"""``argus convert``: traces of other tools into a store that the other commands read."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeAlias

import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from argus_otel.convert.bytedance import convert_bytedance
from argus_otel.convert.flight_recorder import convert_flight_recorder
from argus_otel.convert.kineto import convert_kineto
from argus_otel.report.wording import counted
from argus_otel.store.bulk import write_run
from argus_otel.store.opening import local_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from argus_otel.convert.conversion import Conversion
    from argus_otel.tables.schemas import RunSummary, RunTables

app = typer.Typer(
    help="Bring traces of other tools into a store, for argus runs, detect and report.",
    no_args_is_help=True,
)

SKIPPED: Final = 1
"""Exit code: converted, but for files that were left out."""
_SHOWN: Final = 12
_TABLES: Final = ("steps", "collectives", "micro_batches", "events", "devices", "heartbeats")

Paths: TypeAlias = Annotated[list[Path], typer.Argument(help="Files, archives (tar) or folders.")]
Out: TypeAlias = Annotated[
    str, typer.Option(help="Folder of the store to write to; created where there is none.")
]
RunId: TypeAlias = Annotated[
    str | None, typer.Option(help="What to call the run. Default: what the source is called.")
]
KeepGoing: TypeAlias = Annotated[
    bool, typer.Option("--keep-going", help="Leave out files that cannot be read, and say which.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Converter(Protocol):
    """One of the sources of ``argus_otel.convert``."""

    def __call__(
        self,
        paths: Sequence[Path],
        *,
        run_id: str | None,
        keep_going: bool,
        advance: Callable[[int], None] | None,
    ) -> list[Conversion]:
        """Runs from files."""
        ...


def register(parent: typer.Typer) -> None:
    """Put ``convert`` among the commands of ``argus``."""
    parent.add_typer(app, name="convert")


@app.command()
def bytedance(
    paths: Paths,
    out: Out,
    run_id: RunId = None,
    keep_going: KeepGoing = False,
    as_json: AsJson = False,
) -> None:
    """Operation traces of ByteDance's StragglerAnalysis: one run for each Parquet file."""
    _convert(convert_bytedance, paths, out, run_id, keep_going=keep_going, as_json=as_json)


@app.command()
def kineto(
    paths: Paths,
    out: Out,
    run_id: RunId = None,
    keep_going: KeepGoing = False,
    as_json: AsJson = False,
) -> None:
    """Traces of torch.profiler, one or more a rank: all together are one run."""
    _convert(convert_kineto, paths, out, run_id, keep_going=keep_going, as_json=as_json)


@app.command("flight-recorder")
def flight_recorder(
    paths: Paths,
    out: Out,
    run_id: RunId = None,
    keep_going: KeepGoing = False,
    as_json: AsJson = False,
) -> None:
    """Dumps of torch's flight recorder, one a rank: all together are one run that hangs.

    Pickles are read as plain data: one that asks for code is refused.
    """
    _convert(convert_flight_recorder, paths, out, run_id, keep_going=keep_going, as_json=as_json)


def _convert(
    convert: Converter,
    paths: Sequence[Path],
    out: str,
    run_id: str | None,
    *,
    keep_going: bool,
    as_json: bool,
) -> None:
    store = local_folder(out)
    done: list[tuple[RunSummary, Conversion, Counter[str]]] = []
    with _progress() as advance:
        for conversion in convert(paths, run_id=run_id, keep_going=keep_going, advance=advance):
            rows: Counter[str] = Counter()
            written = write_run(store, conversion.summary, _counting(conversion.blocks, rows))
            done.append((written, conversion, rows))
    if as_json:
        runs = [_document(*one) for one in done]
        typer.echo(json.dumps({"schema": "argus.convert/1", "store": str(store), "runs": runs}))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for one in done:
            _print(console, *one)
        console.print(
            f"Next: argus detect --store {store} --run {done[-1][0].run[:8]}", markup=False
        )
    if any(conversion.account.skipped for _, conversion, _ in done):
        raise typer.Exit(SKIPPED)


def _counting(blocks: Iterable[RunTables], rows: Counter[str]) -> Iterator[RunTables]:
    for block in blocks:
        for table in _TABLES:
            rows[table] += getattr(block, table).num_rows
        yield block


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Bytes read so far, where somebody watches."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("Converting"), DownloadColumn(), TimeElapsedColumn())
    console.quiet = not console.is_terminal  # older versions of rich end with an empty line
    with Progress(*columns, console=console, transient=True, disable=console.quiet) as shown:
        task = shown.add_task("", total=None)
        yield lambda read: shown.advance(task, read)


def _document(run: RunSummary, conversion: Conversion, rows: Counter[str]) -> dict[str, Any]:
    account = conversion.account
    return {
        **asdict(run),
        "rows": {table: rows[table] for table in _TABLES},
        "files": account.files,
        "skipped": [{"file": name, "why": why} for name, why in account.skipped],
        "records_read": account.read,
        "mapped": dict(account.mapped.most_common()),
        "unmapped": dict(account.unmapped.most_common()),
        "notes": account.notes,
    }


def _print(console: Console, run: RunSummary, conversion: Conversion, rows: Counter[str]) -> None:
    account = conversion.account
    made = ", ".join(
        f"{rows[table]:,} {table.replace('_', '-')}" for table in _TABLES if rows[table]
    )
    lines = [
        (
            f"{run.run_id} ({run.run[:8]}): {run.ranks_seen} of {counted(run.world_size, 'rank')}, "
            f"{counted(run.steps, 'step')}"
        ),
        f"  rows      {made or 'none'}",
        (
            f"  read      {account.read:,} records in {counted(account.files, 'file')}; "
            f"{account.mapped.total():,} of use"
        ),
    ]
    if account.unmapped:
        lines.append(f"  not used  {_most(account.unmapped)}")
    lines += [f"  note      {note}" for note in account.notes]
    lines += [f"  skipped   {name} is {why}" for name, why in account.skipped]
    for line in lines:
        console.print(line, markup=False)


def _most(kinds: Counter[str]) -> str:
    shown = [f"{count:,} {kind}" for kind, count in kinds.most_common(_SHOWN)]
    more = len(kinds) - len(shown)
    return ", ".join([*shown, f"{more} more kinds"] if more > 0 else shown)
