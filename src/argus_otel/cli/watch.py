"""``argus watch``: judges a job while it runs, and says each thing once."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live

from argus_otel import service
from argus_otel._runtime.bundled import bundled_path
from argus_otel._runtime.errors import ArgusError, ConfigError, StoreError
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
    read_age_ns,
)
from argus_otel.cli.watch_screen import screen_of
from argus_otel.cli.watching import Watcher
from argus_otel.detect.definition import load_detectors
from argus_otel.publish import signals
from argus_otel.publish.ledger import Ledger
from argus_otel.report.view import cost_of, since_of, title_of
from argus_otel.semconv import names
from argus_otel.store.opening import local_folder, named_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from argus_otel.cli.watching import Look
    from argus_otel.publish.ledger import Change
    from argus_otel.tables.findings import Finding
    from argus_otel.tables.schemas import RunSummary

STATE_FILE: Final = ".argus-watch.json"
EVENT_SCHEMA: Final = "argus.watch-event/1"
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("watch")(watch)


def watch(
    store: StoreUrl = None,
    run: RunName = "latest",
    interval: Annotated[str, typer.Option(help="Time between two looks: 10s, 1m.")] = "10s",
    since: Since = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, for cron.")] = False,
    header: Headers = None,
    detectors: DetectorFolders = None,
    ui_url: UiUrl = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Where findings go, as spans, logs and a metric. Default: "
            f"{_ENDPOINT}, else spans into the store if it is a folder."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help=f"File that remembers what was raised. Default: {STATE_FILE} in the store's folder, "
            "else in the working folder."
        ),
    ] = None,
    info: Annotated[bool, typer.Option("--info", help="Tell what is information, too.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Publish and remember nothing, only say it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Judge a job while it runs: raise each finding once, and say when it is over, until Ctrl-C.

    A store that is down is tried again; a restart raises nothing twice. Of a large job only the
    latest steps are held.

    Exit codes of --once: 0 nothing open above info, 1 something is, 3 too little to judge by, 4 the
    store could not be read.
    """
    url = named_store(store)
    pause_s = read_age_ns(interval, "--interval") * 1e-9
    if pause_s <= 0:
        raise ConfigError(
            "--interval", got=repr(interval), expected="more than no time between two looks",
            fix="For example: --interval 10s",
        )  # fmt: skip
    ledger = Ledger.read(state or _state_file(url))
    if dry_run:
        ledger.path = None  # what was only tried is still news to the watch that publishes
    endpoint = otlp_endpoint or os.environ.get(_ENDPOINT)
    watcher = Watcher(
        open_store=lambda: opened(url, header)[0],
        run_name=run,
        ledger=ledger,
        detectors=load_detectors(bundled_path("detectors"), *(detectors or ())),
        since_ns=begin_ns(since),
        info=info,
    )
    console = Console(highlight=False, soft_wrap=True)
    lines = Lines(console=console, as_json=as_json, ui_url=ui_url or service.default_ui_url(url))
    session = Session(
        watcher=watcher,
        lines=lines,
        publisher=None if dry_run else Publisher(watcher, url, endpoint, lines),
    )
    if once:
        with explained_since(opened(url, header)[0], url, since):
            code = session.look_once()
        raise typer.Exit(code)
    screen = console.is_terminal and not as_json
    live = Live(console=console, auto_refresh=False) if screen else None
    try:
        with live or nullcontext():
            session.run(pause_s, live)
    except KeyboardInterrupt:
        lines.say("stopped", "Stopped watching; what is open stays so.")


def _state_file(url: str) -> Path:
    if "://" in url and not url.startswith("parquet:"):
        return Path(STATE_FILE)
    return local_folder(url.removeprefix("parquet://")) / STATE_FILE


