"""One HTML file that needs nothing else: the verdict in words, and pictures of what it rests on.

plotly's script is put in once, compressed (1.4 MB of 4.8), so that the file opens on a machine
without network and is small enough to be attached to a ticket.
"""

from __future__ import annotations

import base64
import gzip
import json
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2
from plotly.offline import get_plotlyjs

from argus_otel.report import charts
from argus_otel.report.silence import unjudged
from argus_otel.report.view import (
    cost_of,
    document_of,
    headline,
    lateness_line,
    seconds,
    since_of,
    stack_of,
    title_of,
    what_was_seen,
    why_of,
)
from argus_otel.report.wording import counted
from argus_otel.tables.findings import diagnosis_document

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from argus_otel.report.pictures import Pictures
    from argus_otel.report.view import RunView
    from argus_otel.tables.findings import Finding


def render_html(view: RunView) -> str:
    """The whole page.

    Args:
        view: With ``pictures`` for the charts; without, the page has only words.
    """
    findings = view.diagnosis.findings
    figures = {} if view.pictures is None else _figures(view.pictures, findings)
    document = document_of(view, diagnosis_document(view.run.run, view.diagnosis))
    silent = unjudged(view.diagnosis.abstentions)
    return _template().render(
        run=view.run,
        name=view.run.run_id or view.run.run[:8],
        started=datetime.fromtimestamp(view.run.first_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seen=what_was_seen(view),
        step_s=None if view.pictures is None or view.pictures.step_s is None
        else seconds(view.pictures.step_s),
        findings=[_card(view, finding) for finding in findings],
        no_verdict=view.no_verdict,
        lateness="" if view.last_to_arrive is None else lateness_line(view.last_to_arrive),
        silent=silent,
        silent_count=counted(len({name for one in silent for name in one.detectors}), "possible cause"),
        damaged=counted(view.damaged_digests, "digest") if view.damaged_digests else "",
        headline=headline(view),
        figures={name: _as_json(figure) for name, figure in figures.items()},
        step=None if view.pictures is None else view.pictures.step,
        stages_since=None if view.pictures is None else view.pictures.stages_since,
        document=_safe_json(json.dumps(document, ensure_ascii=False)),
        plotly=_packed_plotly() if figures else "",
    )  # fmt: skip


def _figures(pictures: Pictures, findings: tuple[Finding, ...]) -> dict[str, go.Figure]:
    found = {}
    if pictures.heat is not None:
        found["heat"] = charts.heat_map(pictures.heat, findings)
    if pictures.step is not None:
        found["timeline"] = charts.timeline(pictures.step)
    if pictures.stages:
        found["stages"] = charts.stage_shares(pictures.stages, pictures.stages_since)
    if pictures.what_if:
        found["whatif"] = charts.what_if(pictures.what_if)
    return found


def _card(view: RunView, finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "severity": finding.severity,
        "title": title_of(finding),
        "place": view.place_of(finding),
        "since": since_of(finding),
        "summary": finding.summary,
        "cost": cost_of(finding),
        "why": why_of(finding, None),
        "next_step": finding.next_step,
        "stack": stack_of(finding),
        "step": finding.evidence.get("look_at_step"),
        "trace_id": finding.evidence.get("trace_id"),
        "url": _safe_link(view.trace_url(finding)),
        "suppressed": [view.symptom_of(symptom) for symptom in finding.suppressed],
    }


def _safe_link(url: str | None) -> str | None:
    """Nothing but web addresses: a ``javascript:`` one would run in the reader's browser."""
    return url if url is not None and url.startswith(("http://", "https://")) else None


def _as_json(figure: go.Figure) -> str:
    return _safe_json(figure.to_json())


def _safe_json(text: str) -> str:
    """JSON that no run's name can end the script element with."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _packed_plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


@cache
def _template() -> jinja2.Template:
    source = files("argus_otel.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
