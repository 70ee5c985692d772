"""Holds what is not a whole step yet, and turns whole steps into spans.

One call condenses every step that has ended since the last one. A step that nothing can be made
of costs no other, and between two the trainer may have the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from argus_otel.condense.detail import Detail
from argus_otel.condense.digests import digest_spans, make_digest, root_shape
from argus_otel.condense.keep import KeepRule
from argus_otel.condense.regular import Models
from argus_otel.condense.steps import CHUNK, Boundary, condense_step, no_pause
from argus_otel.condense.timeline import MAX_EXCEPTION_SPANS, Timeline, exception_span
from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.events import Events
from argus_otel.wire.packed import MAX_ATTRIBUTE_CHARACTERS
from argus_otel.wire.spans import ShapedSpan, Span, SpanRows, StepRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from argus_otel._runtime.faults import FaultLog
    from argus_otel.condense.regular import Model, RegularSteps
    from argus_otel.condense.steps import StepRecord
    from argus_otel.wire.digest import ChartedNumbers, StepDigest
    from argus_otel.wire.events import Event
    from argus_otel.wire.identity import Compilation, Group, Identity, UncaughtException

_GROUP_INFO_EVERY: Final = 32
"""Steps between repeats of the groups' members, for readers that start in the middle."""

_MAX_TOGETHER: Final = 32
_MAX_EVENTS_TOGETHER: Final = 4096
"""Of all events, Python's integers take 200 bytes."""


class Tables(Protocol):
    """What events refer to by index."""

    identities: list[Identity]
    groups: list[Group]
    phase_names: list[str]
    exceptions: list[UncaughtException]
    compilations: list[Compilation]


@dataclass(slots=True, kw_only=True)
class Costs:
    """What a batch of digests carries about argus itself."""

    self_cpu_s: float
    drops: int
    memory_bytes: int | None


@dataclass(slots=True, kw_only=True)
class Condensed:
    """Whole steps of one identity, ready to encode."""

    identity: Identity
    digests: list[StepDigest]
    """Of those steps that were condensed in the general way."""
    steps: list[StepRows] = field(default_factory=list)
    """The others."""
    charted: list[ChartedNumbers] = field(default_factory=list)
    """Of these."""
    spans: list[Span] = field(default_factory=list)
    """Digests, and uncaught exceptions."""
    rows: list[SpanRows] = field(default_factory=list)
    """Detail spans of steps with many collectives."""
    shaped: dict[str, list[ShapedSpan]] = field(default_factory=dict)
    """By scope: roots, timeline, and detail of steps with few collectives."""
    wait_s: float = 0.0
    """Summed over the steps, for the metric."""

    @property
    def span_count(self) -> int:
        """Spans of whatever form."""
        shaped = sum(map(len, self.shaped.values()))
        regular = sum([some.spans for some in self.steps])
        rows = sum([row.span_ids.size for row in self.rows])
        return len(self.spans) + shaped + regular + rows


