"""Holds what is not a whole step yet, and turns whole steps into spans.

One call condenses every step that has ended since the last one: doing several at once is what
keeps the cost of a step at some tens of microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from argus_otel.condense.detail import detail_rows
from argus_otel.condense.digests import make_digests
from argus_otel.condense.keep import KeepRule
from argus_otel.condense.steps import Boundary, condense_steps
from argus_otel.condense.timeline import MAX_EXCEPTION_SPANS, Timeline, exception_span
from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.digest import MAX_ATTRIBUTE_CHARACTERS, encode_digests
from argus_otel.wire.spans import ShapedSpan, Span, SpanRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from argus_otel._runtime.faults import FaultLog
    from argus_otel.condense.steps import CollectiveRows, StepColumns
    from argus_otel.wire.digest import StepDigest
    from argus_otel.wire.identity import Group, Identity, UncaughtException

_GROUP_INFO_EVERY: Final = 32
"""Steps between repeats of the groups' members, for readers that start in the middle."""


class Tables(Protocol):
    """What events refer to by index."""

    identities: list[Identity]
    groups: list[Group]
    phase_names: list[str]
    exceptions: list[UncaughtException]


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
    """Digest spans, and timeline spans with attributes of their own."""
    rows: list[SpanRows] = field(default_factory=list)
    """Timeline and detail spans."""
    shaped: list[ShapedSpan] = field(default_factory=list)
    """Timeline spans of shapes that recur."""
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
        self._pending: NDArray[np.void] = np.empty(0, dtype=events.EVENT)
        self._identity: Identity | None = None
        self._before: Boundary | None = None
        self._told_groups: set[int] = set()
        self._blocks_host: NDArray[np.bool_] = np.empty(0, dtype=bool)
        self._infos: dict[int, str | None] = {}
        self._truncated = False
        self.steps_seen = 0

    @property
    def held_events(self) -> int:
        """Events of the step that has not ended yet."""
        return self._pending.size

    def take(
        self, drained: NDArray[np.void], *, wall_offset_ns: int, lost: int, costs: Costs
    ) -> list[Condensed]:
        """Condense every step that ended in ``drained`` or before.

        Args:
            drained: Events since the last call, shape [E] of ``events.EVENT``.
            wall_offset_ns: Unix time minus the events' clock.
            lost: Events that the ring lost just before ``drained``.
            costs: Argus's own, to be shared among these steps.
        """
        if lost:
            # What came before the gap is half a step: its counts and sums would be wrong.
            if self._pending.size:
                self._faults.report("ring_overflow", records=self._pending.size)
            self._pending = self._pending[:0]
            self._truncated = True
            self._resume_after_loss(drained)
        batch = np.concatenate((self._pending, drained)) if self._pending.size else drained
        # Whatever goes wrong below, the same events are never tried again.
        self._pending = self._pending[:0]
        condensed: list[Condensed] = []
        begin = 0
        # Cut at identities, then at the last whole step before each.
        cuts = np.flatnonzero(batch["kind"] == events.IDENTITY).tolist()
        for cut in [*cuts, batch.size]:
            part = batch[begin:cut]
            ends = np.flatnonzero(part["kind"] == events.STEP_END)
            if ends.size and self._identity is not None and self._before is not None:
                whole = part[: ends[-1] + 1]
                try:
                    condensed.append(self._condense(whole, self._before, wall_offset_ns, costs))
                    # Told once, however many parts there are.
                    costs = replace(costs, self_cpu_s=0.0, drops=0)
                except Exception as error:  # noqa: BLE001 - these steps are lost, not all later ones
                    self._lose(error, whole)
            if ends.size:
                last = part[ends[-1]]
                latest_ns = int(part["t0"][ends].max())
                if self._before is not None:
                    latest_ns = max(latest_ns, self._before.end_ns)
                self._before = Boundary(
                    end_ns=latest_ns, cpu_ns=int(last["c"]), run_delay_ns=int(last["d"])
                )
                begin += int(ends[-1]) + 1
            if cut < batch.size:
                begin = cut + 1
                started = self._begin_identity(batch[cut], wall_offset_ns)
                if started is not None:
                    condensed.append(started)
        self._pending = batch[begin:].copy()
        if self._pending.size > self._capacity:
            # No step has ended for a whole ring: this loop has none, or not the kind we see.
            self._faults.report("step_too_large", records=self._pending.size - self._capacity // 2)
            self._pending = self._pending[-(self._capacity // 2) :].copy()
            self._truncated = True
        return condensed

    def _lose(self, error: Exception, whole: NDArray[np.void]) -> None:
        """Give up some steps; what they would have told is told again by later ones."""
        self._truncated = True
        self._told_groups.clear()
        self._next_ordinal = int(whole[-1]["a"]) + 1
        self._faults.report("condense", error, records=whole.size)

    def _resume_after_loss(self, drained: NDArray[np.void]) -> None:
        """Find out whose events these are, and from when: what said so may be lost too."""
        begins = drained["a"][drained["kind"] == events.IDENTITY]
        index = int(begins[0]) - 1 if begins.size else len(self._tables.identities) - 1
        if index < 0 or not drained.size:
            return
        if self._identity is not self._tables.identities[index]:
            self._enter_identity(index)
        # The steps in the gap are nobody's: what lies before the first event is not "between".
        times = drained["t0"][drained["t0"] > 0]
        if times.size:
            self._before = Boundary(
                end_ns=int(times.min()), cpu_ns=events.NONE, run_delay_ns=events.NONE
            )

    def take_exceptions(self, wall_offset_ns: int) -> tuple[Identity, list[Span]] | None:
        """Exceptions of the step that will never end; for the flush at exit."""
        rows = self._pending[self._pending["kind"] == events.EXCEPTION]
        if not rows.size or self._identity is None:
            return None
        spans = [
            exception_span(
                self._tables.exceptions[int(row["a"])],
                self._identity,
                self._next_ordinal,
                int(row["t0"]) + wall_offset_ns,
                place=place,
            )
            for place, row in enumerate(rows[:MAX_EXCEPTION_SPANS])
        ]
        self._pending = self._pending[self._pending["kind"] != events.EXCEPTION]
        return self._identity, spans

    def _begin_identity(self, event: np.void, wall_offset_ns: int) -> Condensed | None:
        identity = self._enter_identity(int(event["a"]))
        self._before = Boundary(
            end_ns=int(event["t0"]), cpu_ns=events.NONE, run_delay_ns=events.NONE
        )
        if int(event["a"]) == 0:
            return None  # the process's start: it may never train
        span = _start_span(identity, int(event["t0"]) + wall_offset_ns)
        return Condensed(identity=identity, digests=[], spans=[span])

    def _enter_identity(self, index: int) -> Identity:
        identity = self._identity = self._tables.identities[index]
        self._told_groups.clear()
        self._keep = KeepRule(self._ratio)
        self._next_ordinal = 0
        return identity

    _next_ordinal = 0

    def _condense(
        self, batch: NDArray[np.void], before: Boundary, wall_offset_ns: int, costs: Costs
    ) -> Condensed:
        identity = self._identity
        assert identity is not None  # noqa: S101 - checked by the only caller
        groups = self._tables.groups  # only ever grows
        columns, phases, collectives = condense_steps(batch, before, self._blocks(groups))
        self.steps_seen += columns.ordinal.size
        self._next_ordinal = int(columns.ordinal[-1]) + 1
        exceptions = _exceptions_by_step(batch)
        keeps = self._decide_keeps(columns, exceptions)
        digests = make_digests(
            columns,
            phases,
            collectives,
            identity=identity,
            groups=groups,
            group_info=self._group_info(columns, collectives, groups),
            phase_names=self._tables.phase_names,
            work=_work_by_step(batch),
            keeps=keeps,
            costs=costs,
            truncated_first=self._truncated,
            wall_offset_ns=wall_offset_ns,
        )
        self._truncated = False
        shard = ids.shard_of(identity.rank)
        traces = [
            ids.step_trace_id(identity.nonce, identity.attempt, ordinal, shard)
            for ordinal in columns.ordinal.tolist()
        ]
        step_ids = [ids.span_id(trace, ids.RANK_STEP, identity.rank) for trace in traces]
        timeline = Timeline(
            identity,
            groups,
            self._tables.phase_names,
            traces,
            step_ids,
            keeps,
            wall_offset_ns,
        )
        spans = _digest_spans(digests, traces, step_ids, identity)
        rows = timeline.rows(phases, collectives, _pauses(batch, columns))
        for step, raised in exceptions.items():
            for place, (index, time_ns) in enumerate(raised[:MAX_EXCEPTION_SPANS]):
                spans.append(
                    exception_span(
                        self._tables.exceptions[index],
                        identity,
                        int(columns.ordinal[step]),
                        time_ns + wall_offset_ns,
                        place=place,
                    )
                )
        if self._detail_spans:
            rows += detail_rows(
                identity,
                groups,
                columns,
                collectives,
                keeps,
                traces,
                self._detail_spans,
                wall_offset_ns,
            )
        return Condensed(
            identity=identity,
            digests=digests,
            spans=spans,
            rows=rows,
            wait_s=float(columns.wait_ns.sum()) * 1e-9,
        )

    def _blocks(self, groups: Sequence[Group]) -> NDArray[np.bool_]:
        if self._blocks_host.size < len(groups):
            self._blocks_host = np.array([group.blocks_host for group in groups], dtype=bool)
        return self._blocks_host

    def _decide_keeps(
        self, columns: StepColumns, exceptions: dict[int, list[tuple[int, int]]]
    ) -> list[str | None]:
        assert self._identity is not None  # noqa: S101
        durations_s = ((columns.end_ns - columns.start_ns) * 1e-9).tolist()
        longest_gc_s = (columns.longest_gc_ns * 1e-9).tolist()
        return [
            self._keep.decide(
                self._identity,
                ordinal,
                durations_s[step],
                longest_gc_s[step],
                exception=step in exceptions,
            )
            for step, ordinal in enumerate(columns.ordinal.tolist())
        ]

    def _group_info(
        self, columns: StepColumns, collectives: CollectiveRows, groups: Sequence[Group]
    ) -> list[tuple[str, ...]]:
        """For each step, what to tell of the groups that it uses."""
        told: list[tuple[str, ...]] = []
        bounds = np.searchsorted(collectives.step, np.arange(columns.ordinal.size + 1))
        for step, ordinal in enumerate(columns.ordinal.tolist()):
            used = set(collectives.group[bounds[step] : bounds[step + 1]].tolist())
            if ordinal % _GROUP_INFO_EVERY:
                used -= self._told_groups
            self._told_groups |= used
            infos = (self._info(index, groups) for index in sorted(used))
            told.append(tuple(info for info in infos if info is not None))
        return told

    def _info(self, index: int, groups: Sequence[Group]) -> str | None:
        """What is told of a group; None where a store would cut it, and half would mislead."""
        if index not in self._infos:
            info: str | None = groups[index].info
            if info is not None and len(info) > MAX_ATTRIBUTE_CHARACTERS:
                self._faults.report("group_info_too_long")
                info = None
            self._infos[index] = info
        return self._infos[index]


def _exceptions_by_step(batch: NDArray[np.void]) -> dict[int, list[tuple[int, int]]]:
    """Index and time of each uncaught exception, by step."""
    found: dict[int, list[tuple[int, int]]] = {}
    where = np.flatnonzero(batch["kind"] == events.EXCEPTION)
    if where.size:
        step_E = np.searchsorted(np.flatnonzero(batch["kind"] == events.STEP_END), where)
        for step, event in zip(step_E.tolist(), batch[where], strict=True):
            found.setdefault(step, []).append((int(event["a"]), int(event["t0"])))
    return found


def _work_by_step(batch: NDArray[np.void]) -> dict[int, dict[str, float]]:
    work: dict[int, dict[str, float]] = {}
    where = np.flatnonzero(batch["kind"] == events.WORK)
    if where.size:
        step_E = np.searchsorted(np.flatnonzero(batch["kind"] == events.STEP_END), where)
        for step, event in zip(step_E.tolist(), batch[where], strict=True):
            kinds = work.setdefault(step, {})
            name = events.WORK_KINDS[int(event["a"])]
            kinds[name] = kinds.get(name, 0.0) + float(event["b"])
    return work


def _pauses(batch: NDArray[np.void], columns: StepColumns) -> tuple[NDArray[Any], NDArray[Any]]:
    where = np.flatnonzero(batch["kind"] == events.GC)
    ends = np.flatnonzero(batch["kind"] == events.STEP_END)
    step = np.searchsorted(ends, where)
    inside = batch["t0"][where] >= columns.start_ns[step]
    return batch[where][inside], step[inside]


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
    digests: Sequence[StepDigest],
    traces: Sequence[bytes],
    step_ids: Sequence[bytes],
    identity: Identity,
) -> list[Span]:
    spans = []
    # Ranks that share no traces have roots of their own.
    alone = identity.nonce_local or identity.world_size == 1
    root_rank = ids.shard_of(identity.rank) * ids.RANKS_PER_SHARD
    for digest, trace_id, step_id, attributes in zip(
        digests, traces, step_ids, encode_digests(digests), strict=True
    ):
        root = ids.span_id(trace_id, ids.ROOT, 0)
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
                attributes=attributes,
            )
        )
    return spans


__all__ = ["Condensed", "Condenser", "Costs"]
