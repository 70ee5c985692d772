"""All that a detector may import: what it is given, what it returns, and the statistics.

A detector is a pure function ``detect(window, params) -> Diagnosis``. It names one fault a finding,
normally one rank each: the engine puts together the windows of one fault, and the ranks that fell
ill together. One whose ``detector.yaml`` says ``scope: run`` is asked once, ``detect(run, params)``,
and names each fault whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.detect.definition import Params
from argus_otel.detect.experts import expert_tokens
from argus_otel.detect.frame import WARM_UP_STEPS
from argus_otel.detect.kernels import KernelComparison, compare_kernels
from argus_otel.detect.lateness import Lateness, lateness
from argus_otel.detect.reference import Comparison, compare
from argus_otel.detect.run import Event, Group, Passes, Run
from argus_otel.detect.shifts import Shift, level_shift
from argus_otel.detect.statistics import (
    SUDDEN,
    lasting,
    lasting_or_sudden,
    lower_middle,
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    median_over,
    spread_of_faster_half,
    start_of_lasting_change,
    step_scatter,
)
from argus_otel.detect.transfers import Transfers, transfers
from argus_otel.detect.window import Window
from argus_otel.tables.findings import (
    Abstention,
    Diagnosis,
    Finding,
    Onset,
    Severity,
    Suppressed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = [
    "SUDDEN",
    "WARM_UP_STEPS",
    "Abstention",
    "Beat",
    "Comparison",
    "Diagnosis",
    "Event",
    "Finding",
    "Group",
    "KernelComparison",
    "Lateness",
    "Onset",
    "Params",
    "Passes",
    "Run",
    "Shift",
    "Suppressed",
    "Transfers",
    "Window",
    "abstain",
    "abstain_run",
    "compare",
    "compare_kernels",
    "device_texts",
    "device_values",
    "event_seconds",
    "expert_tokens",
    "join_by_onset",
    "join_numbers",
    "lasting",
    "lasting_or_sudden",
    "lateness",
    "latest_heartbeats",
    "level_shift",
    "lower_middle",
    "lowest_mean",
    "luck_of_fastest_quarter",
    "luck_of_slowest",
    "make_finding",
    "make_run_finding",
    "median_over",
    "meeting_of",
    "name_ranks",
    "name_run_ranks",
    "own_time",
    "ratio_to_peers",
    "settled_steps",
    "spread_of_faster_half",
    "start_of_lasting_change",
    "step_growth_s",
    "step_scatter",
    "transfers",
    "usual_step_s",
]


OPEN_STEPS: Final = 5
"""A fault that shows in one of so many latest steps is still open (DESIGN, detection)."""


def name_ranks(window: Window, ranks: Sequence[int]) -> str:
    """``Rank 2 (host-a)`` or ``Ranks 2, 3 (host-a)``, from rank indices, for the reader.

    At most eight numbers; runs are joined to ``8-15``.
    """
    return _named(window.ranks_R, window.frame.hosts_R, ranks)


def _named(ranks_R: NDArray[np.int64], hosts_R: Sequence[str], ranks: Sequence[int]) -> str:
    numbers = [int(ranks_R[rank]) for rank in ranks]
    hosts = sorted({hosts_R[rank] for rank in ranks} - {""})
    place = f" ({', '.join(hosts)})" if 0 < len(hosts) <= 2 else ""
    return f"Rank{'s' if len(numbers) > 1 else ''} {join_numbers(numbers)}{place}"


def join_numbers(numbers: Sequence[int]) -> str:
    """``0-3, 7``: ascending numbers with runs joined, cut after eight parts."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    more = f" and {len(texts) - 8} more" if len(texts) > 8 else ""
    return ", ".join(texts[:8]) + more


def abstain(
    window: Window, params: Params, code: str, missing: str, *, findings: tuple[Finding, ...] = ()
) -> Diagnosis:
    """A diagnosis that says why nothing, or nothing more, can be said of this window."""
    steps = (int(window.ordinals_S[0]), int(window.ordinals_S[-1]))
    return Diagnosis(
        findings=findings,
        abstentions=(
            Abstention(detector=params.detector, code=code, steps=steps, missing=missing),
        ),
    )


