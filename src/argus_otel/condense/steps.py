"""From the raw events of one step to its numbers.

Plain Python over integers: a step has some tens of events, and a numpy call costs as much as
twenty of them.

What belongs to a step is worked out here, not on the training thread. A step begins at the first
forward with gradients, or at the wait for the batch that this forward works on; what comes
before, back to the end of the previous step, is ``between`` (evaluation, checkpoints, logging).

One module of this length, since a step's start, phases, collectives and waits follow from one
another, in this order.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from argus_otel.condense.layout import layout_of
from argus_otel.condense.operations import operations
from argus_otel.wire import events
from argus_otel.wire.codes import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from argus_otel.condense.operations import Operations
    from argus_otel.wire.events import Event, Events
    from argus_otel.wire.sketch import Sketch

    Phase = tuple[int, int, int]
    """Start and end in nanoseconds; index into ``PHASES``, or ``len(PHASES)`` + index of a user's
    phase name."""

_FAR: Final = (1 << 63) - 1
_DATA_WAIT = PHASES.index("data.wait")
_FORWARD = PHASES.index("forward")
_BACKWARD = PHASES.index("backward")
_OPTIMIZER = PHASES.index("optimizer.step")
_BETWEEN = PHASES.index("between")
_PREPARE = PHASES.index("prepare")
_LOSS = PHASES.index("loss")

_PHASE_OF = {
    events.DATA: _DATA_WAIT,
    events.FORWARD: _FORWARD,
    events.BACKWARD: _BACKWARD,
    events.OPTIMIZER: _OPTIMIZER,
}

LEAST_GAP_NS: Final = 100_000
"""Shorter gaps between hooked phases are Python between two lines, and not a phase."""

CHUNK: Final = 256
"""Events between two pauses of a large step: a tenth of a millisecond."""

_NUMBERS: Final = 5  # of each collective; see ``Layout``
_FIRST_PASS, _LAST_PASS = events.DATA, events.OPTIMIZER
_NO_PHASE_OF_ITS_OWN: Final = events.NESTED | events.NO_GRAD

_begin_of = itemgetter(0)


@dataclass(slots=True)
class Boundary:
    """Where the step before ended."""

    end_ns: int
    cpu_ns: int = events.NONE
    run_delay_ns: int = events.NONE


@dataclass(slots=True, kw_only=True)
class Collectives:
    """Collectives of a step, in the order they were recorded; a number for each, everywhere."""

    operations: Operations
    arrival_ns: Sequence[int]
    end_ns: list[int] | None
    """``events.NONE`` where not known; None where no end is known."""
    count: Sequence[int]
    payload_bytes: Sequence[int]
    phase: tuple[int, ...]
    """Index into ``PHASES``, -1 where unknown."""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step. Nanoseconds; ``events.NONE`` is not known."""

    ordinal: int
    iteration: int
    rule: int
    flags: int
    previous_end_ns: int
    start_ns: int
    end_ns: int
    cpu_ns: int
    run_delay_ns: int
    data_wait_ns: int
    gc_ns: int
    longest_gc_ns: int
    wait_ns: int
    """Blocked by others, where it can be seen."""
    ddp_tails: list[tuple[int, int]]
    """Of that, where DDP's reducer waits in C++: from the last bucket to the backward's end."""
    busy_ns: int
    phases: list[Phase]
    """In order of their start."""
    collectives: Collectives | None
    """None where there are none."""
    pauses: list[Event]
    """Collections of garbage inside the step."""
    raised: list[tuple[int, int]]
    """Index and time of each uncaught exception."""
    compilations: list[Event]
    """All since the boundary before, evaluation's too."""
    work: dict[str, float]
    kernels: Sketch | None = None
    """Durations of the step's kernels; None without a GPU."""