@dataclass(slots=True, kw_only=True)
class Lines:
    """What is told, a line each: for a log, or for a program."""

    console: Console
    as_json: bool = False
    ui_url: str | None = None
    now_ns: Callable[[], int] = time.time_ns

    def change(self, change: Change, run: RunSummary, view_url: str | None) -> None:
        """A finding that was raised, or is over."""
        finding = change.finding
        if self.as_json:
            self._json(
                change.kind, run=run.run, run_id=run.run_id, why=change.why, url=view_url,
                finding=asdict(finding),
            )  # fmt: skip
            return
        what = f"{title_of(finding)}: {_place(finding, run)}"
        if change.kind == "closed":
            self._print(
                f"over      {what} ({change.why}), run {run.run_id or run.run[:8]}", "green"
            )
            return
        back = f" ({change.why})" if change.why else ""
        self._print(
            f"{finding.severity.upper():<9} {what}, {since_of(finding)}{back}, "
            f"run {run.run_id or run.run[:8]}. {finding.summary} Costs: {cost_of(finding)}. "
            f"Do now: {finding.next_step}" + (f" {view_url}" if view_url else ""),
            "bold red" if finding.severity == "critical" else "bold yellow",
        )

    def say(self, event: str, text: str) -> None:
        """Something about the watching itself."""
        if self.as_json:
            self._json(event, message=text)
        else:
            self._print(f"{'watch':<9} {' '.join(text.split())}", "dim")

    def _print(self, text: str, style: str) -> None:
        self.console.print(
            f"{self._time()} {text}", style=style, markup=False, highlight=False, soft_wrap=True
        )

    def _json(self, event: str, **about: Any) -> None:  # noqa: ANN401 - what JSON may be
        document = {"schema": EVENT_SCHEMA, "time": self._time(), "event": event, **about}
        text = json.dumps(document, ensure_ascii=False)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _time(self) -> str:
        return datetime.fromtimestamp(self.now_ns() / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _place(finding: Finding, run: RunSummary) -> str:
    from argus_otel.report.view import numbered

    if not finding.ranks or len(finding.ranks) == run.world_size > 1:
        return f"all {run.world_size} ranks"
    hosts = f" on {', '.join(finding.hosts)}" if 0 < len(finding.hosts) <= 2 else ""
    return f"{numbered(finding.ranks)}{hosts}"


@dataclass(slots=True)
class Publisher:
    """Findings into traces, logs and the metric; what does not arrive is tried again."""

    watcher: Watcher
    url: str
    endpoint: str | None
    lines: Lines
    now_ns: Callable[[], int] = time.time_ns
    _waiting: dict[tuple[str, str], Finding] = field(default_factory=dict)
    """Not in the traces yet, by id and state."""
    _unsent: list[Change] = field(default_factory=list)
    """Not logged yet."""
    _not_taken: set[str] = field(default_factory=set)
    _complained: str = ""

    def publish(self, look: Look) -> None:
        """Send what is news, and the metric; failing is said once and tried again."""
        for change in look.changes:
            self._waiting[change.finding.id, change.finding.state] = change.finding
        self._unsent += look.changes
        try:
            self._spans(look)
            if self.endpoint is not None:
                self._logs(look, self.endpoint)
                self._metric(look, self.endpoint)
        except ArgusError as error:
            if str(error) != self._complained:
                self._complained = str(error)
                self.lines.say("not_published", f"not published, will try again: {error}")
        else:
            self._complained = ""

    def _spans(self, look: Look) -> None:
        store = self.watcher.store
        if not self._waiting or store is None:
            return
        judged = self.watcher.judged(look, list(self._waiting.values()))
        sent = service.publish(judged, store, self.url, endpoint=self.endpoint)
        if sent is None and "spans" not in self._not_taken:
            self._not_taken.add("spans")
            self.lines.say(
                "not_published",
                "findings are not written into the traces: give --otlp-endpoint (a Collector's "
                "OTLP/HTTP address), or --dry-run.",
            )
        self._waiting.clear()

    def _logs(self, look: Look, endpoint: str) -> None:
        if self._unsent and "logs" not in self._not_taken:
            body = signals.logs_request(self._unsent, _resource(look.run), self.now_ns())
            self._send(endpoint, "logs", body)
        self._unsent.clear()

    def _metric(self, look: Look, endpoint: str) -> None:
        over = [change.finding for change in look.changes if change.kind == "closed"]
        if "metrics" not in self._not_taken and (look.open or over):
            body = signals.metrics_request(look.open, over, _resource(look.run), self.now_ns())
            self._send(endpoint, "metrics", body)

    def _send(self, endpoint: str, signal: str, body: bytes) -> None:
        try:
            signals.send(endpoint, signal, body)
        except signals.NotTakenError as error:
            self._not_taken.add(signal)
            self.lines.say("not_published", str(error))


def _resource(run: RunSummary) -> dict[str, str | int]:
    return {
        "service.name": service.SERVICE_NAME,
        names.ARGUS_RUN_ID: run.run_id,
        names.ARGUS_RUN_NONCE: run.run,
        names.ARGUS_ATTEMPT: run.attempt,
        names.ARGUS_ROLE: run.role,
    }


@dataclass(slots=True, kw_only=True)
class Session:
    """One look after the other, telling what each brought."""

    watcher: Watcher
    lines: Lines
    publisher: Publisher | None = None
    monotonic: Callable[[], float] = time.monotonic
    _watching: str = ""
    _lost_at: float | None = None
    _forgetful: bool = False

    def look_once(self) -> int:
        """One look; the exit code.

        Raises:
            StoreError: The store cannot be read.
        """
        look = self._look()
        if any(finding.severity != "info" for finding in look.open):
            return service.SOMETHING
        return service.NO_VERDICT if self.watcher.judged(look).no_verdict else service.NOTHING

    def run(
        self,
        pause_s: float,
        live: Live | None = None,
        *,
        sleep: Callable[[float], object] = time.sleep,
        looks: int | None = None,
    ) -> None:
        """Look again and again.

        Args:
            pause_s: Between two looks.
            live: The screen, on a terminal.
            sleep: For tests.
            looks: How many; None until interrupted.
        """
        while looks is None or looks > 0:
            began = self.monotonic()
            look = self.try_look()
            if look is not None and live is not None:
                live.update(screen_of(look), refresh=True)
            looks = None if looks is None else looks - 1
            if looks != 0:
                sleep(max(pause_s - (self.monotonic() - began), 0.1))

    def try_look(self) -> Look | None:
        """One look; None where the store cannot be read now, which is said once."""
        try:
            look = self._look()
        except (StoreError, OSError) as error:
            if self._lost_at is None:
                self._lost_at = self.monotonic()
                self.lines.say("store_lost", f"cannot look now, will try again: {error}")
            self.watcher.store = None
            return None
        if self._lost_at is not None:
            away_s = self.monotonic() - self._lost_at
            self.lines.say("store_back", f"the store can be read again, after {away_s:.0f} s")
            self._lost_at = None
        return look

    def _look(self) -> Look:
        look = self.watcher.look()
        run = look.run
        if run.run != self._watching:
            self._watching = run.run
            held = len(look.open) - sum(change.kind == "raised" for change in look.changes)
            known = f"; {held} raised before and still open" if held > 0 else ""
            self.lines.say(
                "watching",
                f"watching run {run.run_id or run.run[:8]}, {run.world_size} ranks, "
                f"step {look.newest_step}{known}",
            )
        for change in look.changes:
            self.lines.change(change, run, self._url(change.finding, run))
        # First told, then remembered: a crash between the two tells something twice, never not.
        if look.changes or look.fresh:
            self._remember()
        if self.publisher is not None:
            self.publisher.publish(look)
        return look

    def _remember(self) -> None:
        try:
            self.watcher.ledger.write()
        except ConfigError as error:
            if not self._forgetful:
                self._forgetful = True
                self.lines.say("not_remembered", f"a restart would raise things again: {error}")

    def _url(self, finding: Finding, run: RunSummary) -> str | None:
        from argus_otel.report.links import trace_url

        trace_id = finding.evidence.get("trace_id")
        if self.lines.ui_url is None or trace_id is None:
            return None
        return trace_url(self.lines.ui_url, trace_id, run.first_ns, run.last_ns)
