"""``argus detect``: which rank, which cause, what it costs, and what to do now."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from argus_otel import service
from argus_otel._runtime.errors import ArgusError
from argus_otel.cli.options import (
    DetectorFolders,
    Headers,
    RunName,
    Since,
    StoreUrl,
    UiUrl,
    begin_ns,
    explained_since,
    opened,
    replaced_detectors,
)
from argus_otel.report.json import render_json
from argus_otel.report.text import print_view
from argus_otel.report.wording import counted

if TYPE_CHECKING:
    from argus_otel.store.protocol import Store


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("detect")(detect)


def detect(
    store: StoreUrl = None,
    run: RunName = "latest",
    since: Since = None,
    header: Headers = None,
    detectors: DetectorFolders = None,
    ui_url: UiUrl = None,
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

    Exit codes: 0 nothing above info, 1 something found, 2 wrong usage, 3 too little is there to
    judge by, 4 the store could not be read.
    """
    source, url = opened(store, header)
    if replaced := replaced_detectors(detectors or ()):
        _say(f"{', '.join(replaced)} of --detectors in place of the one that comes with argus")
    with explained_since(source, url, since):
        judged = service.judge(
            source, run, since_ns=begin_ns(since), detector_folders=detectors or ()
        )
    view = service.view_of(judged, ui_url=ui_url or service.default_ui_url(url))
    if as_json:
        typer.echo(render_json(view))
    else:
        print_view(Console(), view, verbose=verbose)
    if dry_run:
        _say("nothing published (dry run)")
    elif judged.verdict.diagnosis.findings:
        _publish(judged, source, url, otlp_endpoint)
    elif otlp_endpoint:
        _say("nothing to write into the traces")
    raise typer.Exit(judged.exit_code)


def _publish(judged: service.Judged, store: Store, url: str, endpoint: str | None) -> None:
    """A verdict that cannot be published still stands: say so, and keep the exit code."""
    try:
        sent = service.publish(
            judged,
            store,
            url,
            endpoint=endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        )
    except ArgusError as error:
        _say(f"not published: {error}")
        return
    if sent is None:
        _say(
            "not written into the traces: give --otlp-endpoint (a Collector's OTLP/HTTP "
            "address), or --dry-run."
        )
    elif sent:
        _say(f"{counted(sent, 'new verdict')} written into the traces")
    else:
        _say("nothing new to write into the traces")


def _say(text: str) -> None:
    """About the command itself, beside the verdict."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"argus: {text}", markup=False)
