"""One clock: how far each rank's is off, from when operations end that all members need.

In an all_reduce, all_gather, all_to_all or barrier nobody can end before the last has arrived, so
all ends are nearly one moment, and what differs is the clocks. One end tells little (scheduling,
ring order); the median of many does.

Shape legend: E = ends used, R = ranks with ends, M = moments, i.e. (group, seq) pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.tables.schemas import RunTables

_MUTUAL: Final = ("all_reduce", "all_gather", "all_to_all", "barrier")
"""Each member depends on all others. Not so for broadcast and point-to-point, whose ends are off
by the whole lateness (measured: +17 ms)."""

MIN_ENDS: Final = 50
_MOMENTS_PER_GROUP: Final = 256
"""Enough for the median, and bounds the work for large jobs."""
_ROUNDS: Final = 30
_SETTLED_NS: Final = 1_000.0

# Standard error of a median of n normal values: 1.2533 sigma / sqrt(n); sigma is 1.4826 MAD.
_MEDIAN_ERROR: Final = 1.2533 * 1.4826


def with_clock_offsets(tables: RunTables) -> RunTables:
    """Fill ``clock_offset_ns`` and ``clock_error_ns`` of each rank's steps; else they stay null.

    An offset is how far a rank's clock is ahead of the median of the ranks that it shares groups
    with, directly or over others; ``start_ns`` less the offset is on the common clock. The error
    is one standard error. Null with fewer than 50 ends.
    """
    ends = _ends(tables)
    if ends is None:
        return tables
    rank_E, moment_E, ordinal_E, end_E = ends
    ranks_R, who_E = np.unique(rank_E, return_inverse=True)
    offset_R, rest_E = _solve(who_E, moment_E, end_E, ranks_R.size)
    spread_R = _medians(who_E, np.abs(rest_E), ranks_R.size)
    pairs = np.unique(np.stack((who_E, ordinal_E)), axis=1)
    # Ends within one step share its mood: the steps are the independent samples.
    steps_R = np.bincount(pairs[0], minlength=ranks_R.size)
    error_R = _MEDIAN_ERROR * spread_R / np.sqrt(steps_R)
    enough_R = np.bincount(who_E, minlength=ranks_R.size) >= MIN_ENDS
    return replace(
        tables,
        steps=_filled(tables.steps, ranks_R[enough_R], offset_R[enough_R], error_R[enough_R]),
    )


def _ends(
    tables: RunTables,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]] | None:
    """Rank, moment, step and Unix time (ns, relative to the first step's start) of ends [E]."""
    used = pc.field("op").isin(_MUTUAL) & pc.field("duration_s").is_valid()
    rows = tables.collectives.filter(used & pc.field("seq").is_valid())
    if rows.num_rows == 0 or tables.steps.num_rows == 0:
        return None
    _, group = np.unique(rows["group"].to_numpy(), return_inverse=True)
    seq = rows["seq"].to_numpy()
    rank, ordinal = rows["rank"].to_numpy(), rows["ordinal"].to_numpy()
    start, known = _step_starts(tables.steps, ordinal, rank)
    relative = start - tables.steps["start_ns"].to_numpy().min()
    end = relative + (rows["arrival_s"].to_numpy() + rows["duration_s"].to_numpy()) * 1e9
    _, moment = np.unique(np.stack((group, seq)), axis=1, return_inverse=True)
    moment = moment.ravel()
    shared = known & (np.bincount(moment[known], minlength=int(moment.max()) + 1)[moment] > 1)
    shared &= _is_chosen(group, moment)
    if not shared.any():
        return None
    return rank[shared], moment[shared], ordinal[shared], end[shared]


def _step_starts(
    steps: pa.Table, ordinal: NDArray[np.int64], rank: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    step_ordinal, step_rank = steps["ordinal"].to_numpy(), steps["rank"].to_numpy()
    low = int(min(step_ordinal.min(), ordinal.min()))
    width = int(max(step_rank.max(), rank.max())) + 1
    keys = (step_ordinal - low) * width + step_rank  # sorted, as the steps are
    wanted = (ordinal - low) * width + rank
    place = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return steps["start_ns"].to_numpy()[place], keys[place] == wanted


def _is_chosen(group: NDArray[np.int64], moment: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A spread of at most so many moments of each group. Moments are numbered group by group."""
    first = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, group, moment)
    last = np.zeros(int(group.max()) + 1, np.int64)
    np.maximum.at(last, group, moment)
    stride = -(-(last - first + 1) // _MOMENTS_PER_GROUP)
    chosen: NDArray[np.bool_] = (moment - first[group]) % stride[group] == 0
    return chosen


def _solve(
    who_E: NDArray[np.int64], moment_E: NDArray[np.int64], end_E: NDArray[np.float64], ranks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Offsets (R) that make the ends of each moment agree best, and what remains (E).

    Alternates: a moment is the median of its members' corrected ends, an offset the median of a
    rank's distances to its moments. One round would do if all shared one group; a rank that
    mostly meets ranks of its own host (tensor parallel) needs what those learn elsewhere.
    """
    _, moment_E = np.unique(moment_E, return_inverse=True)
    moments = int(moment_E.max()) + 1
    offset_R = np.zeros(ranks)
    rest_E = end_E
    for _ in range(_ROUNDS):
        time_M = _medians(moment_E, end_E - offset_R[who_E], moments)
        before_R = offset_R
        offset_R = _medians(who_E, end_E - time_M[moment_E], ranks)
        offset_R -= np.median(offset_R)
        rest_E = end_E - time_M[moment_E] - offset_R[who_E]
        if float(np.abs(offset_R - before_R).max()) < _SETTLED_NS:
            break
    return offset_R, rest_E


def _medians(key: NDArray[np.int64], values: NDArray[np.float64], keys: int) -> NDArray[np.float64]:
    """Median of the values under each key 0..keys-1, all of which occur."""
    order = np.lexsort((values, key))
    sizes = np.bincount(key, minlength=keys)
    first = np.cumsum(sizes) - sizes
    ordered = values[order]
    lower, upper = ordered[first + (sizes - 1) // 2], ordered[first + sizes // 2]
    medians: NDArray[np.float64] = (lower + upper) / 2
    return medians


def _filled(
    steps: pa.Table,
    ranks_R: NDArray[np.int64],
    offset_R: NDArray[np.float64],
    error_R: NDArray[np.float64],
) -> pa.Table:
    if ranks_R.size == 0:
        return steps
    rank_S = steps["rank"].to_numpy()
    place = np.minimum(np.searchsorted(ranks_R, rank_S), ranks_R.size - 1)
    missing_S = ranks_R[place] != rank_S
    for name, values_R in (("clock_offset_ns", offset_R), ("clock_error_ns", error_R)):
        at = steps.schema.get_field_index(name)
        values = np.rint(values_R).astype(np.int64)[place]
        steps = steps.set_column(at, steps.schema.field(at), pa.array(values, mask=missing_S))
    return steps
