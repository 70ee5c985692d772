"""All that a detector may import: what it is given, what it returns, and the statistics.

A detector is a pure function ``detect(window, params) -> Diagnosis``. It names one fault a finding,
normally one rank each: the engine puts together the windows of one fault, and the ranks that fell
ill together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from argus_otel.detect.definition import Params
from argus_otel.detect.reference import Comparison, compare
from argus_otel.detect.statistics import (
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    median_over,
    start_of_lasting_change,
)
from argus_otel.detect.window import Window
from argus_otel.tables.findings import Abstention, Diagnosis, Finding, Onset, Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "Abstention",
    "Comparison",
    "Diagnosis",
    "Finding",
    "Onset",
    "Params",
    "Window",
    "abstain",
    "compare",
    "lowest_mean",
    "luck_of_fastest_quarter",
    "luck_of_slowest",
    "make_finding",
    "median_over",
    "name_ranks",
    "start_of_lasting_change",
]


def name_ranks(window: Window, ranks: Sequence[int]) -> str:
    """``Rank 2 (host-a)`` or ``Ranks 2, 3 (host-a)``, from rank indices, for the reader.

    At most eight numbers; runs are joined to ``8-15``.
    """
    numbers = [int(window.ranks_R[rank]) for rank in ranks]
    hosts = sorted({window.host(rank) for rank in ranks} - {""})
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
