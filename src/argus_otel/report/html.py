"""One HTML file that needs nothing else: the verdict, a heat map, and the timeline of a step.

plotly's script is put in once (4 MB), so that the file opens on a machine without network.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2
from plotly.offline import get_plotlyjs

from argus_otel.report.charts import heat_map, timeline
from argus_otel.report.view import cost_of, place_of, since_of, title_of, what_was_seen, why_of
from argus_otel.report.wording import counted, listed

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from argus_otel.report.view import RunView
    from argus_otel.tables.findings import Finding


def render_html(view: RunView) -> str:
    """The whole page.

    Args:
        view: With ``heat`` and ``steps`` for the charts; without them the page has only words.
    """
    findings = view.diagnosis.findings
    worst = findings[0] if findings else None
    heat = None if view.heat is None else heat_map(view.heat, findings)
    step = None if view.steps is None else timeline(view.steps, worst)
    reasons: dict[str, list[str]] = {}
    for abstention in view.diagnosis.abstentions:
        reasons.setdefault(abstention.missing, []).append(abstention.detector.replace("_", " "))
    return _template().render(
        run=view.run,
        started=datetime.fromtimestamp(view.run.first_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seen=what_was_seen(view),
        findings=[_card(view, finding) for finding in findings],
        no_verdict=view.all_abstained,
        reasons=[(", ".join(sorted(set(who))), missing) for missing, who in reasons.items()],
        damaged=counted(view.damaged_digests, "digest") if view.damaged_digests else "",
        faults=counted(len(findings), "fault") if findings else "no fault",
        heat=_chart(heat, "heat"),
        timeline=None if step is None else _chart(step.figure, "timeline"),
        timeline_of=step,
        plotly=get_plotlyjs() if heat is not None or step is not None else "",
    )


def _card(view: RunView, finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "title": title_of(finding),
        "place": place_of(finding),
        "since": since_of(finding),
        "summary": finding.summary,
        "cost": cost_of(finding),
        "why": why_of(finding, None),
        "next_step": finding.next_step,
        "step": finding.evidence.get("look_at_step"),
        "trace_id": finding.evidence.get("trace_id"),
        "url": _safe_link(view.trace_url(finding)),
        "suppressed": [
            f"{symptom.cause.replace('_', ' ')} on {listed('rank', list(symptom.ranks))}"
            for symptom in finding.suppressed
        ],
        "id": finding.id,
    }


def _safe_link(url: str | None) -> str | None:
    """Nothing but web addresses: a ``javascript:`` one would run in the reader's browser."""
    return url if url is not None and url.startswith(("http://", "https://")) else None


def _chart(figure: go.Figure | None, name: str) -> str | None:
    if figure is None:
        return None
    html: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config={"displayModeBar": False, "responsive": True},
    )
    return html


@cache
def _template() -> jinja2.Template:
    source = files("argus_otel.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