def abstain_run(run: Run, params: Params, code: str, missing: str) -> Diagnosis:
    """As ``abstain``, of a whole run."""
    steps = (int(run.ordinals_A[0]), int(run.ordinals_A[-1])) if run.ordinals_A.size else None
    return Diagnosis(
        abstentions=(Abstention(detector=params.detector, code=code, steps=steps, missing=missing),)
    )


def name_run_ranks(run: Run, ranks: Sequence[int]) -> str:
    """As ``name_ranks``, of a whole run."""
    return _named(run.ranks_R, run.hosts_R, ranks)


def make_run_finding(
    run: Run,
    params: Params,
    *,
    cause: str,
    ranks: Sequence[int],
    over_A: NDArray[np.bool_],
    severity: Severity,
    slowdown: float,
    lost_s: float,
    summary: str,
    evidence: dict[str, Any],
    next_step: str | None = None,
    groups: Sequence[str] = (),
    exact: bool = True,
) -> Finding:
    """Fill a finding in for a whole run.

    Args:
        run: Where it was seen.
        params: The detector's.
        cause: From the closed list.
        ranks: Indices (not numbers) of the culprits, the one to look at first; empty where nobody
            is to blame.
        over_A: Steps that show it; at least one.
        severity: See ``Params.severity``.
        slowdown: Ratio of the culprits' time to the healthy reference; 1 where that says nothing.
        lost_s: Seconds that the job loses in a step that shows it: all ranks wait.
        summary: One plain sentence.
        evidence: Numbers, units in their names.
        next_step: What to do now; the runbook's first aid otherwise.
        groups: Keys of the groups that are to blame, as text.
        exact: Whether healthy steps were seen before it.
    """
    over = np.flatnonzero(over_A)
    first, last = int(over[0]), int(over[-1])
    look_at = int(ranks[0]) if len(ranks) else 0
    kept = np.flatnonzero(over_A & run.kept_AR[:, look_at])
    look = int(kept[0]) if kept.size else first
    usual = run.columns["step_s"][over_A]
    step_s = float(median_over(median_over(usual, axis=1), axis=0)) if usual.size else np.nan
    evidence = {
        **evidence,
        "steps_affected": int(over.size),
        "lost_s_per_step": round(lost_s, 6),
        "look_at_step": int(run.ordinals_A[look]),
        "look_at_rank": int(run.ranks_R[look_at]),
        "trace_id": run.trace_id(look, look_at),
    }
    step_slowdown = None
    if np.isfinite(step_s) and step_s > 0:
        evidence["step_s"] = round(step_s, 6)
        step_slowdown = round(step_s / (step_s - min(lost_s, 0.99 * step_s)), 3)
    return Finding(
        detector=params.detector,
        cause=cause,
        ranks=tuple(sorted(int(run.ranks_R[rank]) for rank in ranks)),
        hosts=tuple(sorted({run.hosts_R[rank] for rank in ranks} - {""})),
        groups=tuple(groups),
        first_step=int(run.ordinals_A[first]),
        last_step=int(run.ordinals_A[last]),
        onset=Onset(step=int(run.ordinals_A[first]), exact=exact and first > 0),
        severity=severity,
        slowdown=round(slowdown, 3),
        step_slowdown=step_slowdown,
        summary=summary,
        next_step=next_step or params.do,
        state="open" if run.ordinals_A.size - 1 - last < OPEN_STEPS else "ended",
        evidence=evidence,
    )