def condense_step(
    batch: Events,
    before: Boundary,
    *,
    ends: Mapping[int, int],
    group_blocks_host: Sequence[bool],
    rank: int,
    pause: Callable[[], None],
) -> StepRecord:
    """Work out one step.

    Args:
        batch: Its events; the last is its STEP_END.
        before: The boundary that it follows.
        ends: When each operation ended of which that is known, by ``events.operation_key``. Also
            those whose callback ran after the step: it had to wait for the GIL.
        group_blocks_host: For each process group.
        rank: Whose step it is.
        pause: Gives the GIL away; called every ``CHUNK`` events.
    """
    passes: list[Event] = []  # DATA, FORWARD, BACKWARD and OPTIMIZER
    waits: list[Event] = []
    # When the first wait was over that followed a collective and came before the next; by the
    # collective's row, -1 for what precedes all.
    ends_by_wait: dict[int, int] = {}
    user_phases: list[Phase] = []
    pauses: list[Event] = []
    raised: list[tuple[int, int]] = []
    compilations: list[Event] = []
    work: dict[str, float] = {}
    numbers: list[int] = []  # five of each collective
    kinds = batch.kinds
    for begin in range(0, len(kinds), CHUNK):
        stretch = batch
        if len(kinds) > CHUNK:
            pause()
            stretch = batch.part(begin, begin + CHUNK)
        layout = layout_of(kinds[begin : begin + CHUNK])
        rows_before = len(numbers) // _NUMBERS - 1
        unpack_from, raw = events.unpack_from, stretch.raw
        for at, row in layout.others:
            event = unpack_from(raw, at)
            kind = event[0]
            if _FIRST_PASS <= kind <= _LAST_PASS:
                passes.append(event)
            elif kind == events.WAIT:
                waits.append(event)
                ends_by_wait.setdefault(rows_before + row, event[2])
            elif kind == events.GC:
                pauses.append(event)
            elif kind == events.PHASE:
                _, t0, t1, index, _, _, _ = event
                user_phases.append((t0, max(t0, t1), len(PHASES) + index))
            elif kind == events.WORK:
                name = events.WORK_KINDS[event[3]]
                work[name] = work.get(name, 0.0) + event[4]
            elif kind == events.EXCEPTION:
                raised.append((event[3], event[1]))
            elif kind == events.COMPILATION:
                compilations.append(event)
        if layout.collective_count:
            numbers.extend(layout.collectives.unpack_from(stretch.raw))
    _, marked_ns, mark, ordinal, iteration, cpu_ns, run_delay_ns = batch.at(-1)

    # Never backwards, whatever clock or thread a boundary was read on.
    previous_end_ns = before.end_ns
    end_ns = max(marked_ns, previous_end_ns)
    first = _first(passes, previous_end_ns, end_ns)
    if first is None:
        # There is no telling an evaluation from the step: all of it is the step.
        start_ns, cpu0, delay0 = previous_end_ns, before.cpu_ns, before.run_delay_ns
    else:
        _, start_ns, _, cpu0, delay0, _, _ = first

    data_wait_ns = data_cpu_ns = data_delay_ns = 0
    ddp_backwards: list[tuple[int, int]] = []
    for kind, t0, t1, a, b, c, d in passes:
        if kind == events.BACKWARD:
            if c & events.DDP_WAITS:
                ddp_backwards.append((t0, t1))
        elif kind == events.DATA and t0 >= start_ns:
            data_wait_ns += max(t1 - t0, 0)
            # What input costs in CPU and run delay is input's, and not this rank's own work.
            data_cpu_ns += max(spent(c, a), 0)
            data_delay_ns += max(spent(d, b), 0)
    ddp_backwards.sort(key=_begin_of)

    phases = _phases(passes, user_phases, start_ns, previous_end_ns)
    wait_ns = 0
    ddp_tails: list[tuple[int, int]] = []
    if waits:
        wait_ns = sum([max(row[2] - row[1], 0) for row in waits if row[1] >= start_ns])
    columns: Collectives | None = None
    known = not mark & events.DEVICE
    if numbers:
        built_in = phases
        if user_phases:
            built_in = [row for row in phases if row[2] < len(PHASES)]
        columns = _collectives(
            numbers, ends_by_wait, built_in, ddp_backwards, ends, group_blocks_host, rank,
            pause,
        )  # fmt: skip
        if ddp_backwards:
            ddp_tails = _ddp_tails(ddp_backwards, columns.arrival_ns)
            wait_ns += sum([tail_end_ns - last_ns for last_ns, tail_end_ns in ddp_tails])
        known = known and _waits_are_known(columns, waits, ddp_backwards, group_blocks_host)

    gc_ns = longest_gc_ns = 0
    if pauses:
        pauses = [row for row in pauses if row[1] >= start_ns]
        pauses_ns = [max(row[2] - row[1], 0) for row in pauses]
        gc_ns, longest_gc_ns = sum(pauses_ns), max(pauses_ns, default=0)
    return StepRecord(
        ordinal=ordinal,
        iteration=iteration,
        rule=mark & events.RULE_MASK,
        flags=mark & ~events.RULE_MASK,
        previous_end_ns=previous_end_ns,
        start_ns=start_ns,
        end_ns=end_ns,
        cpu_ns=less(spent(cpu_ns, cpu0), data_cpu_ns),
        run_delay_ns=less(spent(run_delay_ns, delay0), data_delay_ns),
        data_wait_ns=data_wait_ns,
        gc_ns=gc_ns,
        longest_gc_ns=longest_gc_ns,
        wait_ns=wait_ns,
        ddp_tails=ddp_tails,
        busy_ns=max(end_ns - start_ns - wait_ns, 0) if known else events.NONE,
        phases=phases,
        collectives=columns,
        pauses=pauses,
        raised=raised,
        compilations=compilations,
        work=work,
    )


