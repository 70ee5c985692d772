"""From what each window shows to faults: one fault is one finding, however many windows saw it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final

from argus_otel.detect.api import join_numbers
from argus_otel.tables.findings import Onset, Suppressed, finding_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from argus_otel.detect.frame import Frame
    from argus_otel.tables.findings import Finding

_SAME_ONSET_STEPS: Final = 5
"""Ranks that fell ill within these many steps of each other share a fault. The onset is exact to
about that: the persistence rule itself looks at the latest 5 steps."""

_SAME_SIZE: Final = 1.25
"""And whose slowdown differs by less than this factor: a common cause acts alike."""

_BRIEF_WINDOWS: Final = 2
"""A fault that is over and held for less than so many windows' steps is information: there is
nothing left to do. Measured: beside other load, a rank of a healthy pair was 1.29 times as slow in
own and CPU time for 20 steps of 23 ms, then sound again."""

_YOUNG_WINDOWS: Final = 3
_MILD_SLOWDOWN: Final = 1.5
"""On ranks without a GPU, a mild fault that has held for less than so many windows' steps is
information still: their cores are shared with whatever else runs on the host. Measured on two
cores (bench/verdicts): ranks of healthy pairs were 1.27 and 1.37 times as slow, in CPU time too,
for the last 40 and 26 of 100 steps of 25 ms."""

_OPEN_WINDOWS: Final = 5
"""A fault seen in one of these many latest windows is still open: an intermittent one may rest."""

UNEXPLAINED: Final = "regression_unexplained"
"""Slower steps that no other finding accounts for."""

_LEVELS: Final = ("info", "warning", "critical")

_EXPLAINED_SHARE: Final = 0.5
"""Of a symptom's cost, what its causes have to account for."""


@dataclass(slots=True)
class Track:
    """Windows in which one culprit (or one set of them) shows one cause."""

    cause: str
    ranks: frozenset[int]
    windows: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def same_place(self, finding: Finding) -> bool:
        """Whether a window's finding speaks of this track's culprits: half of them in common."""
        other = set(finding.ranks)
        return len(self.ranks & other) * 2 >= len(self.ranks | other)


def follow(seen: Sequence[tuple[int, Finding]]) -> list[Track]:
    """Sort window findings into tracks.

    Args:
        seen: (window index, finding) of one detector in order of windows.
    """
    tracks: dict[tuple[str, frozenset[int]], Track] = {}
    sets: list[Track] = []
    for window, finding in seen:
        key = (finding.cause, frozenset(finding.ranks))
        track = tracks.get(key)
        if track is None and len(finding.ranks) > 1:
            # Sets of ranks vary a little from window to window.
            near = (t for t in sets if t.cause == finding.cause and t.same_place(finding))
            track = next(near, None)
        if track is None:
            track = Track(cause=finding.cause, ranks=key[1])
            if len(finding.ranks) > 1:
                sets.append(track)
        tracks[key] = track
        track.windows.append(window)
        track.findings.append(finding)
    return list({id(track): track for track in tracks.values()}.values())


def settle(
    tracks: Sequence[Track], frame: Frame, *, window_steps: int, last_window: int
) -> list[Finding]:
    """Turn one detector's tracks into findings, ranks with a common fault in one."""
    singles = [
        _of_track(track, frame, window_steps=window_steps, last_window=last_window)
        for track in tracks
    ]
    joined: list[list[Finding]] = []
    for finding in sorted(singles, key=lambda f: (f.first_step, -f.slowdown, f.ranks)):
        for together in joined:
            if _same_fault(together[0], finding):
                together.append(finding)
                break
        else:
            joined.append([finding])
    return [with_cost(_join(together), frame) for together in joined]