def make_finding(
    window: Window,
    params: Params,
    *,
    cause: str,
    ranks: Sequence[int],
    over_S: NDArray[np.bool_],
    lasting: bool,
    severity: Severity,
    slowdown: float,
    lost_s: float,
    summary: str,
    evidence: dict[str, Any],
    next_step: str | None = None,
) -> Finding:
    """Fill a finding in for one window.

    Args:
        window: Where it was seen.
        params: The detector's.
        cause: From the closed list.
        ranks: Indices (not numbers) of the culprits; the first is the one to look at.
        over_S: Steps of the window that show it.
        lasting: Whether it holds from an onset on; false for one that comes and goes.
        severity: See ``Params.severity``.
        slowdown: Ratio of the culprits' time to the healthy reference.
        lost_s: Seconds that the job loses in a usual step of this window: all ranks wait.
        summary: One plain sentence, without step numbers (the engine knows them).
        evidence: Numbers, units in their names.
        next_step: What to do now; the runbook's first aid otherwise.
    """
    over = np.flatnonzero(over_S)
    first = start_of_lasting_change(over_S) if lasting else int(over[0] if over.size else 0)
    last = int(over[-1]) if over.size else int(over_S.size - 1)
    marked = over_S.copy()
    marked[:first] = False
    step, trace_id = window.marked_step(marked, ranks[0])
    # A fault that comes and goes is in some steps only: its cost is a part of the mean.
    step_s = window.usual_step_s if lasting else float(np.nanmean(window.job_step_s))
    lost_s = min(lost_s, 0.99 * step_s)
    return Finding(
        detector=params.detector,
        cause=cause,
        ranks=tuple(sorted(int(window.ranks_R[rank]) for rank in ranks)),
        hosts=tuple(sorted({window.host(rank) for rank in ranks} - {""})),
        first_step=int(window.ordinals_S[first]),
        last_step=int(window.ordinals_S[last]),
        # What was already there in the window's first step began no later than that.
        onset=Onset(step=int(window.ordinals_S[first]), exact=first > 0),
        severity=severity,
        slowdown=round(slowdown, 3),
        step_slowdown=round(step_s / (step_s - lost_s), 3),
        summary=summary,
        next_step=next_step or params.do,
        evidence={
            **evidence,
            "lost_s_per_step": round(lost_s, 6),
            "step_s": round(step_s, 6),
            "look_at_step": step,
            "look_at_rank": int(window.ranks_R[ranks[0]]),
            "trace_id": trace_id,
        },
    )


# -- whole runs: what several detectors take from one --------------------------------------------


def settled_steps(run: Run) -> NDArray[np.bool_]:
    """Steps [A] after the warm-up and without compilation, as windows see them."""
    compiling = {event.ordinal for event in run.events if event.kind.startswith("compil")}
    settled: NDArray[np.bool_] = run.ordinals_A >= WARM_UP_STEPS
    settled &= ~np.isin(run.ordinals_A, sorted(compiling))
    return settled


def usual_step_s(run: Run) -> float:
    """Median step time of the job over its settled steps (all, where none is settled); seconds."""
    settled = settled_steps(run)
    step_s = run.columns["step_s"][settled if settled.any() else slice(None)]
    return float(median_over(median_over(step_s, axis=1), axis=0)) if step_s.size else np.nan


def own_time(run: Run) -> NDArray[np.float64]:
    """Seconds [A, R] that each rank needs for itself, NaN unknown.

    Busy time less input, garbage collection and, where there is no GPU, waiting for a core.
    """
    columns = run.columns
    aside = np.nan_to_num(columns["data_wait_s"]) + np.nan_to_num(columns["gc_s"])
    aside += np.where(run.has_gpu_R, 0.0, np.nan_to_num(columns["run_delay_s"]))
    own: NDArray[np.float64] = np.maximum(columns["busy_s"] - aside, 0.02 * columns["busy_s"])
    return own