def no_pause() -> None:
    """For steps that are done before anybody waits."""


def spent(at_end: int, at_start: int) -> int:
    """A counter's growth; unknown where either reading is, or where the thread changed."""
    if at_end == events.NONE or at_start == events.NONE or at_end < at_start:
        return events.NONE
    return at_end - at_start


def less(amount: int, part: int) -> int:
    """A known amount without a part of it; unknown stays unknown."""
    return amount if amount == events.NONE else max(amount - part, 0)


def _first(passes: Sequence[Event], previous_end_ns: int, end_ns: int) -> Event | None:
    """The event that a step begins with, if one can be told."""
    forward: Event | None = None
    first_pass_ns = _FAR
    may_start: list[Event] = []
    has_data = False
    for row in passes:
        kind, t0, _, _, _, flags, _ = row
        # What began before the last boundary, or after the next, cannot be where a step begins.
        if not previous_end_ns <= t0 <= end_ns:
            continue
        if kind == events.DATA:
            has_data = True
            may_start.append(row)
        elif kind == events.OPTIMIZER:
            may_start.append(row)
        elif kind == events.BACKWARD or not flags & events.NO_GRAD:
            if forward is None and kind == events.FORWARD:
                forward = row
            first_pass_ns = min(first_pass_ns, t0)
    if not has_data:
        return forward
    # An optimizer that is done before the first pass belongs to the step before, which another
    # optimizer has ended; one that contains passes (LBFGS) is this step's work.
    first_work_ns = first_pass_ns
    for kind, t0, t1, _, _, _, _ in may_start:
        if kind == events.OPTIMIZER and not t1 <= first_pass_ns < _FAR:
            first_work_ns = min(first_work_ns, t0)
    if first_work_ns == _FAR:
        return forward
    # The last batch that was waited for before the work began, unless an evaluation came between.
    data: Event | None = None
    for row in may_start:
        if row[0] == events.DATA and row[2] <= first_work_ns:
            data = row
    if data is None:
        return forward
    for kind, t0, _, _, _, flags, _ in passes:
        if kind == events.FORWARD and flags & events.NO_GRAD and data[2] <= t0 < first_work_ns:
            return forward
    return data


