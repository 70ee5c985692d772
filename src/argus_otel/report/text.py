"""The verdict for a tired person at a terminal: what, who, since when, what it costs, what to do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from rich.text import Text

from argus_otel.report.silence import paragraph, unjudged
from argus_otel.report.view import (
    cost_of,
    lateness_line,
    since_of,
    stack_of,
    title_of,
    verdict_line,
    why_of,
)
from argus_otel.report.wording import counted, stretch

if TYPE_CHECKING:
    from rich.console import Console

    from argus_otel.report.view import RunView
    from argus_otel.tables.findings import Finding

_COLOUR: Final = {"critical": "bold red", "warning": "bold yellow", "info": "bold blue"}
_INDENT: Final = 11
_NARROWEST: Final = 30
_LINES_BESIDE_FINDINGS: Final = 3
_REASONS: Final = 3


def print_view(console: Console, view: RunView, *, verbose: bool = False) -> None:
    """Print the verdict. Colours are the console's affair, which honours NO_COLOR.

    Args:
        console: Where to.
        view: What.
        verbose: All evidence, and how each detector came to abstain.
    """
    findings = view.diagnosis.findings
    style = ""
    if view.no_verdict:
        style = "yellow"
    elif not findings and not view.diagnosis.abstentions:
        style = "green"
    console.print(*_wrapped(console, verdict_line(view), style))
    if view.no_verdict and view.last_to_arrive is not None:
        console.print(*_wrapped(console, lateness_line(view.last_to_arrive)))
    if view.no_verdict and not verbose:
        _print_reasons(console, view)
    for finding in findings:
        console.print()
        _print_finding(console, view, finding, verbose=verbose)
    if verbose:
        _print_silence(console, view)
    elif view.all_abstained and findings and not view.no_verdict:
        console.print()
        _print_reasons(console, view)
    elif not view.no_verdict:
        groups = unjudged(view.diagnosis.abstentions, view.traits)
        lines = _LINES_BESIDE_FINDINGS if findings else 1
        text = paragraph(groups, width=console.width, lines=lines)
        if findings and text:
            console.print()
        if text:
            console.print(*_wrapped(console, text, "dim"))
    if view.damaged_digests:
        console.print(
            f"{counted(view.damaged_digests, 'digest')} could not be read: not in the above.",
            highlight=False,
        )


def _wrapped(console: Console, text: str, style: str = "") -> list[Text]:
    """One paragraph, without the blanks that the console leaves at the ends of lines."""
    lines = textwrap.wrap(text, max(console.width, _NARROWEST), break_on_hyphens=False)
    return [Text("\n".join(lines), style=style)]


def _print_finding(console: Console, view: RunView, finding: Finding, *, verbose: bool) -> None:
    head = Text()
    head.append(finding.severity.upper(), style=_COLOUR[finding.severity])
    head.append(f"  {title_of(finding)}: {view.place_of(finding)}", style="bold")
    head.append(f", {since_of(finding)}")
    console.print(head, soft_wrap=True)

    _print_row(console, "what", finding.summary)
    if finding.severity == "info" and not verbose:
        # Nothing to do: two lines are enough beside what somebody has to act on.
        return
    _print_row(console, "costs", cost_of(finding))
    _print_row(console, "because", "; ".join(why_of(finding, None if verbose else 3)))
    _print_row(console, "do now", finding.next_step)
    for index, frame in enumerate(stack_of(finding)):
        _print_row(console, "" if index else "stack", frame)
    _print_row(console, "look at", _where(view, finding))
    for symptom in finding.suppressed:
        _print_row(console, "explains", view.symptom_of(symptom))
    if verbose:
        sure = finding.confidence
        how = "" if sure is None else f"; of such findings on simulated jobs {sure:.0%} were right"
        _print_row(console, "finding", f"{finding.id} by {finding.detector}{how}")


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
    where = f"step {step}, rank {finding.evidence.get('look_at_rank')}"
    trace = view.trace_url(finding) or finding.evidence.get("trace_id")
    return f"{where}, trace {trace}" if trace else f"{where} (its trace is not stored)"


def _print_reasons(console: Console, view: RunView) -> None:
    """Why there is no verdict: what most detectors lack comes first."""
    for one in unjudged(view.diagnosis.abstentions, view.traits)[:_REASONS]:
        text = f"Not judged: {one.names_or_count} (needed: {one.missing})."
        console.print(*_wrapped(console, text))


def _print_silence(console: Console, view: RunView) -> None:
    """Every abstention, grouped by reason."""
    groups = unjudged(view.diagnosis.abstentions)
    if groups:
        console.print()
    for one in groups:
        when = f", {stretch('step', *one.steps)}" if one.steps is not None else ""
        text = f"not judged: {one.names}{when}. Needs {one.missing}. [{one.code}]"
        console.print(*_wrapped(console, text))