def ratio_to_peers(run: Run, values_AR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each value over the mean of its fastest quarter of peers in the same step; NaN without any."""
    ratio = np.full(values_AR.shape, np.nan)
    for bucket in run.peers.buckets:
        part = values_AR[:, bucket]
        ratio[:, bucket] = part / np.maximum(lowest_mean(part, axis=-1), 1e-9)[..., None]
    return ratio


def event_seconds(
    run: Run, events: Sequence[Event], amounts: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """Seconds [A, R] that some events took in each step of each rank; 0 where there was none.

    Args:
        run: The run.
        events: Of it.
        amounts: What to add up instead of seconds, one for each event.
    """
    took = np.zeros((run.ordinals_A.size, run.ranks_R.size))
    if events and run.ordinals_A.size:
        ordinal = np.array([event.ordinal for event in events])
        step = np.minimum(np.searchsorted(run.ordinals_A, ordinal), run.ordinals_A.size - 1)
        known = run.ordinals_A[step] == ordinal
        rank = np.array([event.rank for event in events])
        if amounts is None:
            amounts = [max(event.duration_s, 0.0) for event in events]
        seconds = np.array(amounts, dtype=np.float64)
        np.add.at(took, (step[known], rank[known]), seconds[known])
    return took


def device_values(run: Run, name: str) -> NDArray[np.float64]:
    """A number that devices say, [A, R]; NaN where one said nothing."""
    values = np.full((run.ordinals_A.size, run.ranks_R.size), np.nan)
    step, rank, rows = _device_rows(run)
    column = run.devices[name].to_numpy(zero_copy_only=False).astype(np.float64)
    values[step, rank] = column[rows]
    return values


def device_texts(run: Run, name: str) -> list[tuple[int, int, str]]:
    """(step index, rank index, text) of what devices say in words, where it is not empty."""
    step, rank, rows = _device_rows(run)
    texts = run.devices[name].to_pylist()
    told = zip(step.tolist(), rank.tolist(), rows.tolist(), strict=True)
    return [(s, r, str(texts[row])) for s, r, row in told if texts[row]]


def _device_rows(run: Run) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Step index and rank index of each device row of known steps and ranks, and its place."""
    ordinal = run.devices["ordinal"].to_numpy()
    number = run.devices["rank"].to_numpy()
    if not ordinal.size or not run.ordinals_A.size or not run.ranks_R.size:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing
    step = np.minimum(np.searchsorted(run.ordinals_A, ordinal), run.ordinals_A.size - 1)
    rank = np.minimum(np.searchsorted(run.ranks_R, number), run.ranks_R.size - 1)
    known = np.flatnonzero((run.ordinals_A[step] == ordinal) & (run.ranks_R[rank] == number))
    return step[known], rank[known], known


def join_by_onset(first_of: Mapping[int, int], within: int = OPEN_STEPS) -> list[list[int]]:
    """Ranks that fell ill together: rank → first step, in groups that begin within so many steps.

    The first to fall ill is the first of its group.
    """
    joined: list[list[int]] = []
    for rank, first in sorted(first_of.items(), key=lambda item: (item[1], item[0])):
        if joined and first - first_of[joined[-1][0]] <= within:
            joined[-1].append(rank)
        else:
            joined.append([rank])
    return joined


def step_growth_s(run: Run, over_A: NDArray[np.bool_]) -> float | None:
    """Seconds by which the job's step is longer in these steps than in those before the first.

    None where fewer than 10 settled steps lie before: nothing is known of how long a step took.
    """
    settled_A = run.ordinals_A >= WARM_UP_STEPS
    step_A = median_over(run.columns["step_s"], axis=1)
    before = step_A[settled_A & (run.ordinals_A < run.ordinals_A[np.argmax(over_A)])]
    if np.count_nonzero(~np.isnan(before)) < 10 or not over_A.any():
        return None
    growth = median_over(step_A[over_A], axis=0) - median_over(before, axis=0)
    return float(growth) if np.isfinite(growth) else None


Beat = dict[str, Any]
"""A row of HEARTBEATS."""

_DIRECT: Final = ("send", "recv", "isend", "irecv")
"""Between two ranks: their count is of the pair, so that a group has many at once."""


def latest_heartbeats(run: Run) -> dict[int, list[Beat]]:
    """Rank → its latest heartbeat (a row a collective), of ranks whose step has not ended since."""
    ended = {
        int(rank): run.ordinals_A[run.present_AR[:, index]].max(initial=-1)
        for index, rank in enumerate(run.ranks_R.tolist())
    }
    found: dict[int, list[Beat]] = {}
    for beat in run.heartbeats.to_pylist():
        rows = found.setdefault(beat["rank"], [])
        if rows and beat["time_ns"] > rows[0]["time_ns"]:
            rows.clear()
        if not rows or beat["time_ns"] == rows[0]["time_ns"]:
            rows.append(beat)
    return {rank: rows for rank, rows in found.items() if rows[0]["ordinal"] > ended.get(rank, -1)}


def meeting_of(beat: Beat) -> tuple[int, int] | None:
    """(group, count) of the collective that a rank is in; None in none, or between two ranks."""
    if beat["group"] is None or beat["seq"] is None or beat["op"] in _DIRECT:
        return None
    return beat["group"], beat["seq"]