def _phases(
    passes: Sequence[Event],
    user_phases: Sequence[Phase],
    start_ns: int,
    previous_end_ns: int,
) -> list[Phase]:
    """In order of their start, with those that no hook sees, from what lies around them.

    A plain module has no forward hook: its forward is from what came before to the backward.
    Where there is one, what lies before it is preparation of the batch, and after it the loss.
    """
    top = [
        row
        for row in passes
        if row[1] >= start_ns and (not row[5] & _NO_PHASE_OF_ITS_OWN or row[0] == events.DATA)
    ]
    phases = [(t0, max(t0, t1), _PHASE_OF[kind]) for kind, t0, t1, _, _, _, _ in top]
    has_forward = _FORWARD in [row[2] for row in phases]
    came_before_ns, before_kind = start_ns, events.VOID
    for kind, t0, t1, _, _, _, _ in top:
        gap_ns = t0 - came_before_ns
        if kind == events.BACKWARD:
            if not has_forward:
                if gap_ns > 0:
                    phases.append((came_before_ns, t0, _FORWARD))
            elif before_kind == events.FORWARD and gap_ns > LEAST_GAP_NS:
                phases.append((came_before_ns, t0, _LOSS))
        elif kind == events.FORWARD and gap_ns > LEAST_GAP_NS:
            phases.append((came_before_ns, t0, _PREPARE))
        came_before_ns, before_kind = t1, kind
    phases += user_phases
    if start_ns > previous_end_ns:
        phases.append((previous_end_ns, start_ns, _BETWEEN))
    phases.sort(key=_begin_of)
    return phases


def _collectives(
    numbers: Sequence[int],
    ends_by_wait: Mapping[int, int],
    phases: Sequence[Phase],
    ddp_backwards: Sequence[tuple[int, int]],
    ends: Mapping[int, int],
    group_blocks_host: Sequence[bool],
    rank: int,
    pause: Callable[[], None],
) -> Collectives:
    pause()
    arrival_ns, packed = numbers[::_NUMBERS], numbers[1::_NUMBERS]
    kinds = operations(tuple(packed), rank)
    pause()
    end_ns: list[int] | None = None
    blocks_host = list(map(group_blocks_host.__getitem__, kinds.groups))
    if (ends or ends_by_wait) and any(blocks_host):
        end_ns = [events.NONE] * len(packed)
        # A synchronous call waits at once: the next wait, if no other collective comes first.
        for row, over_ns in ends_by_wait.items():
            if row >= 0 and not kinds.is_async[row]:
                end_ns[row] = over_ns
        if ends:
            op_ids = numbers[4::_NUMBERS]
            _match_ends(end_ns, ends, kinds.group, op_ids, arrival_ns, ddp_backwards)
            pause()
        if not all(blocks_host):
            # Where a wait does not block the host (NCCL), it is over when the device has been
            # told to wait, and a callback runs when the operation has been enqueued: neither is
            # its end.
            end_ns = [
                over_ns if group_blocks_host[group] else events.NONE
                for over_ns, group in zip(end_ns, kinds.group, strict=True)
            ]
    columns = Collectives(
        operations=kinds,
        arrival_ns=arrival_ns,
        end_ns=end_ns,
        count=numbers[2::_NUMBERS],
        payload_bytes=numbers[3::_NUMBERS],
        phase=_phase_of_each(arrival_ns, phases),
    )
    pause()
    return columns


def _match_ends(
    end_ns: list[int],
    ends: Mapping[int, int],
    group: Sequence[int],
    op_id: Sequence[int],
    arrival_ns: Sequence[int],
    ddp_backwards: Sequence[tuple[int, int]],
) -> None:
    """Put the ends that callbacks told where they belong."""
    starts = [row[0] for row in ddp_backwards]
    for row, key in enumerate(map(events.operation_key, group, op_id)):
        over_ns = ends.get(key)
        if over_ns is None:
            continue
        # A callback waits for the GIL: it tells an end late, but never before the wait for it
        # is over, be that Work.wait or the end of DDP's backward.
        if end_ns[row] != events.NONE:
            over_ns = min(over_ns, end_ns[row])
        place = bisect_right(starts, arrival_ns[row]) - 1
        if place >= 0 and arrival_ns[row] <= ddp_backwards[place][1]:
            over_ns = min(over_ns, ddp_backwards[place][1])
        end_ns[row] = over_ns