class Condenser:
    """State across batches: the open step, and each group's last news."""

    def __init__(
        self,
        tables: Tables,
        *,
        baseline_ratio: float,
        detail_spans: int,
        capacity: int,
        faults: FaultLog,
    ) -> None:
        self._tables = tables
        self._faults = faults
        self._detail_spans = detail_spans
        self._capacity = capacity
        self._keep = KeepRule(baseline_ratio)
        self._ratio = baseline_ratio
        self._timeline = Timeline(tables.groups, tables.phase_names, tables.compilations)
        self._detail = Detail(tables.groups, detail_spans)
        self._pending = Events()
        self._identity: Identity | None = None
        self._before: Boundary | None = None
        self._told_groups: set[int] = set()
        self._blocks_host: list[bool] = []
        self._infos: dict[int, str | None] = {}
        self._truncated = False
        self._models = Models(rank=0, root=None)
        self._next_ordinal = 0
        self.steps_seen = 0

    @property
    def held_events(self) -> int:
        """Events of the step that has not ended yet."""
        return len(self._pending)

    def take(
        self,
        drained: Events,
        *,
        wall_offset_ns: int,
        lost: int,
        costs: Costs,
        pause: Callable[[], None] = lambda: None,
    ) -> list[Condensed]:
        """Condense every step that ended in ``drained`` or before.

        Args:
            drained: Events since the last call.
            wall_offset_ns: Unix time minus the events' clock.
            lost: Events that the ring lost just before ``drained``.
            costs: Argus's own, to be shared among these steps.
            pause: Gives the GIL away; called between steps, and within large ones.
        """
        if lost:
            # What came before the gap is half a step: its counts and sums would be wrong.
            if self._pending:
                self._faults.report("ring_overflow", records=len(self._pending))
            self._pending = Events()
            self._truncated = True
            self._resume_after_loss(drained)
        batch = self._pending + drained
        # Whatever goes wrong below, the same events are never tried again.
        self._pending = Events()
        condensed: list[Condensed] = []
        step_ends = batch.places(events.STEP_END)
        ends = _ends_of_operations(batch)
        begin = 0
        # Cut at identities, then after each step.
        for cut in [*batch.places(events.IDENTITY), len(batch)]:
            ended: list[_Ended] = []
            for place in step_ends:
                if begin <= place < cut:
                    ended += self._end_step(batch.part(begin, place + 1))
                    begin = place + 1
                    pause()
            if ended and self._identity is not None:
                part = _Part(self._identity, costs, len(ended), ends, wall_offset_ns, pause)
                for some in _together(ended):
                    self._condense(part, some)
                if part.condensed.digests or part.condensed.charted:
                    condensed.append(part.condensed)
                    # Told once, however many parts there are.
                    costs = Costs(self_cpu_s=0.0, drops=0, memory_bytes=costs.memory_bytes)
            if cut < len(batch):
                begin = cut + 1
                started = self._begin_identity(batch.at(cut), wall_offset_ns)
                if started is not None:
                    condensed.append(started)
        self._pending = batch.part(begin)
        if len(self._pending) > self._capacity:
            # No step has ended for a whole ring: this loop has none, or not the kind we see.
            left = self._capacity // 2
            self._faults.report("step_too_large", records=len(self._pending) - left)
            self._pending = self._pending.part(-left)
            self._truncated = True
        return condensed

    def _resume_after_loss(self, drained: Events) -> None:
        """Find out whose events these are, and from when: what said so may be lost too."""
        begins = drained.of_kind(events.IDENTITY)
        index = begins[0][3] - 1 if begins else len(self._tables.identities) - 1
        if index < 0 or not drained:
            return
        if self._identity is not self._tables.identities[index]:
            self._enter_identity(index)
        # The steps in the gap are nobody's: what lies before the first event is not "between".
        times_ns = [event[1] for event in drained.unpacked() if event[1] > 0]
        if times_ns:
            self._before = Boundary(min(times_ns))

    def take_exceptions(self, wall_offset_ns: int) -> tuple[Identity, list[Span]] | None:
        """Exceptions of the step that will never end; for the flush at exit."""
        raised = self._pending.of_kind(events.EXCEPTION)
        if not raised or self._identity is None:
            return None
        self._pending = self._pending.without(events.EXCEPTION)
        return self._identity, self._exception_spans(
            [(index, time_ns) for _, time_ns, _, index, _, _, _ in raised],
            self._identity,
            self._next_ordinal,
            wall_offset_ns,
        )

    def _begin_identity(self, event: Event, wall_offset_ns: int) -> Condensed | None:
        _, time_ns, _, index, _, _, _ = event
        identity = self._enter_identity(index)
        self._before = Boundary(time_ns)
        if index == 0:
            return None  # the process's start: it may never train
        span = _start_span(identity, time_ns + wall_offset_ns)
        return Condensed(identity=identity, digests=[], spans=[span])

    def _enter_identity(self, index: int) -> Identity:
        identity = self._identity = self._tables.identities[index]
        self._told_groups.clear()
        self._keep = KeepRule(self._ratio)
        self._models = Models(identity.rank, root_shape(identity))
        self._next_ordinal = 0
        return identity

    def _end_step(self, batch: Events) -> list[_Ended]:
        """Move the boundary on; the step between, unless nobody knows when it began."""
        before = self._before
        _, end_ns, _, ordinal, _, cpu_ns, run_delay_ns = batch.at(-1)
        self._before = Boundary(
            end_ns if before is None else max(end_ns, before.end_ns), cpu_ns, run_delay_ns
        )
        if before is None or self._identity is None:
            return []
        self._next_ordinal = ordinal + 1
        truncated, self._truncated = self._truncated, False
        return [_Ended(batch, before, ordinal, truncated)]

    def _condense(self, part: _Part, ended: list[_Ended]) -> None:
        """Condense some steps; of each either everything is added to the part, or nothing.

        One kind of work for all of them, then the next: a processor that comes from arithmetic is
        a third faster at the same few lines again and again than at many in turn.
        """
        # The last of those before these may have been given up.
        ended[0].truncated |= self._truncated
        self._truncated = False
        matched = self._match(part, ended)
        if any(step.model is None for step in ended):
            ended = self._each(part, ended, self._measure)
        ended = self._each(part, ended, self._name)
        if any(step.model is None for step in ended):
            for work in (self._draw, self._digest, self._pack):
                ended = self._each(part, ended, work)
        general = [step for step in ended if step.model is None]
        # Of those that follow a model, some have to say that the step before them was lost.
        late = [step for step in ended if step.model is not None and step.truncated]
        for regular, steps in matched:
            late += self._add_regular(part, regular, steps)
        for work in (self._work_out, self._draw, self._digest, self._pack):
            late = self._each(part, late, work)
        for step in (*general, *late):
            part.add(step)
        self.steps_seen += len(ended)

    # -- steps that follow a model ------------------------------------------------------------

    def _match(
        self, part: _Part, ended: Sequence[_Ended]
    ) -> list[tuple[RegularSteps, list[_Ended]]]:
        """Note which steps follow a model: those, or some of them, are then made at once."""
        try:
            found = self._models.match(
                [(step.batch, step.before.end_ns) for step in ended], part.ends, part.pause
            )
        except Exception as error:  # noqa: BLE001 - the general way is there for all of them
            self._faults.report("regular_steps", error, records=0)
            return []
        regular = []
        for steps, places in found:
            mine = [ended[place] for place in places]
            for step, times_ns in zip(mine, steps.begins_and_ends(), strict=True):
                step.start_ns, step.end_ns = times_ns
                step.model, step.is_known = steps.model, True
            regular.append((steps, mine))
        if part.drops:
            ended[0].model = None  # it has them to tell
        part.pause()
        return regular

    def _add_regular(
        self, part: _Part, regular: RegularSteps, matched: Sequence[_Ended]
    ) -> list[_Ended]:
        """Add those steps that still follow their model; all of them are left if that fails."""
        rows = [
            row for row, step in enumerate(matched) if step.model is not None and not step.truncated
        ]
        if not rows:
            return []
        steps = [matched[row] for row in rows]
        try:
            part.add_regular(regular.only(rows), steps)
        except Exception as error:  # noqa: BLE001 - the general way is there for all of them
            self._faults.report("regular_steps", error, records=0)
            return steps
        part.pause()
        return []

    # -- one step, in the general way ---------------------------------------------------------

    def _measure(self, part: _Part, step: _Ended) -> None:
        if step.model is None:
            self._work_out(part, step)

    def _work_out(self, part: _Part, step: _Ended) -> None:
        """The step's numbers."""
        step.model = None
        step.pause = part.pause if len(step.batch) > CHUNK else no_pause
        step.record = condense_step(
            step.batch,
            step.before,
            ends=part.ends,
            group_blocks_host=self._blocks(self._tables.groups),
            rank=part.identity.rank,
            pause=step.pause,
        )
        step.start_ns, step.end_ns = step.record.start_ns, step.record.end_ns

    def _name(self, part: _Part, step: _Ended) -> None:
        """Which step of the run it is, and whether it is to be kept."""
        identity, model = part.identity, step.model
        step.trace_id = ids.step_trace_id(
            identity.nonce, identity.attempt, step.ordinal, part.shard
        )
        step.step_id = ids.span_id(step.trace_id, ids.RANK_STEP, identity.rank)
        longest_gc_ns, odd = 0, False
        if model is None:
            record = step.record
            longest_gc_ns, odd = record.longest_gc_ns, bool(record.raised or record.compilations)
        step.keep = self._keep.decide(
            identity,
            step.ordinal,
            (step.end_ns - step.start_ns) * 1e-9,
            longest_gc_ns * 1e-9,
            odd=odd,
        )
        if model is not None and (
            step.keep is not None or self._groups_to_tell(model.groups, step.ordinal)
        ):
            self._work_out(part, step)  # it has more to tell than its model

    def _draw(self, part: _Part, step: _Ended) -> None:
        """What shows the step, where it is kept."""
        if step.model is not None:
            return
        record, identity, keep = step.record, part.identity, step.keep
        trace_id = step.trace_id
        step.timeline = self._timeline.spans(
            record,
            trace_id=trace_id,
            step_id=step.step_id,
            span_ids=ids.span_ids(
                trace_id, ids.TIMELINE, identity.rank, ids.TIMELINE_SPANS_PER_RANK
            ),
            keep=keep,
            wall_offset_ns=part.wall_offset_ns,
            pause=step.pause,
        )
        if record.raised:
            step.raised = self._exception_spans(
                record.raised, identity, record.ordinal, part.wall_offset_ns
            )
        if keep is not None and self._detail_spans and record.collectives is not None:
            step.detail, step.rows = self._detail.spans(
                identity, record.ordinal, record.collectives, keep, trace_id, part.wall_offset_ns
            )

    def _digest(self, part: _Part, step: _Ended) -> None:
        if step.model is not None:
            return
        record = step.record
        step.digest = make_digest(
            record,
            rank=part.identity.rank,
            groups=self._tables.groups,
            group_info=self._group_info(record, self._tables.groups),
            phase_names=self._tables.phase_names,
            keep=step.keep,
            self_cpu_s=part.self_cpu_s,
            memory_bytes=part.memory_bytes,
            wall_offset_ns=part.wall_offset_ns,
            pause=step.pause,
        )

    def _pack(self, part: _Part, step: _Ended) -> None:
        if step.model is not None:
            return
        digest = step.digest
        digest.drops, digest.truncated = part.drops, step.truncated
        step.span, step.roots = digest_spans(digest, step.trace_id, step.step_id, part.identity)
        part.drops = 0  # told
        if step.keep is None and not step.is_known:
            try:
                self._models.learn(
                    step.batch, step.before.end_ns, step.record, digest, step.timeline,
                    step.step_id, part.wall_offset_ns,
                )  # fmt: skip
            except Exception as error:  # noqa: BLE001 - this step has all it needs
                self._faults.report("regular_steps", error, records=0)

    def _each(
        self, part: _Part, ended: Sequence[_Ended], work: Callable[[_Part, _Ended], None]
    ) -> list[_Ended]:
        """Do something for each of some steps; those that are left.

        A step for which it fails is given up. What it would have told, later ones tell again.
        """
        left = []
        truncated = False
        for step in ended:
            step.truncated |= truncated
            try:
                work(part, step)
            except Exception as error:  # noqa: BLE001 - this step is lost, not all later ones
                truncated = True
                step.model = None
                self._told_groups.clear()
                self._faults.report("condense", error, records=len(step.batch))
            else:
                truncated = False
                left.append(step)
            part.pause()
        self._truncated |= truncated
        return left

    def _exception_spans(
        self,
        raised: Sequence[tuple[int, int]],
        identity: Identity,
        ordinal: int,
        wall_offset_ns: int,
    ) -> list[Span]:
        return [
            exception_span(
                self._tables.exceptions[index],
                identity,
                ordinal,
                time_ns + wall_offset_ns,
                place=place,
            )
            for place, (index, time_ns) in enumerate(raised[:MAX_EXCEPTION_SPANS])
        ]

    def _blocks(self, groups: Sequence[Group]) -> list[bool]:
        for group in groups[len(self._blocks_host) :]:
            self._blocks_host.append(group.blocks_host)
        return self._blocks_host

    def _group_info(self, step: StepRecord, groups: Sequence[Group]) -> tuple[str, ...]:
        """What to tell of the groups that a step uses."""
        if step.collectives is None:
            return ()
        to_tell = self._groups_to_tell(step.collectives.operations.groups, step.ordinal)
        if not to_tell:
            return ()
        self._told_groups |= to_tell
        infos = [self._info(index, groups) for index in sorted(to_tell)]
        return tuple([info for info in infos if info is not None])

    def _groups_to_tell(self, used: Iterable[int], ordinal: int) -> set[int]:
        if ordinal % _GROUP_INFO_EVERY:
            return set(used) - self._told_groups
        return set(used)

    def _info(self, index: int, groups: Sequence[Group]) -> str | None:
        """What is told of a group; None where a store would cut it, and half would mislead."""
        if index not in self._infos:
            info: str | None = groups[index].info
            if info is not None and len(info) > MAX_ATTRIBUTE_CHARACTERS:
                self._faults.report("group_info_too_long")
                info = None
            self._infos[index] = info
        return self._infos[index]


