"""How late each rank comes to the collectives of its groups, from arrivals alone.

Nothing has to be known of ends. Ranks that left the operation before together should come to the
next one together; who comes later needed longer for what lies between. Times count from each rank's
own start of the step, so that clocks need not agree.

Shape legend: A = all steps, R = ranks, P = pairs (a rank in one of its groups), C = operations of one
step (a rank in a lane).
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.frame import WARM_UP_STEPS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.moments import Layout
    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_LEAST_STEPS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Seconds that a rank comes after the first member, over a step's operations on one group."""

    rank_P: Ints
    """Rank index."""
    group_P: Ints
    """Index into the run's groups."""
    late_AP: Floats
    """Summed over phases, of the operation in which it is most; NaN where a step is not known."""


def lateness(run: Run) -> Lateness | None:
    """Lateness of every rank in each of its groups; None without ten steps of arrivals.

    Blocking operations set everybody back to zero, so their lateness adds up; those of one phase that
    begin alike (a gather and a scatter of the same unit) show the same, and only the larger is taken.
    Where operations overlap, the sum is more than the time lost.
    """
    operations, moments = run.operations, run.operations.moments
    kept = [int(o) for o in moments.ordinals() if o >= WARM_UP_STEPS]
    group_L = operations.group_L
    if len(kept) < _LEAST_STEPS or not (group_L >= 0).any():
        return None
    phases = sorted({phase or "" for phase in operations.phase_L})
    ops = sorted(set(operations.op_L))
    phase_L = np.array([phases.index(phase or "") for phase in operations.phase_L], dtype=np.int64)
    op_L = np.array([ops.index(op) for op in operations.op_L], dtype=np.int64)
    rank_P = np.concatenate([group.members for group in run.groups])
    group_P = np.repeat(np.arange(len(run.groups)), [group.members.size for group in run.groups])
    ranks = run.ranks_R.size
    code_P = group_P * ranks + rank_P
    order = np.argsort(code_P)
    kinds = len(phases) * len(ops)
    late_AP = np.full((run.ordinals_A.size, rank_P.size), np.nan)
    places: dict[int, tuple[NDArray[np.bool_], Ints, Ints]] = {}

    def placed(number: int, layout: Layout) -> tuple[NDArray[np.bool_], Ints, Ints]:
        """Operations on groups, their lanes, and their (pair, kind)."""
        if number not in places:
            lane = layout.lane_C.astype(np.int64)
            rank = np.searchsorted(run.ranks_R, layout.rank_C)
            use = group_L[lane] >= 0
            code = group_L[lane[use]] * ranks + rank[use]
            at = order[np.minimum(np.searchsorted(code_P[order], code), order.size - 1)]
            kind = phase_L[lane[use]] * len(ops) + op_L[lane[use]]
            places[number] = (use, lane[use], at * kinds + kind)
        return places[number]

    for ordinal in kept:
        number = moments.layout_of[ordinal]
        use, lane_C, cell_C = placed(number, moments.layouts[number])
        arrival_C = moments.arrival_s[ordinal].astype(np.float64)[use]
        first_L = np.full(group_L.size, np.inf)
        np.minimum.at(first_L, lane_C, arrival_C)
        after_C = arrival_C - first_L[lane_C]
        total = np.bincount(cell_C, weights=after_C, minlength=rank_P.size * kinds)
        total = total.reshape(rank_P.size, len(phases), len(ops)).max(axis=2).sum(axis=1)
        seen = np.bincount(cell_C // kinds, minlength=rank_P.size) > 0
        step = int(np.searchsorted(run.ordinals_A, ordinal))
        late_AP[step] = np.where(seen, total, np.nan)
    return Lateness(rank_P=rank_P, group_P=group_P, late_AP=late_AP)