def _common_window(times_ns: Sequence[int], windows: Sequence[Any]) -> int:
    """Which of some windows holds all of some moments; -1 where there is no such one.

    Args:
        times_ns: The moments.
        windows: Begin and end first, sorted by begin. Where several hold a moment, the one
            counts that began last.
    """
    first_ns, last_ns = min(times_ns), max(times_ns)
    place = bisect_right(windows, first_ns, key=_begin_of) - 1
    if place >= 0 and last_ns <= windows[place][1]:
        after = place + 1
        if after == len(windows) or last_ns < windows[after][0]:
            return place
    return -1


def _phase_of_each(times_ns: Sequence[int], phases: Sequence[Phase]) -> tuple[int, ...]:
    """The phase that each moment lies in: the one that began last, if it is not over; else -1."""
    if (place := _common_window(times_ns, phases)) >= 0:  # most often, the backward
        return (phases[place][2],) * len(times_ns)
    starts = [row[0] for row in phases]
    found = []
    # The answer holds from one start to the next, and moments come in bursts.
    since_ns = until_ns = over_ns = code = -1
    for time_ns in times_ns:
        if not since_ns <= time_ns < until_ns:
            place = bisect_right(starts, time_ns)
            until_ns = starts[place] if place < len(starts) else _FAR
            since_ns, over_ns, code = phases[place - 1] if place else (-_FAR, -_FAR, -1)
        found.append(code if time_ns <= over_ns else -1)
    return tuple(found)


def _ddp_tails(
    ddp_backwards: Sequence[tuple[int, int]], arrival_ns: Sequence[int]
) -> list[tuple[int, int]]:
    """DDP's reducer waits in C++ at the end of the backward, from the last bucket on."""
    tails = []
    arrivals = sorted(arrival_ns)
    for begin_ns, end_ns in ddp_backwards:
        last = bisect_right(arrivals, end_ns) - 1
        if last >= 0 and arrivals[last] >= begin_ns:
            tails.append((arrivals[last], end_ns))
    return tails


def _waits_are_known(
    collectives: Collectives,
    waits: Sequence[Event],
    ddp_backwards: Sequence[tuple[int, int]],
    group_blocks_host: Sequence[bool],
) -> bool:
    """Whether every wait of the step was seen.

    An asynchronous operation is accounted for where DDP's backward contains it, where a wait
    contains it (buffer broadcasts), or where enough waits followed. What is left was waited for
    somewhere in C++ (functional collectives), for a time that nobody knows.
    """
    kinds = collectives.operations
    if not all(map(group_blocks_host.__getitem__, kinds.groups)):
        return False
    if not kinds.async_rows:
        return True
    open_ns: Sequence[int] = collectives.arrival_ns
    if len(kinds.async_rows) < len(open_ns):
        open_ns = [open_ns[row] for row in kinds.async_rows]
    if ddp_backwards:
        open_ns = _outside(open_ns, ddp_backwards)
    if not open_ns:
        return True
    if waits:
        open_ns = _outside(open_ns, sorted([row[1:3] for row in waits], key=_begin_of))
    waits_of_sync = len(kinds.op) - len(kinds.async_rows)
    own_waits = sum([row[3] == 0 for row in waits])
    return len(open_ns) <= max(own_waits - waits_of_sync, 0)


def _outside(times_ns: Sequence[int], windows: Sequence[tuple[int, ...]]) -> list[int]:
    """Those moments that do not lie in the window that began last before them."""
    if _common_window(times_ns, windows) >= 0:
        return []
    starts = [row[0] for row in windows]
    return [
        time_ns
        for time_ns in times_ns
        if not (place := bisect_right(starts, time_ns)) or time_ns > windows[place - 1][1]
    ]
