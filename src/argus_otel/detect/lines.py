"""What each rank does in a step, in order, and what it waits for where: the raw material of a replay.

A rank's *line* is a row of marks in time: it comes to a collective, begins or ends the pass of a
micro-batch, ends the step. Before each mark lies own time, and possibly waiting for operations
that were begun earlier. Ranks of one *kind* (a pipeline stage, say) have the same marks.

What waits for what is read off the times: an operation is waited for at the first mark that never
comes before the operation's end. No clock is compared with another rank's.

Shape legend: S = steps of the graph, C = (rank, lane) pairs, N = ranks of one kind, K = operations of
such a rank, J = its marks, P = its passes.
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
    own_SNJ: Floats
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
    for index, step in enumerate(ordinals_S.tolist()):
        code = code_of[moments.layout_of[step]]
        place = np.minimum(np.searchsorted(code_C, code), code_C.size - 1)
        here = code_C[place] == code
        arrival[index, place[here]] = moments.arrival_s[step][here]
        duration[index, place[here]] = moments.duration_s[step][here]
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
    passes_SRP, starts_SRP, there_RP = _passes(run, steps_S)
    kinds = _kinds(pairs.rank_C, key_C, np.concatenate([there_RP, _stages(run)], axis=1))
    step_s = run.columns["step_s"][steps_S]
    between_s = np.nan_to_num(run.columns["between_s"][steps_S])
    busy_s = run.columns["busy_s"][steps_S] if gaps else np.zeros(step_s.shape)
    lines = []
    for ranks_N, pair_NK in kinds:
        at_P = np.flatnonzero(there_RP[ranks_N[0]])
        where = np.ix_(np.arange(steps_S.size), ranks_N, at_P)
        lines.append(
            _line(
                ranks_N=ranks_N,
                pair_NK=pair_NK,
                is_send_K=key_C[pair_NK[0]] % 2 == 1,
                arrival_SNK=pairs.arrival_SC[:, pair_NK],
                duration_SNK=pairs.duration_SC[:, pair_NK],
                start_SNP=starts_SRP[where],
                compute_SNP=passes_SRP[where],
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
    """Compute and start of each pass [S, R, P], and which a rank has [R, P]."""
    ranks = run.ranks_R.size
    if run.passes is None:
        nothing = np.empty((steps_S.size, ranks, 0))
        return nothing, nothing, np.empty((ranks, 0), dtype=bool)
    shape = (steps_S.size, ranks, -1)
    compute = run.passes.duration_ARM2[steps_S].reshape(shape).astype(np.float64)
    start = run.passes.start_ARM2[steps_S].reshape(shape).astype(np.float64)
    seen = np.count_nonzero(~np.isnan(compute), axis=0)
    known = np.count_nonzero(~np.isnan(compute).all(axis=2), axis=0)
    there: Bools = (seen > 0) & (seen >= _PRESENT * known[:, None])
    return compute, start, there


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
    arrival_SNK: Floats,
    duration_SNK: Floats,
    start_SNP: Floats,
    compute_SNP: Floats,
    label_P: Ints,
    step_s_SN: Floats,
    busy_s_SN: Floats,
    between_s_SN: Floats,
) -> Line:
    operations, passes = pair_NK.shape[1], label_P.size
    end_SNK = arrival_SNK + duration_SNK
    # Each mark: its class, and which operation or pass it is about.
    about = [(_SEND if send else _ARRIVAL, k) for k, send in enumerate(is_send_K.tolist())]
    about += [(_PASS_START, p) for p in range(passes)]
    times = [arrival_SNK, start_SNP]
    if passes:
        ends_SNP = _pass_ends(arrival_SNK, end_SNK, is_send_K, start_SNP, compute_SNP, step_s_SN)
        about += [(_PASS_END, p) for p in range(passes)]
        times.append(ends_SNP)
    about, time_SNJ = _in_order(about, np.concatenate(times, axis=2), step_s_SN)
    gate_K = _gates(about, time_SNJ, end_SNK, is_send_K)
    at_K = np.empty(operations, dtype=np.int64)
    label_J = np.full(len(about), OTHER, dtype=np.int64)
    active = OTHER
    for mark, (kind, index) in enumerate(about):
        label_J[mark] = active
        if kind in (_SEND, _ARRIVAL):
            at_K[index] = mark
        elif kind == _PASS_START:
            active = int(label_P[index])
        elif kind == _PASS_END and active == label_P[index]:
            active = OTHER
    own = _own(time_SNJ, _waits(time_SNJ, end_SNK, gate_K))
    if passes:
        own = _without_idle(own, busy_s_SN, label_J)
    own[:, :, 0] += between_s_SN
    return Line(
        ranks_N=ranks_N,
        pair_NK=pair_NK,
        at_K=at_K,
        gate_K=gate_K,
        own_SNJ=_filled(own),
        label_J=label_J,
    )


def _in_order(
    about: list[tuple[int, int]], time_SNJ: Floats, step_s_SN: Floats
) -> tuple[list[tuple[int, int]], Floats]:
    """Marks sorted by when they usually are, the end of the step last, and made to ascend."""
    flat = time_SNJ.reshape(-1, time_SNJ.shape[2])
    usual = median_over(flat, axis=0) if len(about) else np.empty(0)
    rounded = np.rint(usual / _CLOSE_S)
    classes = np.array([kind for kind, _ in about])
    order = np.lexsort((usual, classes, rounded)) if len(about) else np.empty(0, dtype=np.int64)
    time_SNJ = np.concatenate([time_SNJ[:, :, order], step_s_SN[:, :, None]], axis=2)
    time_SNJ = np.where(np.isnan(step_s_SN)[:, :, None], np.nan, time_SNJ)
    ascending = np.fmax.accumulate(time_SNJ, axis=2)
    return [*(about[k] for k in order.tolist()), (_STEP_END, 0)], ascending


def _gates(
    about: list[tuple[int, int]], time_SNJ: Floats, end_SNK: Floats, is_send_K: Bools
) -> Ints:
    """The mark that waits for each operation.

    A send is not waited for: where it was begun together with a receive, that one tells.
    """
    gates = np.full(end_SNK.shape[2], -1, dtype=np.int64)
    for mark, (kind, k) in enumerate(about):
        if kind != _ARRIVAL or is_send_K[k]:
            continue
        known = ~np.isnan(end_SNK[:, :, k]) & ~np.isnan(time_SNJ[:, :, -1])
        if not known.any():
            continue
        end = end_SNK[:, :, k][known]
        took = np.maximum(end - time_SNJ[:, :, mark][known], 0.0)
        end = end - np.maximum(_CLOSE_S, np.minimum(_OVERLAP * took, _MOST_OVERLAP_S))
        for later in range(mark + 1, len(about)):
            if about[later][0] == _PASS_END:
                continue
            after = time_SNJ[:, :, later][known] >= end
            if np.count_nonzero(after) >= _SURE * end.size:
                gates[k] = later
                break
    return gates


def _waits(time_SNJ: Floats, end_SNK: Floats, gate_K: Ints) -> Floats:
    """Until when each mark was held up [S, N, J]; -inf where by nothing."""
    until = np.full(time_SNJ.shape, -np.inf)
    for k, gate in enumerate(gate_K.tolist()):
        if gate >= 0:
            until[:, :, gate] = np.fmax(until[:, :, gate], end_SNK[:, :, k])
    return until


def _own(time_SNJ: Floats, until_SNJ: Floats) -> Floats:
    """Own time before each mark."""
    before = np.concatenate([np.zeros((*time_SNJ.shape[:2], 1)), time_SNJ[:, :, :-1]], axis=2)
    own: Floats = np.maximum(time_SNJ - np.maximum(before, until_SNJ), 0.0)
    return own


def _without_idle(own_SNJ: Floats, busy_s_SN: Floats, label_J: Ints) -> Floats:
    """Take out what is more than the rank was busy: it waited for something that nobody recorded.

    Passes are compute, and the end of the step after its last operation is nobody's waiting, so
    that it comes off the rest.
    """
    outside = label_J == OTHER
    outside[-1] = False
    spare = own_SNJ[:, :, outside].sum(axis=2)
    idle = np.clip(own_SNJ.sum(axis=2) - busy_s_SN, 0.0, spare)
    kept = 1 - np.nan_to_num(idle) / np.maximum(spare, 1e-9)
    own: Floats = np.where(outside, own_SNJ * kept[:, :, None], own_SNJ)
    return own


def _filled(own_SNJ: Floats) -> Floats:
    """What is not known is what is usual in that step, or ever."""
    if np.isnan(own_SNJ).any():
        own_SNJ = np.where(np.isnan(own_SNJ), median_over(own_SNJ, axis=1)[:, None, :], own_SNJ)
        own_SNJ = np.where(np.isnan(own_SNJ), median_over(own_SNJ, axis=0)[None], own_SNJ)
    return np.nan_to_num(own_SNJ)


def _pass_ends(
    arrival_SNK: Floats,
    end_SNK: Floats,
    is_send_K: Bools,
    start_SNP: Floats,
    compute_SNP: Floats,
    step_s_SN: Floats,
) -> Floats:
    """When each pass ended [S, N, P]: its compute, and what was waited for inside it, after its start."""
    passes = start_SNP.shape[2]
    about = [(_SEND if send else _ARRIVAL, k) for k, send in enumerate(is_send_K.tolist())]
    about += [(_PASS_START, p) for p in range(passes)]
    about, time_SNJ = _in_order(about, np.concatenate([arrival_SNK, start_SNP], axis=2), step_s_SN)
    gate_K = _gates(about, time_SNJ, end_SNK, is_send_K)
    own = _own(time_SNJ, _waits(time_SNJ, end_SNK, gate_K))
    worked_SNJ = np.cumsum(own, axis=2)
    ends = np.empty(start_SNP.shape)
    marks = np.arange(len(about))
    position = {p: j for j, (kind, p) in enumerate(about) if kind == _PASS_START}
    for p in range(passes):
        since = worked_SNJ - worked_SNJ[:, :, position[p], None]
        compute = compute_SNP[:, :, p, None]
        done = (since >= compute * (1 - _CLOSE_SHARE) - _CLOSE_S) & (marks > position[p])
        done[:, :, -1] = True
        at = np.argmax(done, axis=2)[:, :, None]
        over = np.maximum(np.take_along_axis(since, at, 2) - compute, 0.0)
        ends[:, :, p] = (np.take_along_axis(time_SNJ, at, 2) - over)[:, :, 0]
    return ends