def _of_track(track: Track, frame: Frame, *, window_steps: int, last_window: int) -> Finding:
    # A window in which the fault has just begun knows its size, and little of what steps cost.
    most = max(f.evidence.get("steps_over", 0) for f in track.findings)
    full = [f for f in track.findings if f.evidence.get("steps_over", 0) >= 0.9 * most]
    by_size = sorted(full, key=lambda f: (f.slowdown, f.first_step))
    typical = by_size[len(by_size) // 2]
    episodes: list[list[int]] = []
    before = None
    for window, finding in zip(track.windows, track.findings, strict=True):
        if before is not None and window - before <= window_steps:
            episodes[-1][1] = max(episodes[-1][1], finding.last_step)
        else:
            episodes.append([finding.first_step, finding.last_step])
        before = window
    # A lasting fault looks intermittent while it is new, and any odd step then looks like its
    # first one: the windows of its own kind know better.
    kind = typical.evidence.get("pattern")
    first = next(f for f in track.findings if f.evidence.get("pattern") == kind)
    episodes = [
        [max(begin, first.first_step), end] for begin, end in episodes if end >= first.first_step
    ]
    look = {key: first.evidence.get(key) for key in ("look_at_step", "look_at_rank", "trace_id")}
    evidence: dict[str, Any] = {**typical.evidence, **look, "windows": len(track.windows)}
    if len(episodes) > 1:
        evidence["episodes"] = episodes
    ranks = Counter(f.ranks for f in track.findings).most_common(1)[0][0]
    usual = next(f for f in track.findings if f.ranks == ranks)
    run_start = int(frame.ordinals_S[0])
    over = track.windows[-1] <= last_window - _OPEN_WINDOWS
    held = sum(end - begin + 1 for begin, end in episodes)
    brief = over and held < _BRIEF_WINDOWS * window_steps
    mild = typical.slowdown < _MILD_SLOWDOWN and not frame.has_gpu_R.any()
    young = mild and held < _YOUNG_WINDOWS * window_steps
    return replace(
        typical,
        severity="info" if brief or young else typical.severity,
        ranks=ranks,
        hosts=usual.hosts,
        first_step=first.first_step,
        last_step=episodes[-1][1],
        onset=Onset(step=first.onset.step, exact=first.onset.step > run_start),
        state="ended" if over else "open",
        evidence=evidence,
    )


def _same_fault(a: Finding, b: Finding) -> bool:
    size = max(a.slowdown, b.slowdown) / min(a.slowdown, b.slowdown)
    return (
        a.cause == b.cause
        and abs(a.first_step - b.first_step) <= _SAME_ONSET_STEPS
        and abs(a.last_step - b.last_step) <= 2 * _SAME_ONSET_STEPS
        and a.evidence.get("pattern") == b.evidence.get("pattern")
        and size <= _SAME_SIZE
    )


def _join(together: Sequence[Finding]) -> Finding:
    """One finding for several culprits; the worst one's words, and each one's slowdown."""
    worst = max(together, key=lambda f: f.slowdown)
    if len(together) == 1:
        return worst
    ranks = tuple(sorted({rank for finding in together for rank in finding.ranks}))
    hosts = tuple(sorted({host for finding in together for host in finding.hosts}))
    where = f" on {hosts[0]}" if len(hosts) == 1 else ""
    slowdowns = {str(r): finding.slowdown for finding in together for r in finding.ranks}
    return replace(
        worst,
        ranks=ranks,
        hosts=hosts,
        first_step=median_low(finding.first_step for finding in together),
        onset=Onset(
            step=median_low(finding.onset.step for finding in together),
            exact=all(finding.onset.exact for finding in together),
        ),
        last_step=max(finding.last_step for finding in together),
        summary=f"Ranks {join_numbers(ranks)}{where} are slow together. The worst: {worst.summary}",
        evidence={**worst.evidence, "slowdown_by_rank": slowdowns},
        state="open" if any(finding.state == "open" for finding in together) else "ended",
    )


def with_cost(finding: Finding, frame: Frame) -> Finding:
    """A finding with its identity, and its cost over all steps that it affects."""
    spans = finding.evidence.get("episodes", [[finding.first_step, finding.last_step]])
    steps = finding.evidence.get("steps_affected")
    if steps is None:
        ordinals = frame.ordinals_S
        steps = sum(int(((ordinals >= first) & (ordinals <= last)).sum()) for first, last in spans)
    rank_hours = finding.evidence["lost_s_per_step"] * steps * frame.world_size / 3600
    return replace(
        finding,
        cost_gpu_hours=float(f"{rank_hours:.4g}"),
        id=finding_id(frame.run, finding.cause, finding.ranks, finding.groups),
        evidence={
            **finding.evidence,
            "steps_affected": steps,
            "cost_unit": "GPU-hours" if frame.has_gpu_R.any() else "rank-hours",
        },
    )


def suppress(findings: Sequence[Finding], explains: Mapping[str, Sequence[str]]) -> list[Finding]:
    """List symptoms under what explains them, heaviest cost first.

    A cause may look lighter than its symptom, but a light one does not hide what costs several
    times as much.

    Args:
        findings: Of all detectors.
        explains: Detector → causes that it can produce as symptoms on the same ranks and steps.
    """
    heaviest_first = sorted(findings, key=lambda f: (-(f.cost_gpu_hours or 0.0), f.cause, f.ranks))
    unexplained = [f for f in heaviest_first if f.cause == UNEXPLAINED]
    named = [f for f in heaviest_first if f.cause != UNEXPLAINED]
    above: dict[int, int] = {}
    for index, symptom in enumerate(named):
        for other, cause in enumerate(named):
            if other in above or other == index or not _overlap(cause, symptom):
                continue
            # What one detector says of a part of the ranks and steps of its own heavier finding.
            part = cause.cause == symptom.cause and other < index and _as_severe(cause, symptom)
            explained = symptom.cause in explains.get(cause.detector, ())
            if part or (explained and _weighs(cause, symptom)):
                above[index] = other
                break
    under: dict[int, list[Suppressed]] = {}
    level_of = {index: finding.severity for index, finding in enumerate(named)}
    for index, other in above.items():
        while other in above:
            other = above[other]
        under.setdefault(other, []).append(_as_symptom(named[index]))
        # Information does not hide a warning: it becomes one.
        level_of[other] = max(level_of[other], named[index].severity, key=_LEVELS.index)
    kept = [
        replace(
            finding,
            suppressed=(*finding.suppressed, *under.get(index, ())),
            severity=level_of[index],
        )
        for index, finding in enumerate(named)
        if index not in above
    ]
    for finding in unexplained:
        explaining = _explaining(finding, kept)
        if explaining is None:
            kept.append(finding)
            continue
        at = kept.index(explaining)
        suppressed = (*explaining.suppressed, _as_symptom(finding))
        # The whole job is measurably slower for it: no less severe than that.
        severity = max(explaining.severity, finding.severity, key=_LEVELS.index)
        kept[at] = replace(explaining, suppressed=suppressed, severity=severity)
    return sorted(kept, key=lambda f: (-(f.cost_gpu_hours or 0.0), f.cause, f.ranks))


def _as_symptom(finding: Finding) -> Suppressed:
    return Suppressed(cause=finding.cause, ranks=finding.ranks)


def _overlap(a: Finding, b: Finding) -> bool:
    """Whether a may stand behind b: at the same time, and on all of b's ranks (no ranks: on all)."""
    in_time = a.first_step <= b.last_step and b.first_step <= a.last_step
    return in_time and (not a.ranks or bool(b.ranks) and set(b.ranks) <= set(a.ranks))


def _as_severe(a: Finding, b: Finding) -> bool:
    return _LEVELS.index(a.severity) >= _LEVELS.index(b.severity)


def _weighs(cause: Finding, symptom: Finding) -> bool:
    return (cause.cost_gpu_hours or 0.0) >= _EXPLAINED_SHARE * (symptom.cost_gpu_hours or 0.0)


def _claimed_s(finding: Finding, findings: Sequence[Finding]) -> float:
    """Seconds a step that a finding stands for, also where healing it alone would gain less.

    Two culprits hide each other in the what-if; the longer steps are theirs all the same.
    """
    lost_s = float(finding.evidence.get("lost_s_per_step", 0.0))
    # A synchronous step is no shorter than the part of it that one rank needs for itself. Where others
    # wait inside what is overlapped, their waits look like their own time, and healing seems to gain less.
    own_s = float(finding.evidence.get("own_work_s", 0.0))
    lost_s = max(lost_s, own_s - float(finding.evidence.get("reference_own_work_s", own_s)))
    beside = any(
        other is not finding
        and other.cause != UNEXPLAINED
        and other.first_step <= finding.last_step
        and finding.first_step <= other.last_step
        for other in findings
    )
    if not beside:
        return lost_s
    step_s = float(finding.evidence.get("step_s", 0.0))
    return max(lost_s, step_s * (1 - 1 / max(finding.slowdown, 1.0)))


def _explaining(regression: Finding, findings: Sequence[Finding]) -> Finding | None:
    """The heaviest of the findings that together account for slower steps; None if they do not.

    They began no later and lost half of the time at least. Those that began with it come first: what
    was there long before, and as heavy, does not make steps slower than they were.
    """
    early = [
        finding
        for finding in findings
        if finding.cause != UNEXPLAINED
        and finding.first_step <= regression.first_step + _SAME_ONSET_STEPS
        and finding.last_step >= regression.first_step
    ]
    begun_with_it = [
        finding
        for finding in early
        if finding.first_step >= regression.first_step - _SAME_ONSET_STEPS
    ]
    for some in (begun_with_it, early):
        lost_s = sum(_claimed_s(finding, findings) for finding in some)
        cost = sum(finding.cost_gpu_hours or 0.0 for finding in some)
        enough = lost_s >= _EXPLAINED_SHARE * float(regression.evidence["lost_s_per_step"])
        enough |= cost >= _EXPLAINED_SHARE * (regression.cost_gpu_hours or 0.0)
        if some and enough:
            return max(some, key=lambda f: f.cost_gpu_hours or 0.0)
    return None
