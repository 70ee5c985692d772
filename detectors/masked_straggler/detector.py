"""Whose late arrivals the others take for slow communication.

Shape legend: A = all steps, R = ranks, P = pairs (a rank in one of its groups).
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    WARM_UP_STEPS,
    Diagnosis,
    Finding,
    Params,
    Run,
    Suppressed,
    abstain_run,
    lasting,
    lateness,
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    make_run_finding,
    median_over,
    name_run_ranks,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.api import Lateness

    Floats = NDArray[np.float64]

_MOST_VICTIMS = 64
"""Ranks that are listed as victims; the group says the rest."""


def detect(run: Run, params: Params) -> Diagnosis:
    """Name the ranks that come late on their own account."""
    settled_A = run.ordinals_A >= WARM_UP_STEPS
    busy = run.columns["busy_s"][settled_A]
    if busy.size and np.isfinite(busy).mean() >= params["busy_known"]:
        return Diagnosis()  # compute_straggler has better evidence
    if (run.operations.source_L >= 0).any():
        return abstain_run(
            run,
            params,
            "pipeline",
            "ends of receives; a stage is late because of the one before it",
        )
    seen = lateness(run)
    if seen is None:
        return abstain_run(run, params, "missing_data", "arrivals at collectives of groups")
    step_A = median_over(run.columns["step_s"], axis=1)
    share_AP, bar_P = _shares(run, seen, step_A)
    over_AP = lasting(
        np.nan_to_num(share_AP) >= np.maximum(params["info_share"], bar_P), ~np.isnan(share_AP)
    )
    shown_A = np.asarray(over_AP.any(axis=1))
    usual_P = median_over(np.where(shown_A[:, None], share_AP, np.nan), axis=0)
    culprits = _culprits(run, params, seen, np.asarray(over_AP.any(axis=0)), usual_P)
    return Diagnosis(
        findings=tuple(_finding(run, params, seen, share_AP, over_AP, rank) for rank in culprits)
    )


def _shares(run: Run, seen: Lateness, step_A: Floats) -> tuple[Floats, Floats]:
    """Lateness beyond the group's earliest, as a share of the step [A, P]; bar of chance [P]."""
    columns = run.columns
    aside_AR = sum(np.nan_to_num(columns[name]) for name in ("data_wait_s", "gc_s", "run_delay_s"))
    late_AP = seen.late_AP - np.asarray(aside_AR)[:, seen.rank_P]
    share_AP = late_AP / step_A[:, None]
    bar_P = np.zeros(seen.rank_P.size)
    for group in np.unique(seen.group_P):
        mine = seen.group_P == group
        part = share_AP[:, mine]
        n = part.shape[1]
        part -= lowest_mean(median_over(part, axis=0), axis=0)
        share_AP[:, mine] = part
        jump = median_over(np.abs(np.diff(part, axis=0)).reshape(-1), axis=0)
        luck = luck_of_slowest(max(n, 2)) + luck_of_fastest_quarter(n)
        # From jumps to a standard deviation, and a median of 20 errs by a quarter more than a mean.
        sigma = 1.4826 * float(np.nan_to_num(jump)) / sqrt(2)
        bar_P[mine] = luck * 1.25 * sigma / sqrt(20)
    return share_AP, bar_P


def _culprits(
    run: Run, params: Params, seen: Lateness, late_P: NDArray[np.bool_], usual_P: Floats
) -> list[int]:
    """Ranks that are late somewhere, and nowhere early beside somebody who is late."""
    size_P = np.where(late_P, np.nan_to_num(usual_P), 0.0)
    latest_G = np.zeros(len(run.groups))
    np.maximum.at(latest_G, seen.group_P, size_P)
    latest_P = latest_G[seen.group_P]
    waits_P = (latest_P > 0) & (size_P < params["same"] * latest_P)
    excused_R = np.zeros(run.ranks_R.size, dtype=bool)
    excused_R[seen.rank_P[waits_P]] = True
    late_R = np.zeros(run.ranks_R.size, dtype=bool)
    late_R[seen.rank_P[late_P]] = True
    ranks: list[int] = np.flatnonzero(late_R & ~excused_R).tolist()
    return ranks


def _finding(
    run: Run,
    params: Params,
    seen: Lateness,
    share_AP: Floats,
    over_AP: NDArray[np.bool_],
    rank: int,
) -> Finding:
    mine = np.flatnonzero((seen.rank_P == rank) & over_AP.any(axis=0))
    # Overlapping operations show the same lateness several times: the least is the safe one.
    usual = [float(median_over(share_AP[over_AP[:, pair], pair], axis=0)) for pair in mine]
    pair = int(mine[int(np.argmin(usual))])
    over_A, share = over_AP[:, pair], min(min(usual), 0.95)
    step_s = float(median_over(median_over(run.columns["step_s"][over_A], axis=1), axis=0))
    group = run.groups[int(seen.group_P[pair])]
    victims = [int(run.ranks_R[one]) for one in group.members if one != rank]
    lost_s = share * step_s
    finding = make_run_finding(
        run,
        params,
        cause="compute_straggler",
        ranks=[rank],
        over_A=over_A,
        severity=params.severity(cost=share) or "info",
        slowdown=1 / (1 - share),
        lost_s=lost_s,
        summary=f"{name_run_ranks(run, [rank])} comes {lost_s * 1e3:.0f} ms a step late to its "
        f"collectives; the {len(victims)} other ranks of its group ({group.description}) wait for "
        "it there. It is not their links: this rank takes longer for its own work.",
        groups=(f"{group.key:016x}",),
        evidence={
            "pattern": "lasting",
            "late_s": round(lost_s, 6),
            "late_share": round(share, 3),
            "waited_in": group.description,
            "victims": len(victims),
            "seen_by": "arrivals",
        },
    )
    symptom = Suppressed(cause="slow_link", ranks=tuple(victims[:_MOST_VICTIMS]))
    return replace(finding, groups=(), suppressed=(symptom,))
