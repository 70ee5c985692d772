"""Holds what is not a whole step yet, and turns whole steps into spans.

One call condenses every step that has ended since the last one, each by itself: a step that
nothing can be made of costs no other, and between two the trainer may have the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from argus_otel.condense.detail import detail_rows
from argus_otel.condense.digests import make_digest
from argus_otel.condense.keep import KeepRule
from argus_otel.condense.steps import Boundary, condense_step
from argus_otel.condense.timeline import MAX_EXCEPTION_SPANS, Timeline, exception_span
from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.digest import MAX_ATTRIBUTE_CHARACTERS, encode_digest
from argus_otel.wire.events import Events
from argus_otel.wire.spans import ShapedSpan, Span, SpanRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from argus_otel._runtime.faults import FaultLog
    from argus_otel.condense.steps import StepRecord
    from argus_otel.wire.digest import StepDigest
    from argus_otel.wire.events import Event
    from argus_otel.wire.identity import Compilation, Group, Identity, UncaughtException

_GROUP_INFO_EVERY: Final = 32
"""Steps between repeats of the groups' members, for readers that start in the middle."""


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
    spans: list[Span] = field(default_factory=list)
    """Digest spans, and uncaught exceptions."""
    rows: list[SpanRows] = field(default_factory=list)
    """Detail spans."""
    shaped: list[ShapedSpan] = field(default_factory=list)
    """Timeline spans."""
    wait_s: float = 0.0
    """Summed over the steps, for the metric."""


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
        self._pending = Events()
        self._identity: Identity | None = None
        self._before: Boundary | None = None
        self._told_groups: set[int] = set()
        self._blocks_host: list[bool] = []
        self._infos: dict[int, str | None] = {}
        self._truncated = False
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
            part: _Part | None = None
            places = [place for place in step_ends if begin <= place < cut]
            if places and self._identity is not None:
                part = _Part(self._identity, [batch.at(place)[3] for place in places], costs)
            for nth, place in enumerate(places):
                whole = batch.part(begin, place + 1)
                begin = place + 1
                if part is not None and self._before is not None:
                    try:
                        self._add_step(part, nth, whole, self._before, ends, wall_offset_ns, pause)
                    except Exception as error:  # noqa: BLE001 - this step is lost, not all later ones
                        self._lose(error, whole)
                    pause()
                _, end_ns, _, _, _, cpu_ns, run_delay_ns = whole.at(-1)
                if self._before is not None:
                    end_ns = max(end_ns, self._before.end_ns)
                self._before = Boundary(end_ns, cpu_ns, run_delay_ns)
            if part is not None and part.condensed.digests:
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

    def _lose(self, error: Exception, whole: Events) -> None:
        """Give up a step; what it would have told is told again by later ones."""
        self._truncated = True
        self._told_groups.clear()
        self._next_ordinal = whole.at(-1)[3] + 1
        self._faults.report("condense", error, records=len(whole))

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
        self._next_ordinal = 0
        return identity

    def _add_step(
        self,
        part: _Part,
        nth: int,
        batch: Events,
        before: Boundary,
        ends: Mapping[int, int],
        wall_offset_ns: int,
        pause: Callable[[], None],
    ) -> None:
        """Condense a step; either all of it is added to the part, or nothing."""
        condensed, identity = part.condensed, part.condensed.identity
        groups = self._tables.groups  # only ever grows
        step = condense_step(
            batch,
            before,
            ends=ends,
            group_blocks_host=self._blocks(groups),
            rank=identity.rank,
            pause=pause,
        )
        keep = self._keep.decide(
            identity,
            step.ordinal,
            (step.end_ns - step.start_ns) * 1e-9,
            step.longest_gc_ns * 1e-9,
            odd=bool(step.raised or step.compilations),
        )
        digest = make_digest(
            step,
            rank=identity.rank,
            groups=groups,
            group_info=self._group_info(step, groups),
            phase_names=self._tables.phase_names,
            keep=keep,
            drops=part.drops,
            self_cpu_s=part.self_cpu_s,
            memory_bytes=part.memory_bytes,
            truncated=self._truncated,
            wall_offset_ns=wall_offset_ns,
            pause=pause,
        )
        trace_id = part.trace_ids[nth]
        step_id = ids.span_id(trace_id, ids.RANK_STEP, identity.rank)
        shaped = self._timeline.spans(
            step,
            trace_id=trace_id,
            step_id=step_id,
            span_ids=part.span_ids(nth),
            keep=keep,
            wall_offset_ns=wall_offset_ns,
            pause=pause,
        )
        spans = _digest_spans(digest, trace_id, step_id, identity)
        if step.raised:
            spans += self._exception_spans(step.raised, identity, step.ordinal, wall_offset_ns)
        if keep is not None and self._detail_spans and step.collectives is not None:
            condensed.rows += detail_rows(
                identity,
                groups,
                step.ordinal,
                step.collectives,
                keep,
                trace_id,
                self._detail_spans,
                wall_offset_ns,
            )
        condensed.digests.append(digest)
        condensed.spans += spans
        condensed.shaped += shaped
        condensed.wait_s += step.wait_ns * 1e-9
        part.drops = 0  # told
        self._truncated = False
        self._next_ordinal = step.ordinal + 1
        self.steps_seen += 1

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
        used = set(step.collectives.operations.groups)
        if step.ordinal % _GROUP_INFO_EVERY:
            used -= self._told_groups
        if not used:
            return ()
        self._told_groups |= used
        infos = [self._info(index, groups) for index in sorted(used)]
        return tuple([info for info in infos if info is not None])

    def _info(self, index: int, groups: Sequence[Group]) -> str | None:
        """What is told of a group; None where a store would cut it, and half would mislead."""
        if index not in self._infos:
            info: str | None = groups[index].info
            if info is not None and len(info) > MAX_ATTRIBUTE_CHARACTERS:
                self._faults.report("group_info_too_long")
                info = None
            self._infos[index] = info
        return self._infos[index]


