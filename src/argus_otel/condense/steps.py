"""From raw events to the numbers of each step, many steps in one vectorised pass.

Shape legend: S = steps in the batch; E = events, in the order they were recorded; P = phase
rows; C = collectives; D, F, B, W = DATA, FORWARD, BACKWARD, WAIT events.

What belongs to a step is worked out here, not on the training thread. A step begins at the first
forward with gradients, or at the wait for the batch that this forward works on; what comes
before, back to the end of the previous step, is ``between`` (evaluation, checkpoints, logging).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from argus_otel.wire import events
from argus_otel.wire.digest import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_FAR = np.iinfo(np.int64).max
_DATA_WAIT = PHASES.index("data.wait")
_FORWARD = PHASES.index("forward")
_BACKWARD = PHASES.index("backward")
_OPTIMIZER = PHASES.index("optimizer.step")
_BETWEEN = PHASES.index("between")
_PREPARE = PHASES.index("prepare")
_LOSS = PHASES.index("loss")

_LEAST_GAP_NS = 100_000
"""Shorter gaps between hooked phases are Python between two lines, and not a phase."""


@dataclass(slots=True, kw_only=True)
class StepColumns:
    """Whole steps, shape [S] each. Nanoseconds; ``events.NONE`` is not known."""

    ordinal: NDArray[np.int64]
    iteration: NDArray[np.int64]
    rule: NDArray[np.int64]
    flags: NDArray[np.int64]
    previous_end_ns: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    cpu_ns: NDArray[np.int64]
    run_delay_ns: NDArray[np.int64]
    data_wait_ns: NDArray[np.int64]
    gc_ns: NDArray[np.int64]
    gc_count: NDArray[np.int64]
    longest_gc_ns: NDArray[np.int64]
    wait_ns: NDArray[np.int64]
    """Blocked by others, where it can be seen."""
    busy_ns: NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class PhaseRows:
    """Phases of all steps, sorted by step, then start. Shape [P] each."""

    step: NDArray[np.int64]
    name: NDArray[np.int64]
    """Index into ``PHASES``, or ``len(PHASES)`` + index of a user's phase name."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class CollectiveRows:
    """Collectives of all steps, in the order of arrival. Shape [C] each."""

    step: NDArray[np.int64]
    group: NDArray[np.int64]
    op: NDArray[np.int64]
    peer: NDArray[np.int64]
    count: NDArray[np.int64]
    payload_bytes: NDArray[np.int64]
    phase: NDArray[np.int64]
    arrival_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    """``events.NONE`` where not known."""


@dataclass(slots=True, kw_only=True)
class Boundary:
    """Where the step before a batch ended."""

    end_ns: int
    cpu_ns: int
    run_delay_ns: int


