"""What a report is made from: the diagnosis, and how much of the run it rests on."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from argus_otel.report.links import trace_url
from argus_otel.report.silence import spoken
from argus_otel.report.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from argus_otel.report.pictures import Pictures
    from argus_otel.tables.findings import Diagnosis, Finding, LastToArrive, Suppressed
    from argus_otel.tables.schemas import RunSummary

_MOST_OF_A_LIST: Final = 8
_TITLES: Final = {"regression_unexplained": "steps slower than before"}

_MOST_STEPS_SHARE: Final = 0.9
"""From so many of its steps on a finding is said to act in every step."""

_UNIT: Final = re.compile(r"(?<=[a-z0-9])_(bytes_per_s|bytes|s|share|ratio)(?=_|$)")

_NOT_A_MEASUREMENT: Final = {
    "look_at_step",
    "look_at_rank",
    "lost_s_per_step",
    "step_s",
    "steps_affected",
    "steps_over",
    "steps_in_window",
    "windows",
    "peers",
    "peer_data",
    "stage",
    "chunk",
    "micro_batch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run and what is said about it."""

    run: RunSummary
    diagnosis: Diagnosis
    steps_judged: int
    """Steps that count: without warm-up and compilation."""
    first_step: int | None
    last_step: int | None
    ranks_seen: int
    all_abstained: bool = False
    """Most detectors had too little to judge by."""
    last_to_arrive: LastToArrive | None = None
    """Who kept the others waiting, of a run that there is no verdict on."""
    damaged_digests: int = 0
    traits: frozenset[str] = frozenset()
    """What the job has: ``gpu``, ``stages``, ``experts``, ``peers of groups``."""
    stages: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Pipeline stage → its ranks."""
    group_names: Mapping[str, str] = field(default_factory=dict)
    """Key of a process group (as findings have it) → what it is called."""
    ui_url: str | None = None
    """Address of Jaeger's or Grafana's pages, for links; see ``links``."""
    pictures: Pictures | None = None
    """For the HTML page."""

    @property
    def no_verdict(self) -> bool:
        """Whether too little was there to judge by, and no fault showed all the same."""
        faults = any(finding.severity != "info" for finding in self.diagnosis.findings)
        return self.all_abstained and not faults

    def trace_url(self, finding: Finding) -> str | None:
        """Where to look at the step that a finding points to."""
        trace_id = finding.evidence.get("trace_id")
        if self.ui_url is None or trace_id is None:
            return None
        return trace_url(self.ui_url, trace_id, self.run.first_ns, self.run.last_ns)

    def place_of(self, finding: Finding) -> str:
        """``rank 2 on host-a``, ``stage 3 (ranks 24-31)``, ``dp group of 8 ranks``, ``all ranks``."""
        ranks = finding.ranks
        if len(ranks) == self.run.world_size > 1:
            return f"all {len(ranks)} ranks"
        if ranks:
            stage = next((s for s, members in self.stages.items() if members == ranks), None)
            if stage is not None and len(ranks) > 1:
                return f"stage {stage} ({numbered(ranks)})"
            return f"{numbered(ranks)}{_on_hosts(finding.hosts)}"
        if finding.groups:
            named = [self.group_names.get(key, key) for key in finding.groups[:2]]
            more = len(finding.groups) - len(named)
            return ", ".join(named) + (f" and {counted(more, 'more group')}" if more else "")
        world = self.run.world_size
        return "the only rank" if world == 1 else f"all {world} ranks"

    def symptom_of(self, symptom: Suppressed) -> str:
        """``steps slower than before, on all 64 ranks``."""
        ranks = symptom.ranks
        if not ranks or len(ranks) == self.run.world_size:
            world = self.run.world_size
            where = "on all ranks" if world > 1 and not ranks else f"on {counted(world, 'rank')}"
        else:
            where = f"on {numbered(ranks)}"
        return f"{_TITLES.get(symptom.cause) or spoken(symptom.cause)}, {where}"


def headline(view: RunView) -> str:
    """``1 fault and 2 notes``; notes are findings that need nobody to do anything."""
    if view.no_verdict:
        return "No verdict"
    notes = sum(finding.severity == "info" for finding in view.diagnosis.findings)
    faults = len(view.diagnosis.findings) - notes
    said = counted(faults, "fault") if faults else "No fault found"
    return f"{said} and {counted(notes, 'note')}" if notes else said


def verdict_line(view: RunView) -> str:
    """``1 fault in 90 steps (10 to 99) of 4 ranks (run NAME).``."""
    on = "on" if view.no_verdict else "in"
    name = view.run.run_id or view.run.run[:8]
    return f"{headline(view)} {on} {what_was_seen(view)} (run {name})."


def lateness_line(last: LastToArrive) -> str:
    """``Rank 7 comes last in 5 of 8 collectives; …``: a figure, and no blame."""
    return (
        f"Rank {last.rank} comes last in {last.collectives} of {counted(last.of, 'collective')}; the first to "
        f"arrive waits {seconds(last.waited_s)} a step for it in those. Why it is late cannot be told from so few steps."
    )


def title_of(finding: Finding) -> str:
    """The cause as people say it: ``compute straggler``."""
    return _TITLES.get(finding.cause) or spoken(finding.cause)


def numbered(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 8-15, 20``; at most eight stretches."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    numbers = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8])
    if len(runs) > 8:
        numbers = f"{numbers} … ({len(ranks)} in all)"
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def _on_hosts(hosts: Sequence[str]) -> str:
    if not hosts:
        return ""
    return f" on {', '.join(hosts)}" if len(hosts) <= 2 else f" on {len(hosts)} hosts"


def since_of(finding: Finding) -> str:
    """``since step 30, still so at step 99`` or ``step 30 to 59, over now``."""
    onset = onset_of(finding)
    if finding.state == "open":
        # Whether the job still runs is not known: the last step seen is what can be said.
        later = finding.last_step > finding.onset.step
        return (
            f"since step {onset}, still so at {f'step {finding.last_step}' if later else 'the end'}"
        )
    end = f" to {finding.last_step}" if finding.last_step != finding.onset.step else ""
    return f"step {onset}{end}, over now"


def onset_of(finding: Finding) -> str:
    """``30`` or ``30 or before``."""
    return f"{finding.onset.step}{'' if finding.onset.exact else ' or before'}"


def cost_of(finding: Finding) -> str:
    """What it costs, in one sentence."""
    parts = []
    over = finding.state != "open"
    lost_s = float(finding.evidence.get("lost_s_per_step", 0.0))
    if lost_s <= 0 and not finding.cost_gpu_hours:
        return "no time" if over else "no time so far"
    if finding.step_slowdown is not None:
        times = f"{finding.step_slowdown:.3g} times as long"
        affected = int(finding.evidence.get("steps_affected", 0))
        stretch_steps = finding.last_step - finding.onset.step + 1
        if 0 < affected < _MOST_STEPS_SHARE * stretch_steps:
            each = f"{seconds(lost_s)} in each of {counted(affected, 'step')} on all ranks"
            parts.append(f"{each}: such a step takes {times}")
        else:
            step_s = seconds(float(finding.evidence.get("step_s", 0.0)))
            runs = "ran" if over else "runs"
            parts.append(
                f"{seconds(lost_s)} of every {step_s} step on all ranks: training {runs} {times}"
            )
    if finding.cost_gpu_hours is not None:
        unit = finding.evidence.get("cost_unit", "GPU-hours")
        hours = finding.cost_gpu_hours
        cost = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
        unit = unit.removesuffix("s") if cost == "1" else unit
        parts.append(f"{cost} {unit} {'in all' if over else 'so far'}")
    return "; ".join(parts)


def why_of(finding: Finding, most: int | None = 3) -> list[str]:
    """The evidence as short phrases, most telling first.

    A quantity whose reference is known is said with it, and with their ratio: ``own work 101 ms
    instead of 62 ms (1.62 times)``.

    Args:
        finding: Its evidence names quantities with their units (``own_work_s``, ``cpu_ratio``).
        most: Leave out what comes after so many; None for all.
    """
    phrases = []
    evidence = finding.evidence
    numbers = {name: float(value) for name, value in evidence.items() if _is_measured(name, value)}
    for name, value in evidence.items():
        if "_s_by_" in name and isinstance(value, list) and len(value) <= _MOST_OF_A_LIST:
            phrases.append(_listed_phrase(name, value))
        if name not in numbers:
            continue
        number = numbers.pop(name)
        phrase = _phrase(name, number)
        reference = numbers.pop(f"reference_{name}", None)
        if reference is not None:
            phrase += f" instead of {_quantity(name, reference)}"
            ratio = numbers.pop(f"{name.removesuffix('_s')}_ratio", None)
            phrase += f" ({ratio:.3g} times)" if ratio is not None else ""
        for whose in ("others", "middle_rank"):
            theirs = numbers.pop(f"{name}_of_{whose}", None)
            if theirs is not None:
                phrase += f" ({whose.replace('_', ' ')}: {_quantity(name, theirs)})"
        phrases.append(phrase)
    phrases = phrases if most is None else phrases[:most]
    over, window = finding.evidence.get("steps_over"), finding.evidence.get("steps_in_window")
    if over is not None and window is not None:
        phrases.append(f"in {over} of {counted(window, 'step')}")
    return phrases


def _is_measured(name: str, value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and name not in _NOT_A_MEASUREMENT


def stack_of(finding: Finding) -> list[str]:
    """Where the named rank is, outermost frame first; empty where that is not known."""
    stack = finding.evidence.get("stack")
    if not isinstance(stack, str):
        return []
    return [line.strip() for line in stack.replace(" > ", "\n").splitlines() if line.strip()]


def _listed_phrase(name: str, values: Sequence[float | None]) -> str:
    """``work by stage: 60 ms, 90 ms, 60 ms``."""
    what, _, by = name.partition("_s_by_")
    numbers = ", ".join("?" if value is None else seconds(float(value)) for value in values)
    return f"{what.replace('_', ' ')} by {by.replace('_', ' ')}: {numbers}"


def _phrase(name: str, value: float) -> str:
    """``step before 69 ms``: the unit is a word of the name, mostly the last."""
    match = _UNIT.search(name)
    if match is None:
        return f"{name.replace('_', ' ')} {value:g}"
    words = (name[: match.start()] + name[match.end() :]).replace("_", " ")
    return f"{words} {_with_unit(value, match[1])}"


def _quantity(name: str, value: float) -> str:
    """``69 ms``: the value alone, in the unit that the name has."""
    match = _UNIT.search(name)
    return f"{value:g}" if match is None else _with_unit(value, match[1])


def _with_unit(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value)
    if unit == "share":
        return f"{value:.0%}"
    if unit == "ratio":
        return f"{value:.3g} times" if abs(value) >= 1 else f"{value * 100:.2g}%"
    rate = "/s" if unit == "bytes_per_s" else ""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}B{rate}"
    return f"{value:.3g} B{rate}"


def seconds(value: float) -> str:
    """A duration as people read it: ``75 ms``, ``1.4 s``."""
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"


def what_was_seen(view: RunView) -> str:
    """``90 steps (10 to 99) of 4 ranks``."""
    ranks = counted(view.ranks_seen, "rank")
    if view.ranks_seen < view.run.world_size:
        ranks = f"{view.ranks_seen} of {counted(view.run.world_size, 'rank')}"
    if view.first_step is None:
        return f"a run of {ranks} that shows no settled step"
    steps = counted(view.steps_judged, "step")
    return f"{steps} ({view.first_step} to {view.last_step}) of {ranks}"


def document_of(view: RunView, document: dict[str, Any]) -> dict[str, Any]:
    """The findings document with links, where the pages' address is known, and who came last."""
    for finding, data in zip(view.diagnosis.findings, document["findings"], strict=True):
        url = view.trace_url(finding)
        if url is not None:
            data["evidence"] = {**data["evidence"], "url": url}
    if view.last_to_arrive is not None:
        document["last_to_arrive"] = asdict(view.last_to_arrive)
    return document