class _Ended:
    """A step that has ended, and what has been made of it so far."""

    __slots__ = (
        "batch", "before", "detail", "digest", "end_ns", "is_known", "keep", "model", "ordinal", "pause",
        "raised", "record", "roots", "rows", "span", "start_ns", "step_id", "timeline", "trace_id",
        "truncated",
    )  # fmt: skip

    model: Model | None
    """What it follows, as long as it has no more to tell than that."""
    is_known: bool
    """Whether there is a model for it."""
    start_ns: int
    end_ns: int
    pause: Callable[[], None]
    """Gives the GIL away; called within a step where there is much of it."""
    record: StepRecord
    keep: str | None
    trace_id: bytes
    step_id: bytes
    timeline: list[ShapedSpan]
    detail: Sequence[ShapedSpan]
    rows: Sequence[SpanRows]
    raised: Sequence[Span]
    digest: StepDigest
    span: Span
    roots: list[ShapedSpan]

    def __init__(self, batch: Events, before: Boundary, ordinal: int, truncated: bool) -> None:
        self.batch = batch
        self.before = before
        self.ordinal = ordinal
        self.truncated = truncated
        self.detail = self.rows = self.raised = ()
        self.model = None
        self.is_known = False


class _Part:
    """Steps of one identity in one batch, and what holds for all of them."""

    def __init__(
        self,
        identity: Identity,
        costs: Costs,
        steps: int,
        ends: Mapping[int, int],
        wall_offset_ns: int,
        pause: Callable[[], None],
    ) -> None:
        shaped: dict[str, list[ShapedSpan]]
        shaped = {scope: [] for scope in (scopes.DIGEST, scopes.TIMELINE, scopes.DETAIL)}
        self.condensed = Condensed(identity=identity, digests=[], shaped=shaped)
        self.identity = identity
        self.shard = ids.shard_of(identity.rank)
        self.self_cpu_s = costs.self_cpu_s / steps
        self.drops = costs.drops  # of the first step; 0 once told
        self.memory_bytes = costs.memory_bytes
        self.ends = ends
        self.wall_offset_ns = wall_offset_ns
        self.pause = pause

    def add(self, step: _Ended) -> None:
        """A step of which everything has been made."""
        condensed = self.condensed
        condensed.digests.append(step.digest)
        condensed.spans.append(step.span)
        condensed.spans += step.raised
        condensed.shaped[scopes.DIGEST] += step.roots
        condensed.shaped[scopes.TIMELINE] += step.timeline
        condensed.shaped[scopes.DETAIL] += step.detail
        condensed.rows += step.rows
        condensed.wait_s += step.record.wait_ns * 1e-9

    def add_regular(self, regular: RegularSteps, steps: Sequence[_Ended]) -> None:
        """Steps that follow a model."""
        rows, charted, wait_s = regular.spans(
            [step.trace_id for step in steps],
            [step.step_id for step in steps],
            rank=self.identity.rank,
            self_cpu_s=self.self_cpu_s,
            memory_bytes=self.memory_bytes,
            wall_offset_ns=self.wall_offset_ns,
            pause=self.pause,
        )
        condensed = self.condensed
        condensed.steps.append(rows)
        condensed.charted += charted
        condensed.wait_s += wait_s


