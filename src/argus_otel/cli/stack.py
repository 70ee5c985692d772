"""``argus stack``: a real Collector and Jaeger on this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console
from rich.markup import escape

from argus_otel.stack.build import Binaries, build_stack
from argus_otel.stack.control import bring_up, read_status, take_down

if TYPE_CHECKING:
    from argus_otel.stack.control import StackStatus

app = typer.Typer(
    help="Build, start, check and stop a Collector and Jaeger on this machine.",
    no_args_is_help=True,
)

_NOT_RUNNING = 1
# Where nobody watches (CI), a cold build prints about twenty lines, not two thousand.
_LOG_EVERY_S = 15.0

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def register(parent: typer.Typer) -> None:
    """Put ``stack`` among the commands of ``argus``."""
    parent.add_typer(app, name="stack")


@app.command()
def up(
    config: Annotated[
        str, typer.Option(help="local, gateway, agent, or a Collector configuration file.")
    ] = "local",
    decision_wait_s: Annotated[
        float | None, typer.Option(help="Seconds that the tail sampler waits for a step's ranks.")
    ] = None,
    jaeger: Annotated[bool, typer.Option(help="Start Jaeger behind the Collector.")] = True,
    collector_bin: Annotated[
        Path | None,
        typer.Option(help="A Collector you have (otelcol-contrib); else ours is built."),
    ] = None,
    jaeger_bin: Annotated[
        Path | None, typer.Option(help="A Jaeger v2 you have; else one is built.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start both, on their usual ports where those are free. Builds them the first time."""
    with _progress() as report:
        binaries = _binaries(collector_bin, jaeger_bin, report, jaeger_wanted=jaeger)
        status = bring_up(
            config=config,
            decision_wait_s=decision_wait_s,
            jaeger=jaeger,
            binaries=binaries,
            on_progress=report,
        )
    _show(status, as_json=as_json)


@app.command()
def down() -> None:
    """Stop both. The Collector passes on what it holds; Jaeger's traces are in memory and go."""
    with _progress() as report:
        stopped = take_down(on_progress=report)
    print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show what runs and where. Exit code 0 when all of it does, 1 otherwise."""
    now = read_status()
    _show(now, as_json=as_json)
    if now.state != "running":
        raise typer.Exit(_NOT_RUNNING)


@app.command()
def build() -> None:
    """Build both into the cache folder (ARGUS_CACHE_DIR), so that `up` starts at once."""
    with _progress() as report:
        binaries = build_stack(on_progress=report)
    print(f"collector  {binaries.collector}\njaeger     {binaries.jaeger}")


class _progress:  # noqa: N801  (used as a function)
    """Shows what goes on, on standard error: one line that changes, or in a log a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("")
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, line: str) -> None:
        text = escape(line[:160])
        if self._console.is_terminal:
            self._status.update(text)
        elif time.monotonic() >= self._next_line_s:
            self._console.print(text, highlight=False)
            self._next_line_s = time.monotonic() + _LOG_EVERY_S


def _binaries(
    collector: Path | None, jaeger: Path | None, report: _progress, *, jaeger_wanted: bool
) -> Binaries | None:
    """Give what the caller named, and build only what is needed beside it."""
    if collector and (jaeger or not jaeger_wanted):
        return Binaries(collector=collector, jaeger=jaeger or collector)
    if collector or jaeger:
        built = build_stack(on_progress=report)
        return Binaries(collector=collector or built.collector, jaeger=jaeger or built.jaeger)
    return None


def _show(status: StackStatus, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status.as_json(), indent=2))
        return
    print(f"stack: {status.state}" + (f" ({status.record.config})" if status.record else ""))
    for part in status.parts:
        condition = "healthy" if part.healthy else "not healthy" if part.alive else "ended"
        print(f"  {part.record.name:<18}{condition:<12}pid {part.record.pid:<8}{part.record.log}")
    for name, url in (status.record.urls if status.record else {}).items():
        print(f"  {name:<18}{url}")
    if status.record and status.state == "running":
        # The exporters' default is 4318, which may have been somebody else's.
        print(f"\nexport OTEL_EXPORTER_OTLP_ENDPOINT={status.record.urls['otlp_http']}")
