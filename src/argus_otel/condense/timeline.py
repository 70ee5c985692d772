"""The timeline of each step: at most 32 spans a rank, whatever the step holds.

Phases first (folded by name where there are many), then what was compiled, pauses, and the
collectives: one span for each (group, operation, phase), and the slowest few by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from argus_otel.condense.operations import folded
from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.spans import ShapedSpan, Span, SpanShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from argus_otel.condense.steps import Collectives, StepRecord
    from argus_otel.wire.events import Event
    from argus_otel.wire.identity import Compilation, Group, Identity, UncaughtException

MAX_PHASE_SPANS: Final = 13
MAX_COMPILATION_SPANS: Final = 3
MAX_GC_SPANS: Final = 3
MAX_FOLDED_SPANS: Final = 8
MAX_SLOWEST_SPANS: Final = 3
MAX_EXCEPTION_SPANS: Final = 2
"""All together ``ids.TIMELINE_SPANS_PER_RANK``."""

MIN_GC_SPAN_NS: Final = 1_000_000
"""Shorter collections are in the digest's sum and not worth a span."""

_MAX_SHAPES: Final = 512

_OTHER_FUNCTIONS: Final = "other functions"

_EXCEPTION_ID = 1 << 20  # an exception may be sent twice: with its step, and at exit

_GC = SpanShape(
    scopes.TIMELINE,
    names.SPAN_GC,
    {},
    ints=(names.ARGUS_GC_GENERATION, names.ARGUS_GC_COLLECTED),
)