class _Part:
    """Steps of one identity in one batch: their ids, and each one's share of the costs."""

    def __init__(self, identity: Identity, ordinals: Sequence[int], costs: Costs) -> None:
        self.condensed = Condensed(identity=identity, digests=[])
        self.self_cpu_s = costs.self_cpu_s / len(ordinals)
        self.drops = costs.drops  # of the first step; 0 once told
        self.memory_bytes = costs.memory_bytes
        shard = ids.shard_of(identity.rank)
        self.trace_ids = [
            ids.step_trace_id(identity.nonce, identity.attempt, ordinal, shard)
            for ordinal in ordinals
        ]
        # One vectorised pass for all steps; by itself, a step's would cost as much.
        self._span_ids = ids.span_ids(
            self.trace_ids, ids.TIMELINE, identity.rank, ids.TIMELINE_SPANS_PER_RANK
        ).tobytes()

    def span_ids(self, nth: int) -> bytes:
        """Those of one step's timeline, 8 bytes each."""
        size = 8 * ids.TIMELINE_SPANS_PER_RANK
        return self._span_ids[nth * size : nth * size + size]


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


def _digest_spans(
    digest: StepDigest, trace_id: bytes, step_id: bytes, identity: Identity
) -> list[Span]:
    root = ids.span_id(trace_id, ids.ROOT, 0)
    spans = []
    # Ranks that share no traces have roots of their own.
    alone = identity.nonce_local or identity.world_size == 1
    root_rank = ids.shard_of(identity.rank) * ids.RANKS_PER_SHARD
    if alone or identity.rank == root_rank:
        spans.append(
            Span(
                scope=scopes.DIGEST,
                name=names.SPAN_TRAIN_STEP,
                trace_id=trace_id,
                span_id=root,
                parent_id=None,
                start_ns=digest.start_ns,
                end_ns=digest.end_ns,
                attributes={names.ARGUS_STEP_ORDINAL: digest.ordinal},
            )
        )
    spans.append(
        Span(
            scope=scopes.DIGEST,
            name=names.SPAN_RANK_STEP,
            trace_id=trace_id,
            span_id=step_id,
            parent_id=root,
            start_ns=digest.start_ns,
            end_ns=digest.end_ns,
            attributes=encode_digest(digest),
        )
    )
    return spans


__all__ = ["Condensed", "Condenser", "Costs"]
