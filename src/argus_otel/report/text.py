"""The verdict for a tired person at a terminal: what, who, since when, what it costs, what to do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from rich.text import Text

from argus_otel.report.view import (
    cost_of,
    place_of,
    since_of,
    title_of,
    what_was_seen,
    why_of,
)
from argus_otel.report.wording import counted, listed, stretch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from argus_otel.report.view import RunView
    from argus_otel.tables.findings import Abstention, Finding

_COLOUR: Final = {"critical": "bold red", "warning": "bold yellow", "info": "bold blue"}
_INDENT: Final = 11
_NARROWEST: Final = 30


def print_view(console: Console, view: RunView, *, verbose: bool = False) -> None:
    """Print the verdict. Colours are the console's affair, which honours NO_COLOR.

    Args:
        console: Where to.
        view: What.
        verbose: All evidence, and how each detector came to abstain.
    """
    findings = view.diagnosis.findings
    name = view.run.run_id or view.run.run[:8]
    seen = what_was_seen(view)
    if not findings and view.all_abstained:
        console.print(Text(f"No verdict on {seen} (run {name}).", style="yellow"))
    elif not findings:
        complete = not view.diagnosis.abstentions
        nothing = Text(f"No fault found in {seen} (run {name}).", style="green" if complete else "")
        console.print(nothing)
    else:
        faults = counted(len(findings), "fault")
        console.print(f"{faults} in {seen} (run {name})", markup=False, highlight=False)
    for finding in findings:
        console.print()
        _print_finding(console, view, finding, verbose=verbose)
    _print_silence(console, view.diagnosis.abstentions, verbose=verbose)
    if view.damaged_digests:
        console.print(
            f"{counted(view.damaged_digests, 'digest')} could not be read: not in the above.",
            highlight=False,
        )


def _print_finding(console: Console, view: RunView, finding: Finding, *, verbose: bool) -> None:
    head = Text()
    head.append(finding.severity.upper(), style=_COLOUR[finding.severity])
    head.append(f"  {title_of(finding)}: {place_of(finding)}", style="bold")
    head.append(f", {since_of(finding)}")
    console.print(head)

    _print_row(console, "what", finding.summary)
    _print_row(console, "costs", cost_of(finding))
    _print_row(console, "because", ", ".join(why_of(finding, None if verbose else 3)))
    _print_row(console, "do now", finding.next_step)
    _print_row(console, "look at", _where(view, finding))
    for symptom in finding.suppressed:
        ranks = listed("rank", list(symptom.ranks[:8]))
        _print_row(console, "explains", f"{symptom.cause.replace('_', ' ')} on {ranks}")
    if verbose:
        _print_row(console, "finding", f"{finding.id} by {finding.detector}")


def _print_row(console: Console, label: str, text: str) -> None:
    """A label and a paragraph beside it; a long link stays in one piece, to be clicked."""
    lines = textwrap.wrap(
        text,
        max(console.width - _INDENT, _NARROWEST),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for index, line in enumerate(lines):
        row = Text("  ")
        row.append(f"{label if index == 0 else '':<{_INDENT - 2}}", style="dim")
        row.append(line)
        console.print(row, soft_wrap=True)


def _where(view: RunView, finding: Finding) -> str:
    step = finding.evidence.get("look_at_step")
    trace = view.trace_url(finding) or finding.evidence.get("trace_id") or "not stored"
    return f"step {step}, rank {finding.evidence.get('look_at_rank')}, trace {trace}"


def _print_silence(console: Console, abstentions: Sequence[Abstention], *, verbose: bool) -> None:
    """What was not judged, grouped by reason: it is not the same as sound."""
    by_reason: dict[str, list[Abstention]] = {}
    for abstention in abstentions:
        by_reason.setdefault(abstention.missing, []).append(abstention)
    if by_reason:
        console.print()
    for missing, some in by_reason.items():
        who = ", ".join(sorted({abstention.detector.replace("_", " ") for abstention in some}))
        steps = some[0].steps
        when = f", {stretch('step', *steps)}" if steps is not None else ""
        code = f" [{some[0].code}]" if verbose else ""
        text = f"not judged: {who}{when}. Needs {missing}.{code}"
        for line in textwrap.wrap(text, max(console.width, _NARROWEST), break_on_hyphens=False):
            console.print(Text(line), soft_wrap=True)
