"""``argus report``: one HTML file that says and shows what is wrong with a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from argus_otel import service
from argus_otel._runtime.errors import ConfigError
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
)
from argus_otel.report.html import render_html
from argus_otel.report.view import verdict_line


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    html: Annotated[Path, typer.Option(help="File to write.")] = Path("argus-report.html"),
    store: StoreUrl = None,
    run: RunName = "latest",
    since: Since = None,
    header: Headers = None,
    detectors: DetectorFolders = None,
    ui_url: UiUrl = None,
) -> None:
    """Write a self-contained HTML page about a run: the verdict, and pictures of what it rests on."""
    source, url = opened(store, header)
    with explained_since(source, url, since):
        judged = service.judge(
            source, run, since_ns=begin_ns(since), detector_folders=detectors or ()
        )
    view = service.view_of(judged, ui_url=ui_url or service.default_ui_url(url), store=source)
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
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Wrote {html}", markup=False)
    console.print(verdict_line(view), markup=False)