def condense_steps(
    batch: NDArray[np.void], before: Boundary, group_blocks_host: NDArray[np.bool_]
) -> tuple[StepColumns, PhaseRows, CollectiveRows]:
    """Work out every step of a batch.

    Args:
        batch: Shape [E] of ``events.EVENT``; the last event of each step is its STEP_END.
        before: The boundary that the first step follows.
        group_blocks_host: For each process group, shape [G].
    """
    kind = batch["kind"]
    last_E = np.flatnonzero(kind == events.STEP_END)
    marks = batch[last_E]
    s = last_E.size
    step_E = np.searchsorted(last_E, np.arange(batch.size))
    # Never backwards, whatever clock or thread a boundary was read on.
    end_ns = np.maximum(np.maximum.accumulate(marks["t0"]), before.end_ns)
    previous_end_ns = _shifted(end_ns, before.end_ns)

    phase_kinds = np.isin(kind, (events.DATA, events.FORWARD, events.BACKWARD, events.OPTIMIZER))
    phase_E = np.flatnonzero(phase_kinds)
    rows, row_step = batch[phase_E], step_E[phase_E]
    # What began before the last boundary, or after the next, cannot be where a step begins.
    may_start = (rows["t0"] >= previous_end_ns[row_step]) & (rows["t0"] <= end_ns[row_step])
    start_ns, cpu0, delay0 = _starts(rows, row_step, may_start, previous_end_ns, marks, before)

    inside = rows["t0"] >= start_ns[row_step]
    data = inside & (rows["kind"] == events.DATA)
    data_wait_ns = _sums(row_step[data], (rows["t1"] - rows["t0"])[data].clip(0), s)
    # What input costs in CPU and run delay is input's, and not this rank's own work.
    data_cpu_ns = _sums(row_step[data], _spent(rows["c"], rows["a"])[data].clip(0), s)
    data_delay_ns = _sums(row_step[data], _spent(rows["d"], rows["b"])[data].clip(0), s)

    pauses = batch[(kind == events.GC)]
    pause_step = step_E[kind == events.GC]
    in_step = pauses["t0"] >= start_ns[pause_step]
    pauses, pause_step = pauses[in_step], pause_step[in_step]
    pause_ns = (pauses["t1"] - pauses["t0"]).clip(0)
    longest_gc_ns = np.zeros(s, dtype=np.int64)
    np.maximum.at(longest_gc_ns, pause_step, pause_ns)

    waits = batch[kind == events.WAIT]
    wait_step = step_E[kind == events.WAIT]
    phases = _phases(batch, step_E, rows, row_step, inside, start_ns, previous_end_ns)
    collectives = _collectives(
        batch, step_E, kind, phases, _ddp_backward_windows(rows), group_blocks_host
    )
    wait_ns = _wait_ns(rows, row_step, waits, wait_step, collectives, start_ns, s)
    known = _waits_are_known(rows, waits, wait_step, batch, kind, collectives, group_blocks_host, s)
    known &= (marks["t1"] & events.DEVICE) == 0
    columns = StepColumns(
        ordinal=marks["a"],
        iteration=marks["b"],
        rule=marks["t1"] & events.RULE_MASK,
        flags=marks["t1"] & ~events.RULE_MASK,
        previous_end_ns=previous_end_ns,
        start_ns=start_ns,
        end_ns=end_ns,
        cpu_ns=_less(_spent(marks["c"], cpu0), data_cpu_ns),
        run_delay_ns=_less(_spent(marks["d"], delay0), data_delay_ns),
        data_wait_ns=data_wait_ns,
        gc_ns=_sums(pause_step, pause_ns, s),
        gc_count=np.bincount(pause_step, minlength=s),
        longest_gc_ns=longest_gc_ns,
        wait_ns=wait_ns,
        busy_ns=np.where(known, np.maximum(end_ns - start_ns - wait_ns, 0), events.NONE),
    )
    return columns, phases, collectives


