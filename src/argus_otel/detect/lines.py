"""What each rank does in a step, in order, and what it waits for where: the raw material of a replay.

A rank's *line* is a row of marks in time: it comes to a collective, begins or ends the pass of a
micro-batch, ends the step. Before each mark lies own time, and possibly waiting for operations
that were begun earlier. Ranks of one *kind* (a pipeline stage, say) have the same marks.

What waits for what is read off the times: an operation is waited for at the first mark that never
comes before the operation's end. No clock is compared with another rank's.

Shape legend: S = steps of the graph, C = (rank, lane) pairs, N = ranks of one kind, K = operations of
such a rank, J = its marks, P = its passes. Ranks come last, so that what is said of one mark lies
together: it is worked out mark by mark, in the processor's cache.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.detect.statistics import median_over

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_CLOSE_S: Final = 50e-6
"""Times closer than this count as one: arrivals are whole microseconds, and single precision tells
4 microseconds apart at the end of a step of a minute."""
_OVERLAP: Final = 0.1
_MOST_OVERLAP_S: Final = 200e-6
"""An operation's end may be told late by a tenth of its duration, and so much at most: in ByteDance's
job AR passes begin up to 131 microseconds before the receive that they need is said to be over."""
_CLOSE_SHARE: Final = 1e-3
"""Of a pass: how far its end may lie from a mark and count as that mark."""
_SURE: Final = 0.97
"""Share of steps and ranks in which a mark must not come before an operation's end, to wait for it;
the rest allows for clocks that were set."""
_PRESENT: Final = 0.5
"""Share of steps in which an operation or pass must be there to be part of the usual step."""

# Of marks at one time: what comes first.
_PASS_END, _SEND, _ARRIVAL, _PASS_START, _STEP_END = range(5)

OTHER: Final = -1
"""Label of own time outside passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Operations of the usual step, by (rank, lane), ascending by rank."""

    rank_C: Ints
    """Rank indices."""
    lane_C: Ints
    arrival_SC: Floats
    """Seconds since the rank's start of the step; NaN where that step has none."""
    duration_SC: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The marks of ranks of one kind."""

    ranks_N: Ints
    """Rank indices."""
    pair_NK: Ints
    """Index into the pairs."""
    at_K: Ints
    """Mark at which each operation is begun."""
    gate_K: Ints
    """Mark that waits for it; -1 where nothing does in this step."""
    own_SJN: Floats
    """Own time that ends at each mark; no NaN. Idle time that no operation explains is left out."""
    label_J: Ints
    """Whose compute that is: pass number * 2 + backward, or ``OTHER``."""


def read_pairs(run: Run, ordinals_S: Ints) -> Pairs | None:
    """Gather who took part in what; None where nothing is kept of these steps.

    Args:
        run: From its builder.
        ordinals_S: Steps that ``run.operations.moments`` has.
    """
    moments = run.operations.moments
    lanes = run.operations.lanes
    if not ordinals_S.size or not lanes:
        return None
    used = sorted({moments.layout_of[step] for step in ordinals_S.tolist()})
    code_of = {}
    for index in used:
        layout = moments.layouts[index]
        rank = np.searchsorted(run.ranks_R, layout.rank_C).astype(np.int64)
        code_of[index] = rank * lanes + layout.lane_C
    times = np.array([moments.layout_of[step] for step in ordinals_S.tolist()])
    if len(used) == 1:
        code_C = code_of[used[0]]
    else:
        found, inverse = np.unique(np.concatenate(list(code_of.values())), return_inverse=True)
        steps_of = np.concatenate(
            [np.full(code_of[index].size, np.count_nonzero(times == index)) for index in used]
        )
        share = np.bincount(inverse, weights=steps_of) / ordinals_S.size
        code_C = found[share >= _PRESENT]
    if not code_C.size:
        return None
    arrival = np.full((ordinals_S.size, code_C.size), np.nan)
    duration = arrival.copy()
    place_of = {}
    for index in used:
        place = np.minimum(np.searchsorted(code_C, code_of[index]), code_C.size - 1)
        here = code_C[place] == code_of[index]
        place_of[index] = (place[here], here)
    for index, step in enumerate(ordinals_S.tolist()):
        place, here = place_of[moments.layout_of[step]]
        arrival[index, place] = moments.arrival_s[step][here]
        duration[index, place] = moments.duration_s[step][here]
    return Pairs(
        rank_C=code_C // lanes, lane_C=code_C % lanes, arrival_SC=arrival, duration_SC=duration
    )


def lay_lines(run: Run, pairs: Pairs, steps_S: Ints, *, gaps: bool) -> list[Line]:
    """The line of every rank that took part in something.

    Args:
        run: From its builder.
        pairs: Of those steps.
        steps_S: Indices of the steps among all.
        gaps: Whether own time outside passes, before the step's last operation, counts.
    """
    key_C = _keys(run, pairs)
    passes_SPR, starts_SPR, there_RP = _passes(run, steps_S)
    kinds = _kinds(pairs.rank_C, key_C, np.concatenate([there_RP, _stages(run)], axis=1))
    step_s = run.columns["step_s"][steps_S]
    between_s = np.nan_to_num(run.columns["between_s"][steps_S])
    busy_s = run.columns["busy_s"][steps_S] if gaps else np.zeros(step_s.shape)
    lines = []
    for ranks_N, pair_NK in kinds:
        at_P = np.flatnonzero(there_RP[ranks_N[0]])
        where = np.ix_(np.arange(steps_S.size), at_P, ranks_N)
        lines.append(
            _line(
                ranks_N=ranks_N,
                pair_NK=pair_NK,
                is_send_K=key_C[pair_NK[0]] % 2 == 1,
                arrival_SKN=pairs.arrival_SC[:, pair_NK.T],
                duration_SKN=pairs.duration_SC[:, pair_NK.T],
                start_SPN=starts_SPR[where],
                compute_SPN=passes_SPR[where],
                label_P=at_P,
                step_s_SN=step_s[:, ranks_N],
                busy_s_SN=busy_s[:, ranks_N],
                between_s_SN=between_s[:, ranks_N],
            )
        )
    return lines


def _keys(run: Run, pairs: Pairs) -> Ints:
    """A number for what each pair is: the same for the same operation of another rank [C]; odd: send."""
    operations = run.operations
    numbers: dict[tuple[Any, ...], int] = {}
    key_L = np.empty(operations.lanes, dtype=np.int64)
    groups = [group.description for group in run.groups]
    described = zip(
        operations.group_L.tolist(), operations.op_L, operations.phase_L,
        operations.payload_bytes_L.tolist(), operations.nth_L.tolist(),
        operations.source_L.tolist(), operations.target_L.tolist(), strict=True,
    )  # fmt: skip
    for lane, (group, op, phase, payload, nth, source, target) in enumerate(described):
        name = groups[group] if group >= 0 else target - source
        # A pair of ranks may have the phase of either side.
        about = (name, op, phase if group >= 0 else None, payload, nth)
        key_L[lane] = numbers.setdefault(about, len(numbers))
    direct_C = operations.source_L[pairs.lane_C] >= 0
    sends_C = direct_C & (operations.source_L[pairs.lane_C] == pairs.rank_C)
    keys: Ints = key_L[pairs.lane_C] * 2 + sends_C
    return keys


def _passes(run: Run, steps_S: Ints) -> tuple[Floats, Floats, Bools]:
    """Compute and start of each pass [S, P, R], and which a rank has [R, P]."""
    ranks = run.ranks_R.size
    if run.passes is None:
        nothing = np.empty((steps_S.size, 0, ranks))
        return nothing, nothing, np.empty((ranks, 0), dtype=bool)
    shape = (steps_S.size, ranks, -1)
    compute = run.passes.duration_ARM2[steps_S].reshape(shape).astype(np.float64)
    start = run.passes.start_ARM2[steps_S].reshape(shape).astype(np.float64)
    seen = np.count_nonzero(~np.isnan(compute), axis=0)
    known = np.count_nonzero(~np.isnan(compute).all(axis=2), axis=0)
    there: Bools = (seen > 0) & (seen >= _PRESENT * known[:, None])
    return np.swapaxes(compute, 1, 2), np.swapaxes(start, 1, 2), there


def _stages(run: Run) -> Ints:
    """What tells ranks with the same operations in another order apart [R, 1].

    Stages in the middle of a pipeline have the same operations, but each its own order.
    """
    if run.places is not None:
        return run.places.get("pp", np.zeros(run.ranks_R.size, dtype=np.int64))[:, None]
    return run.peers.label_R[:, None]


def _kinds(rank_C: Ints, key_C: Ints, also_RX: Ints) -> list[tuple[Ints, Ints]]:
    """Ranks [N] of each kind and their pairs [N, K], in the same order for all."""
    order = np.lexsort((key_C, rank_C))
    ranks, first, count = np.unique(rank_C[order], return_index=True, return_counts=True)
    table = np.full((ranks.size, int(count.max())), -1, dtype=np.int64)
    nth = np.arange(order.size) - np.repeat(first, count)
    table[np.repeat(np.arange(ranks.size), count), nth] = key_C[order]
    whole = np.concatenate([table, also_RX[ranks]], axis=1)
    _, kind = np.unique(whole, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    found = []
    for which in range(int(kind.max()) + 1):
        members = np.flatnonzero(kind == which)
        rows = first[members][:, None] + np.arange(count[members[0]])
        found.append((ranks[members], order[rows]))
    return found


def _line(
    *,
    ranks_N: Ints,
    pair_NK: Ints,
    is_send_K: Bools,
    arrival_SKN: Floats,
    duration_SKN: Floats,
    start_SPN: Floats,
    compute_SPN: Floats,
    label_P: Ints,
    step_s_SN: Floats,
    busy_s_SN: Floats,
    between_s_SN: Floats,
) -> Line:
    operations, passes = pair_NK.shape[1], label_P.size
    end_SKN = arrival_SKN + duration_SKN
    # Each mark: its class, and which operation or pass it is about.
    about = [(_SEND if send else _ARRIVAL, k) for k, send in enumerate(is_send_K.tolist())]
    about += [(_PASS_START, p) for p in range(passes)]
    times = [*_by_mark(arrival_SKN), *_by_mark(start_SPN)]
    usual = _usual(times)
    if passes:
        order = _Order(about, times, usual, step_s_SN)
        ends_SPN = _pass_ends(order, end_SKN, is_send_K, compute_SPN)
        about += [(_PASS_END, p) for p in range(passes)]
        ends = _by_mark(ends_SPN)
        times, usual = [*times, *ends], np.concatenate([usual, _usual(ends)])
    marks = _Order(about, times, usual, step_s_SN)
    gate_K = _gates(marks, end_SKN, is_send_K)
    at_K = np.empty(operations, dtype=np.int64)
    label_J = np.full(len(marks.about), OTHER, dtype=np.int64)
    active = OTHER
    for mark, (kind, index) in enumerate(marks.about):
        label_J[mark] = active
        if kind in (_SEND, _ARRIVAL):
            at_K[index] = mark
        elif kind == _PASS_START:
            active = int(label_P[index])
        elif kind == _PASS_END and active == label_P[index]:
            active = OTHER
    own = _own(marks.time_SJN, end_SKN, gate_K)
    if passes:
        _leave_out_idle(own, busy_s_SN, label_J)
    own[:, 0] += between_s_SN
    return Line(
        ranks_N=ranks_N,
        pair_NK=pair_NK,
        at_K=at_K,
        gate_K=gate_K,
        own_SJN=_filled(own),
        label_J=label_J,
    )


def _by_mark(times_SJN: Floats) -> list[Floats]:
    return [times_SJN[:, mark] for mark in range(times_SJN.shape[1])]


def _usual(times: list[Floats]) -> Floats:
    """The median of each."""
    return np.array([float(median_over(of_mark.reshape(-1), axis=0)) for of_mark in times])


class _Order:
    """Marks sorted by when they usually are, the end of the step last, and made to ascend.

    Args:
        about: Of each mark its class, and which operation or pass it is about.
        times: Of each mark, [S, N].
        usual: The median of each.
        step_s_SN: When the step ends.
    """

    def __init__(
        self,
        about: list[tuple[int, int]],
        times: list[Floats],
        usual: Floats,
        step_s_SN: Floats,
    ) -> None:
        rounded = np.rint(usual / _CLOSE_S)
        classes = np.array([kind for kind, _ in about], dtype=np.int64)
        order = np.lexsort((usual, classes, rounded)).tolist()
        self.about = [*(about[k] for k in order), (_STEP_END, 0)]
        time_SJN = np.empty((step_s_SN.shape[0], len(self.about), step_s_SN.shape[1]))
        latest: Floats | None = None
        for mark, time_SN in enumerate([*(times[k] for k in order), step_s_SN]):
            if latest is None:
                time_SJN[:, mark] = time_SN
            else:
                np.fmax(latest, time_SN, out=time_SJN[:, mark])
            latest = time_SJN[:, mark]
        unknown_SN = np.isnan(step_s_SN)
        if unknown_SN.any():
            np.swapaxes(time_SJN, 1, 2)[unknown_SN] = np.nan
        self.time_SJN = time_SJN


def _gates(marks: _Order, end_SKN: Floats, is_send_K: Bools) -> Ints:
    """The mark that waits for each operation.

    A send is not waited for: where it was begun together with a receive, that one tells.
    """
    about, time_SJN = marks.about, marks.time_SJN
    gates = np.full(end_SKN.shape[1], -1, dtype=np.int64)
    for mark, (kind, k) in enumerate(about):
        if kind != _ARRIVAL or is_send_K[k]:
            continue
        end_SN = end_SKN[:, k]
        took = np.maximum(end_SN - time_SJN[:, mark], 0.0)
        end_SN = end_SN - np.maximum(_CLOSE_S, np.minimum(_OVERLAP * took, _MOST_OVERLAP_S))
        # No number, where the end is not known or the step's is not: then nothing comes after it.
        known = np.count_nonzero(~np.isnan(end_SN))
        if not known:
            continue
        for later in range(mark + 1, len(about)):
            if about[later][0] == _PASS_END:
                continue
            if np.count_nonzero(time_SJN[:, later] >= end_SN) >= _SURE * known:
                gates[k] = later
                break
    return gates


def _own(time_SJN: Floats, end_SKN: Floats, gate_K: Ints) -> Floats:
    """Own time before each mark: since the one before it, or the last end that it waits for."""
    own = np.empty(time_SJN.shape)
    gated: dict[int, list[int]] = {}
    for k, gate in enumerate(gate_K.tolist()):
        gated.setdefault(gate, []).append(k)
    since: Floats = np.zeros((time_SJN.shape[0], time_SJN.shape[2]))
    for mark in range(time_SJN.shape[1]):
        for k in gated.get(mark, ()):
            # An end that is not known holds nothing up.
            since = np.maximum(since, np.fmax(end_SKN[:, k], -np.inf))
        np.maximum(time_SJN[:, mark] - since, 0.0, out=own[:, mark])
        since = time_SJN[:, mark]
    return own


def _leave_out_idle(own_SJN: Floats, busy_s_SN: Floats, label_J: Ints) -> None:
    """Take out what is more than the rank was busy, in place: it waited for what nobody recorded.

    Passes are compute, and the end of the step after its last operation is nobody's waiting, so
    that it comes off the rest.
    """
    outside = np.flatnonzero(label_J[:-1] == OTHER).tolist()
    spare = np.zeros(busy_s_SN.shape)
    for mark in outside:
        spare += own_SJN[:, mark]
    idle = np.clip(own_SJN.sum(axis=1) - busy_s_SN, 0.0, spare)
    kept = 1 - np.nan_to_num(idle) / np.maximum(spare, 1e-9)
    for mark in outside:
        own_SJN[:, mark] *= kept


def _filled(own_SJN: Floats) -> Floats:
    """What is not known is what is usual in that step, or ever."""
    if np.isnan(own_SJN).any():
        own_SJN = np.where(np.isnan(own_SJN), median_over(own_SJN, axis=2)[:, :, None], own_SJN)
        own_SJN = np.where(np.isnan(own_SJN), median_over(own_SJN, axis=0)[None], own_SJN)
    return np.nan_to_num(own_SJN, copy=False)


def _pass_ends(marks: _Order, end_SKN: Floats, is_send_K: Bools, compute_SPN: Floats) -> Floats:
    """When each pass ended [S, P, N]: its compute, and what was waited for inside it, after its start.

    Args:
        marks: All but the ends of passes.
        end_SKN: Of the operations.
        is_send_K: Which of those are sends.
        compute_SPN: Of the passes.
    """
    time_SJN = marks.time_SJN
    worked_SJN = _own(time_SJN, end_SKN, _gates(marks, end_SKN, is_send_K))
    for mark in range(1, time_SJN.shape[1]):
        worked_SJN[:, mark] += worked_SJN[:, mark - 1]
    ends = np.empty(compute_SPN.shape)
    last = time_SJN.shape[1] - 1
    for start, (kind, p) in enumerate(marks.about):
        if kind != _PASS_START:
            continue
        compute = compute_SPN[:, p]
        least = compute * (1 - _CLOSE_SHARE) - _CLOSE_S
        at_SN = np.full(compute.shape, start + 1)
        # Work only grows from mark to mark: the pass is over at the first one with enough of it.
        for mark in range(start + 1, last):
            short = ~(worked_SJN[:, mark] - worked_SJN[:, start] >= least)
            if not short.any():
                break
            at_SN += short
        at_S1N = at_SN[:, None]
        since = np.take_along_axis(worked_SJN, at_S1N, 1)[:, 0] - worked_SJN[:, start]
        over = np.maximum(since - compute, 0.0)
        ends[:, p] = np.take_along_axis(time_SJN, at_S1N, 1)[:, 0] - over
    return ends