def _together(ended: Sequence[_Ended]) -> Iterator[list[_Ended]]:
    """Steps that are condensed together: as many as take little memory as Python's integers."""
    some: list[_Ended] = []
    count = 0
    for step in ended:
        some.append(step)
        count += len(step.batch)
        if len(some) == _MAX_TOGETHER or count >= _MAX_EVENTS_TOGETHER:
            yield some
            some, count = [], 0
    if some:
        yield some


def _ends_of_operations(batch: Events) -> dict[int, int]:
    """When operations ended, by ``events.operation_key``; the first word on each counts."""
    ends: dict[int, int] = {}
    for _, time_ns, _, group, _, _, op_id in batch.of_kind(events.END):
        ends.setdefault(events.operation_key(group, op_id), time_ns)
    return ends


def _start_span(identity: Identity, time_ns: int) -> Span:
    trace_id = ids.step_trace_id(identity.nonce, identity.attempt, 0, ids.shard_of(identity.rank))
    return Span(
        scope=scopes.DIGEST,
        name=names.SPAN_RANK_START,
        trace_id=trace_id,
        span_id=ids.span_id(trace_id, ids.RANK_STEP, identity.rank, 1),
        parent_id=ids.span_id(trace_id, ids.ROOT, 0),
        start_ns=time_ns,
        end_ns=time_ns,
        attributes={names.DL_RANK: identity.rank},
    )


__all__ = ["Condensed", "Condenser", "Costs"]