def _shifted(values_S: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """The value of the step before, for each step."""
    return np.concatenate(([first], values_S[:-1]))


def _sums(index: NDArray[np.int64], values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.bincount(index, weights=values, minlength=size).astype(np.int64)


def _spent(at_end: NDArray[np.int64], at_start: NDArray[np.int64]) -> NDArray[np.int64]:
    """A counter's growth; unknown where either reading is, or where the thread changed."""
    spent = at_end - at_start
    unknown = (at_end == events.NONE) | (at_start == events.NONE) | (spent < 0)
    return np.where(unknown, events.NONE, spent)


def _less(spent_S: NDArray[np.int64], part_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """A known amount without a part of it; unknown stays unknown."""
    return np.where(spent_S == events.NONE, spent_S, np.maximum(spent_S - part_S, 0))


def _starts(
    rows: NDArray[np.void],
    row_step: NDArray[np.int64],
    may_start: NDArray[np.bool_],
    previous_end_ns: NDArray[np.int64],
    marks: NDArray[np.void],
    before: Boundary,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where each step begins, with the thread's CPU time and run delay there; shape [S] each."""
    s = marks.size
    no_grad = (rows["kind"] == events.FORWARD) & (rows["c"] & events.NO_GRAD != 0)
    forward = may_start & (rows["kind"] == events.FORWARD) & ~no_grad
    data = may_start & (rows["kind"] == events.DATA)
    passes = forward | (may_start & (rows["kind"] == events.BACKWARD))
    first_pass_ns = _earliest(rows, row_step, passes, s)
    # An optimizer that is done before the first pass belongs to the step before, which another
    # optimizer has ended; one that contains passes (LBFGS) is this step's work.
    optimizer = may_start & (rows["kind"] == events.OPTIMIZER)
    trailing = (rows["t1"] <= first_pass_ns[row_step]) & (first_pass_ns[row_step] < _FAR)
    first_work_ns = _earliest(rows, row_step, passes | (optimizer & ~trailing), s)
    first_forward = _first_position(row_step, forward, s)

    # The last batch that was waited for before the work began, unless an evaluation came between.
    before_work = data & (rows["t1"] <= first_work_ns[row_step])
    last_data = np.full(s, -1)
    np.maximum.at(last_data, row_step[before_work], np.flatnonzero(before_work))
    last_no_grad_ns = np.full(s, -1)
    early = no_grad & (rows["t0"] < first_work_ns[row_step])
    np.maximum.at(last_no_grad_ns, row_step[early], rows["t0"][early])
    data_end_ns = np.where(last_data >= 0, rows["t1"][last_data] if rows.size else 0, _FAR)
    use_data = (last_data >= 0) & (first_work_ns < _FAR) & (last_no_grad_ns < data_end_ns)

    position = np.where(use_data, last_data, first_forward)
    known = position >= 0
    # Without either there is no telling an evaluation from the step: all of it is the step.
    cpu0, delay0 = _shifted(marks["c"], before.cpu_ns), _shifted(marks["d"], before.run_delay_ns)
    if not rows.size:
        return previous_end_ns, cpu0, delay0
    return (
        np.where(known, rows["t0"][position], previous_end_ns),
        np.where(known, rows["a"][position], cpu0),
        np.where(known, rows["b"][position], delay0),
    )


def _earliest(
    rows: NDArray[np.void], row_step: NDArray[np.int64], chosen: NDArray[np.bool_], size: int
) -> NDArray[np.int64]:
    """When the first of some rows began in each step; ``_FAR`` where there is none."""
    first_ns = np.full(size, _FAR)
    np.minimum.at(first_ns, row_step[chosen], rows["t0"][chosen])
    return first_ns


def _first_position(
    row_step: NDArray[np.int64], chosen: NDArray[np.bool_], size: int
) -> NDArray[np.int64]:
    position = np.full(size, _FAR)
    np.minimum.at(position, row_step[chosen], np.flatnonzero(chosen))
    return np.where(position == _FAR, -1, position)


def _phases(
    batch: NDArray[np.void],
    step_E: NDArray[np.int64],
    rows: NDArray[np.void],
    row_step: NDArray[np.int64],
    inside: NDArray[np.bool_],
    start_ns: NDArray[np.int64],
    previous_end_ns: NDArray[np.int64],
) -> PhaseRows:
    flags = np.where(rows["kind"] == events.DATA, 0, rows["c"])
    chosen = inside & (flags & (events.NESTED | events.NO_GRAD) == 0)
    top, top_step = rows[chosen], row_step[chosen]
    name_of = np.zeros(16, dtype=np.int64)
    name_of[events.DATA] = _DATA_WAIT
    name_of[events.FORWARD] = _FORWARD
    name_of[events.BACKWARD] = _BACKWARD
    name_of[events.OPTIMIZER] = _OPTIMIZER
    steps, codes = [top_step], [name_of[top["kind"]]]
    starts, ends = [top["t0"]], [top["t1"]]

    for code, gap, came_before in _gaps(top, top_step, start_ns):
        steps.append(top_step[gap])
        codes.append(np.full(int(gap.sum()), code))
        starts.append(came_before[gap])
        ends.append(top["t0"][gap])

    user = batch["kind"] == events.PHASE
    steps.append(step_E[user])
    codes.append(len(PHASES) + batch["a"][user])
    starts.append(batch["t0"][user])
    ends.append(batch["t1"][user])

    gap_S = np.flatnonzero(start_ns > previous_end_ns)
    steps.append(gap_S)
    codes.append(np.full(gap_S.size, _BETWEEN))
    starts.append(previous_end_ns[gap_S])
    ends.append(start_ns[gap_S])

    step, begin = np.concatenate(steps), np.concatenate(starts)
    end = np.maximum(np.concatenate(ends), begin)
    order = np.lexsort((begin, step))
    return PhaseRows(
        step=step[order],
        name=np.concatenate(codes)[order],
        start_ns=begin[order],
        end_ns=end[order],
    )


def _gaps(
    top: NDArray[np.void], top_step: NDArray[np.int64], start_ns: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.bool_], NDArray[np.int64]]]:
    """Phases that no hook sees, from what lies around them.

    A plain module has no forward hook: its forward is from what came before to the backward.
    Where there is one, what lies before it is preparation of the batch, and after it the loss.

    Returns:
        For each such phase its name, the rows that it comes before [T], and where it begins [T].
    """
    if not top.size:
        return
    has_forward = np.zeros(start_ns.size, dtype=bool)
    has_forward[top_step[top["kind"] == events.FORWARD]] = True
    first_of_step = np.concatenate(([True], top_step[1:] != top_step[:-1]))
    came_before = np.where(first_of_step, start_ns[top_step], np.roll(top["t1"], 1))
    before_kind = np.where(first_of_step, 0, np.roll(top["kind"], 1))
    width_ns = top["t0"] - came_before
    backward, forward = top["kind"] == events.BACKWARD, top["kind"] == events.FORWARD
    yield _FORWARD, backward & ~has_forward[top_step] & (width_ns > 0), came_before
    yield _PREPARE, forward & (width_ns > _LEAST_GAP_NS), came_before
    loss = backward & (before_kind == events.FORWARD) & (width_ns > _LEAST_GAP_NS)
    yield _LOSS, loss, came_before


def _collectives(
    batch: NDArray[np.void],
    step_E: NDArray[np.int64],
    kind: NDArray[np.int64],
    phases: PhaseRows,
    ddp_backwards: NDArray[np.void],
    group_blocks_host: NDArray[np.bool_],
) -> CollectiveRows:
    position = np.flatnonzero(kind == events.COLLECTIVE)
    rows = batch[position]
    group, op, is_async, peer = events.unpack_collective(rows["a"])
    end_ns = np.full(rows.size, events.NONE)

    # A synchronous call waits at once: the next wait, if no other collective comes first.
    wait_E = np.flatnonzero(kind == events.WAIT)
    if wait_E.size and rows.size:
        nearest = np.searchsorted(wait_E, position)
        has = nearest < wait_E.size
        nearest = np.minimum(nearest, wait_E.size - 1)
        following = np.append(position[1:], batch.size)
        matched = has & ~is_async & (wait_E[nearest] < following)
        end_ns = np.where(matched, batch["t1"][wait_E[nearest]], end_ns)

    ends = batch[kind == events.END]
    if ends.size and rows.size:
        # Operation ids count per group; together they are unique.
        key, end_key = rows["d"] << 20 | group, ends["d"] << 20 | ends["a"]
        order = np.argsort(end_key, kind="stable")
        place = np.minimum(np.searchsorted(end_key[order], key), ends.size - 1)
        found_ns = np.where(end_key[order][place] == key, ends["t0"][order][place], _FAR)
        # A callback waits for the GIL: it tells an end late, but never before the wait for it
        # is over, be that Work.wait or the end of DDP's backward.
        waited_ns = np.where(end_ns == events.NONE, _FAR, end_ns)
        if ddp_backwards.size:
            order = np.argsort(ddp_backwards["t0"], kind="stable")
            place = np.searchsorted(ddp_backwards["t0"][order], rows["t0"], side="right") - 1
            over_ns = ddp_backwards["t1"][order][place]
            inside = (place >= 0) & (rows["t0"] <= over_ns)
            waited_ns = np.minimum(waited_ns, np.where(inside, over_ns, _FAR))
        known = (found_ns < _FAR) | (end_ns != events.NONE)
        end_ns = np.where(known, np.minimum(found_ns, waited_ns), end_ns)

    # Where a wait does not block the host (NCCL), it is over when the device has been told to
    # wait, and a callback runs when the operation has been enqueued: neither is its end.
    if rows.size:
        end_ns = np.where(group_blocks_host[group], end_ns, events.NONE)

    phase = np.full(rows.size, -1)
    built_in = phases.name < len(PHASES)
    if built_in.any() and rows.size:
        starts, stops = phases.start_ns[built_in], phases.end_ns[built_in]
        order = np.argsort(starts, kind="stable")
        place = np.searchsorted(starts[order], rows["t0"], side="right") - 1
        inside = (place >= 0) & (rows["t0"] <= stops[order][place])
        phase = np.where(inside, phases.name[built_in][order][place], -1)
    return CollectiveRows(
        step=step_E[position],
        group=group,
        op=op,
        peer=peer,
        count=rows["b"],
        payload_bytes=rows["c"],
        phase=phase,
        arrival_ns=rows["t0"],
        end_ns=end_ns,
    )


def _ddp_backward_windows(rows: NDArray[np.void]) -> NDArray[np.void]:
    windows: NDArray[np.void] = rows[
        (rows["kind"] == events.BACKWARD) & (rows["c"] & events.DDP_WAITS != 0)
    ]
    return windows


def _wait_ns(
    rows: NDArray[np.void],
    row_step: NDArray[np.int64],
    waits: NDArray[np.void],
    wait_step: NDArray[np.int64],
    collectives: CollectiveRows,
    start_ns: NDArray[np.int64],
    s: int,
) -> NDArray[np.int64]:
    """Time inside each step that others made this rank wait for; shape [S]."""
    in_step = waits["t0"] >= start_ns[wait_step]
    total = _sums(wait_step[in_step], (waits["t1"] - waits["t0"])[in_step].clip(0), s)
    # DDP's reducer waits in C++ at the end of the backward, from the last bucket on.
    ddp = (rows["kind"] == events.BACKWARD) & (rows["c"] & events.DDP_WAITS != 0)
    if ddp.any() and collectives.arrival_ns.size:
        arrivals = np.sort(collectives.arrival_ns)
        begin, end = rows["t0"][ddp], rows["t1"][ddp]
        last = np.searchsorted(arrivals, end, side="right") - 1
        last_ns = arrivals[np.maximum(last, 0)]
        has = (last >= 0) & (last_ns >= begin)
        total += _sums(row_step[ddp][has], (end - last_ns)[has], s)
    return total


def _waits_are_known(
    rows: NDArray[np.void],
    waits: NDArray[np.void],
    wait_step: NDArray[np.int64],
    batch: NDArray[np.void],
    kind: NDArray[np.int64],
    collectives: CollectiveRows,
    group_blocks_host: NDArray[np.bool_],
    s: int,
) -> NDArray[np.bool_]:
    """Whether every wait of a step was seen; shape [S].

    An asynchronous operation is accounted for where DDP's backward contains it, where a wait
    contains it (buffer broadcasts), or where enough waits followed. What is left was waited for
    somewhere in C++ (functional collectives), for a time that nobody knows.
    """
    known = np.ones(s, dtype=bool)
    if not collectives.arrival_ns.size:
        return known
    _, _, is_async, _ = events.unpack_collective(batch["a"][kind == events.COLLECTIVE])
    arrival = collectives.arrival_ns
    covered = ~is_async
    for windows in (_ddp_backward_windows(rows), waits):
        if windows.size:
            order = np.argsort(windows["t0"], kind="stable")
            place = np.searchsorted(windows["t0"][order], arrival, side="right") - 1
            covered |= (place >= 0) & (arrival <= windows["t1"][order][place])
    open_async = np.bincount(collectives.step[~covered], minlength=s)
    sync = np.bincount(collectives.step[~is_async], minlength=s)
    own_waits = np.bincount(wait_step[waits["a"] == 0], minlength=s)
    known &= open_async <= np.maximum(own_waits - sync, 0)
    device = ~group_blocks_host[collectives.group]
    known[collectives.step[device]] = False
    return known
