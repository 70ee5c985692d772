"""``argus report``: one HTML file that says and shows what is wrong with a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from argus_otel import service
from argus_otel._runtime.errors import ConfigError
from argus_otel.cli.runs import read_age_ns
from argus_otel.report.html import render_html
from argus_otel.store.opening import default_store, open_store, read_headers


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    html: Annotated[Path, typer.Option(help="File to write.")],
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
) -> None:
    """Write a self-contained HTML page about a run: verdict, heat map, timeline of a step."""
    since_ns = None if since is None else time.time_ns() - read_age_ns(since)
    url = store or default_store()
    judged = service.judge(
        open_store(url, read_headers(header or ())),
        run,
        since_ns=since_ns,
        detector_folders=detectors or (),
    )
    view = service.view_of(judged, ui_url=ui_url or service.default_ui_url(url))
    page = render_html(view)
    try:
        html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--html {html}",
            got=f"not writable ({error.strerror})",
            expected="a file in a folder that exists",
            fix="Give another path.",
        ) from error
    Console().print(f"Wrote {html}", markup=False, highlight=False)