class Timeline:
    """Builds the timeline spans of steps; remembers their shapes.

    Args:
        groups: The process's table, which only grows.
        phase_names: Likewise.
        compilations: Likewise.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        phase_names: Sequence[str],
        compilations: Sequence[Compilation],
    ) -> None:
        self._groups = groups
        self._compilations = compilations
        self._phase_names = phase_names
        self._shapes: dict[tuple[object, ...], SpanShape] = {}

    def spans(
        self,
        step: StepRecord,
        *,
        trace_id: bytes,
        step_id: bytes,
        span_ids: bytes,
        keep: str | None,
        wall_offset_ns: int,
        pause: Callable[[], None],
    ) -> list[ShapedSpan]:
        """Every timeline span of a step.

        Args:
            step: The step.
            trace_id: Its trace.
            step_id: The rank's span of it, that these hang below.
            span_ids: 8 bytes for each of ``ids.TIMELINE_SPANS_PER_RANK`` spans.
            keep: Why to keep it, or None; the first span says it.
            wall_offset_ns: Unix time minus the events' clock.
            pause: Gives the GIL away.
        """
        made = _Spans(trace_id, step_id, span_ids, wall_offset_ns)
        self._add_phases(made, step)
        if step.compilations:
            self._add_compilations(made, step.compilations)
        if step.longest_gc_ns >= MIN_GC_SPAN_NS:
            _add_pauses(made, step.pauses)
        if step.collectives is not None:
            self._add_collectives(made, step.collectives, slowest=keep is not None, pause=pause)
        spans = made.spans
        if keep is not None and spans:
            spans[0] = spans[0]._replace(shape=self._marked(spans[0].shape, keep))
        return spans

    # -- phases -------------------------------------------------------------------------------

    def _add_phases(self, made: _Spans, step: StepRecord) -> None:
        if len(step.phases) > MAX_PHASE_SPANS:
            self._add_folded_phases(made, step)
            return
        parents = made.parents
        for start_ns, end_ns, code in step.phases:
            # Where a phase is alone under its name, the collectives issued in it hang below it.
            alone = code not in parents
            span_id = made.add(self._phase_shape(code), made.step_id, start_ns, end_ns, ())
            parents[code] = span_id if alone else made.step_id

    def _add_folded_phases(self, made: _Spans, step: StepRecord) -> None:
        by_name: dict[int, list[tuple[int, int]]] = {}
        for start_ns, end_ns, code in step.phases:
            by_name.setdefault(code, []).append((start_ns, end_ns))
        order = sorted(by_name, key=lambda code: (by_name[code][0][0], code))
        for code in order[:MAX_PHASE_SPANS]:
            rows = by_name[code]
            end_ns = max([row[1] for row in rows])
            values: tuple[int | float, ...] = ()
            if len(rows) > 1:
                values = (len(rows), sum([end - start for start, end in rows]) * 1e-9)
            shape = self._phase_shape(code, folded=len(rows) > 1)
            made.parents[code] = made.add(shape, made.step_id, rows[0][0], end_ns, values)

    def _phase_shape(self, code: int, *, folded: bool = False) -> SpanShape:
        key = (code, folded)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._remember(
                key,
                SpanShape(
                    scopes.TIMELINE,
                    PHASES[code] if code < len(PHASES) else self._phase_names[code - len(PHASES)],
                    {},
                    ints=(names.ARGUS_FOLD_COUNT,) if folded else (),
                    doubles=(names.ARGUS_FOLD_DURATION,) if folded else (),
                ),
            )
        return shape

    # -- compilation --------------------------------------------------------------------------

    def _add_compilations(self, made: _Spans, rows: Sequence[Event]) -> None:
        """What was compiled, by function and in order of the time that it took.

        Where there are more functions than places, the last span is of all the others.
        """
        by_function: dict[str, list[Event]] = {}
        for row in rows:
            by_function.setdefault(self._compilations[row[3]].function, []).append(row)
        longest = sorted(by_function.values(), key=_total_ns, reverse=True)
        folded = longest[:MAX_COMPILATION_SPANS]
        for others in longest[MAX_COMPILATION_SPANS:]:
            folded[-1] = folded[-1] + others
        for mine in folded:
            what = self._compilations[mine[0][3]]
            name = what.function
            if any(self._compilations[row[3]].function != name for row in mine):
                name = _OTHER_FUNCTIONS
            shape = SpanShape(
                scopes.TIMELINE,
                names.SPAN_COMPILATION,
                {"code.function.name": name}
                | ({names.ARGUS_COMPILATION_REASON: what.reason} if what.reason else {}),
                ints=(names.ARGUS_FOLD_COUNT,),
                doubles=(names.ARGUS_FOLD_DURATION,),
            )
            made.add(
                shape,
                made.step_id,
                min([row[1] for row in mine]),
                max([row[2] for row in mine]),
                (len(mine), _total_ns(mine) * 1e-9),
            )

    # -- collectives --------------------------------------------------------------------------

    def _add_collectives(
        self, made: _Spans, rows: Collectives, *, slowest: bool, pause: Callable[[], None]
    ) -> None:
        """One span for each (group, operation, phase), and the slowest few by themselves."""
        parents, step_id = made.parents, made.step_id
        arrival_ns, end_ns = rows.arrival_ns, rows.end_ns
        finish_ns: Sequence[int] = arrival_ns
        if end_ns is not None:  # not known is far below any arrival
            finish_ns = list(map(max, arrival_ns, end_ns))
        folds = folded(rows.operations, rows.phase)
        pause()
        # The busiest kinds of a step, if there are more kinds than places.
        for group, op, phase, mine in folds[:MAX_FOLDED_SPANS]:
            first = mine[0]
            finishes_ns = _picked(finish_ns, mine)
            blocked_ns, end_known = 0, False
            if end_ns is not None:
                blocked_ns = sum(finishes_ns) - sum(_picked(arrival_ns, mine))
                end_known = events.NONE not in _picked(end_ns, mine)
            size = sum(_picked(rows.payload_bytes, mine))
            made.add(
                self._collective_shape(group, op, phase, end_known, folded=True),
                parents.get(phase, step_id),
                arrival_ns[first],
                max(finishes_ns),
                (len(mine), size, rows.count[first], blocked_ns * 1e-9),
            )
        if not slowest or end_ns is None:  # nobody sees those of steps that are not kept
            return
        known = [row for row, over_ns in enumerate(end_ns) if over_ns != events.NONE]
        known.sort(key=lambda row: arrival_ns[row] - finish_ns[row])
        kinds = rows.operations
        for row in known[:MAX_SLOWEST_SPANS]:
            group, op, phase = kinds.group[row], kinds.op[row], rows.phase[row]
            made.add(
                self._collective_shape(group, op, phase, True, folded=False),
                parents.get(phase, step_id),
                arrival_ns[row],
                finish_ns[row],
                (rows.payload_bytes[row], rows.count[row]),
            )

    def _collective_shape(
        self, group: int, op: int, phase: int, end_known: bool, *, folded: bool
    ) -> SpanShape:
        key = (group, op, phase, end_known, folded)
        shape = self._shapes.get(key)
        if shape is None:
            members = self._groups[group]
            constants: dict[str, str | int | float | bool] = {
                names.ARGUS_GROUP_KEY: f"{members.key:016x}",
                names.ARGUS_GROUP_SIZE: len(members.ranks),
                names.ARGUS_COLLECTIVE_END_KNOWN: end_known,
            }
            if phase >= 0:
                constants[names.ARGUS_PHASE] = PHASES[phase]
            ints: tuple[str, ...] = (names.ARGUS_COLLECTIVE_SIZE, names.ARGUS_COLLECTIVE_SEQ)
            if folded:
                ints = (names.ARGUS_COLLECTIVE_COUNT, *ints)
            shape = self._remember(
                key,
                SpanShape(
                    scopes.TIMELINE,
                    OPS[op],
                    constants,
                    ints=ints,
                    doubles=(names.ARGUS_FOLD_DURATION,) if folded else (),
                ),
            )
        return shape

    # -- shapes -------------------------------------------------------------------------------

    def _marked(self, shape: SpanShape, keep: str) -> SpanShape:
        """The same, saying why the step is to be kept."""
        key = (shape, keep)
        marked = self._shapes.get(key)
        if marked is None:
            constants = {**shape.constants, names.ARGUS_KEEP: keep}
            marked = self._remember(
                key, SpanShape(shape.scope, shape.name, constants, shape.ints, shape.doubles)
            )
        return marked

    def _remember(self, key: tuple[object, ...], shape: SpanShape) -> SpanShape:
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        self._shapes[key] = shape
        return shape


class _Spans:
    """Spans of one step; their ids count up."""

    __slots__ = ("_ids", "_trace_id", "_wall_offset_ns", "parents", "spans", "step_id")

    def __init__(self, trace_id: bytes, step_id: bytes, ids: bytes, wall_offset_ns: int) -> None:
        self.step_id = step_id
        self.spans: list[ShapedSpan] = []
        self.parents: dict[int, bytes] = {}
        """What a collective hangs below that was issued in a phase, by the phase."""
        self._trace_id = trace_id
        self._ids = ids
        self._wall_offset_ns = wall_offset_ns

    def add(
        self,
        shape: SpanShape,
        parent_id: bytes,
        start_ns: int,
        end_ns: int,
        values: tuple[int | float, ...],
    ) -> bytes:
        """Put a span at the end, and return its id."""
        spans, offset_ns = self.spans, self._wall_offset_ns
        at = 8 * len(spans)
        span_id = self._ids[at : at + 8]
        spans.append(
            ShapedSpan(
                shape,
                self._trace_id,
                span_id,
                parent_id,
                start_ns + offset_ns,
                end_ns + offset_ns,
                values,
            )
        )
        return span_id


def _total_ns(rows: Sequence[Event]) -> int:
    return sum([row[2] - row[1] for row in rows])


def _add_pauses(made: _Spans, pauses: Sequence[Event]) -> None:
    """The longest collections of garbage."""
    long = [row for row in pauses if row[2] - row[1] >= MIN_GC_SPAN_NS]
    long.sort(key=lambda row: row[1] - row[2])
    for _, t0, t1, generation, collected, _, _ in long[:MAX_GC_SPANS]:
        made.add(_GC, made.step_id, t0, t1, (generation, collected))


def _picked(column: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """Some rows, in order; often all."""
    return column if len(rows) == len(column) else [column[row] for row in rows]


def exception_span(
    exception: UncaughtException,
    identity: Identity,
    ordinal: int,
    time_ns: int,
    *,
    place: int,
) -> Span:
    """An uncaught exception, in the step that it ended; keeps that step for all ranks.

    Args:
        place: 0, 1 … among the exceptions of this step.
    """
    trace_id = ids.step_trace_id(
        identity.nonce, identity.attempt, ordinal, ids.shard_of(identity.rank)
    )
    attributes: dict[str, object] = {
        names.ARGUS_KEEP: "event",
        "error.type": exception.type_name,
        "code.stacktrace": "\n".join(exception.frames),
    }
    if exception.message is not None:
        attributes["exception.message"] = exception.message
    return Span(
        scope=scopes.TIMELINE,
        name=names.SPAN_EXCEPTION,
        trace_id=trace_id,
        span_id=ids.span_id(trace_id, ids.TIMELINE, identity.rank, _EXCEPTION_ID + place),
        parent_id=ids.span_id(trace_id, ids.RANK_STEP, identity.rank),
        start_ns=time_ns,
        end_ns=time_ns,
        attributes=attributes,
        error=exception.type_name,
    )
