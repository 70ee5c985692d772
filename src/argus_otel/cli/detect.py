"""``argus detect``: which rank, which cause, what it costs, and what to do now."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from argus_otel import service
from argus_otel._runtime.errors import ArgusError
from argus_otel.cli.runs import read_age_ns
from argus_otel.report.json import render_json
from argus_otel.report.text import print_view
from argus_otel.store.opening import default_store, open_store, read_headers

if TYPE_CHECKING:
    from argus_otel.store.protocol import Store


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("detect")(detect)


def detect(
    store: Annotated[
        str | None,
        typer.Option(
            help="A folder, or jaeger+http://HOST:16686. Default: ARGUS_STORE, else ./argus-store."
        ),
    ] = None,
    run: Annotated[str, typer.Option(help="latest, a run id, or the start of a nonce.")] = "latest",
    since: Annotated[
        str | None, typer.Option(help="Only runs that sent something so long ago: 30m, 2h, 7d.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="'Name: value' to send with each request; may be repeated."),
    ] = None,
    detectors: Annotated[
        list[Path] | None,
        typer.Option(help="A folder with more detectors; may be repeated."),
    ] = None,
    ui_url: Annotated[
        str | None,
        typer.Option(help="Address of Jaeger's pages, for links: http://jaeger:16686."),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Where verdicts go as spans. Default: OTEL_EXPORTER_OTLP_ENDPOINT, else the "
            "store if it is a folder."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Publish nothing, only say it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All the evidence.")] = False,
) -> None:
    """Say what slows a run down, and write the verdict into its traces.

    Exit codes: 0 nothing above info, 1 something found, 2 wrong usage, 3 every detector abstained,
    4 the store could not be read.
    """
    since_ns = None if since is None else time.time_ns() - read_age_ns(since)
    url = store or default_store()
    headers = read_headers(header or ())
    opened = open_store(url, headers)
    judged = service.judge(
        opened,
        run,
        since_ns=since_ns,
        detector_folders=detectors or (),
    )
    view = service.view_of(judged, ui_url=ui_url or service.default_ui_url(url))
    if as_json:
        typer.echo(render_json(view))
    else:
        print_view(Console(), view, verbose=verbose)
    if not dry_run and judged.verdict.diagnosis.findings:
        _publish(judged, opened, url, otlp_endpoint, verbose=verbose)
    raise typer.Exit(judged.exit_code)


def _publish(
    judged: service.Judged, store: Store, url: str, endpoint: str | None, *, verbose: bool
) -> None:
    """A verdict that cannot be published still stands: say so, and keep the exit code."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        sent = service.publish(
            judged,
            store,
            url,
            endpoint=endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        )
    except ArgusError as error:
        errors.print(f"argus: not published: {error}", markup=False)
        return
    if sent is None:
        errors.print(
            "argus: not written into the traces: give --otlp-endpoint (a Collector's OTLP/HTTP "
            "address), or --dry-run.",
            markup=False,
        )
    elif verbose:
        errors.print(f"argus: {sent} new verdicts written into the traces")
