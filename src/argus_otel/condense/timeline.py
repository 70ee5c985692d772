"""The timeline of each step: at most 32 spans a rank, whatever the step holds.

Phases first (folded by name where there are many), then pauses and the collectives: one span
for each (group, operation, phase), and the slowest few by themselves.

Shape legend: S = steps in the batch; P = phases; C = collectives; N = rows of one kind of span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.digest import OPS, PHASES
from argus_otel.wire.spans import Span, SpanRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from argus_otel.condense.steps import CollectiveRows, PhaseRows
    from argus_otel.wire.identity import Group, Identity, UncaughtException

MAX_PHASE_SPANS: Final = 14
MAX_GC_SPANS: Final = 4
MAX_FOLDED_SPANS: Final = 9
MAX_SLOWEST_SPANS: Final = 3
MAX_EXCEPTION_SPANS: Final = 2
"""All together ``ids.TIMELINE_SPANS_PER_RANK``."""

MIN_GC_SPAN_NS: Final = 1_000_000
"""Shorter collections are in the digest's sum and not worth a span."""

_EXCEPTION_ID = 1 << 20  # apart from the vectorised counters of the same step


class Timeline:
    """Builds the timeline spans of one batch; ids count up within each step."""

    def __init__(
        self,
        identity: Identity,
        groups: Sequence[Group],
        phase_names: Sequence[str],
        traces: Sequence[bytes],
        step_ids: Sequence[bytes],
        keeps: Sequence[str | None],
        wall_offset_ns: int,
    ) -> None:
        self._groups = groups
        self._phase_names = phase_names
        self._keeps = keeps
        self._offset = wall_offset_ns
        self._trace_ids = np.frombuffer(b"".join(traces), dtype=np.uint8).reshape(-1, 16)
        self._step_ids = np.frombuffer(b"".join(step_ids), dtype="<u8")
        self._span_ids = ids.span_ids(
            traces, ids.TIMELINE, identity.rank, ids.TIMELINE_SPANS_PER_RANK
        )
        self._used = np.zeros(len(traces), dtype=np.int64)

    def rows(
        self,
        phases: PhaseRows,
        collectives: CollectiveRows,
        pauses: tuple[NDArray[Any], NDArray[Any]],
    ) -> list[SpanRows]:
        """Every timeline span of the batch."""
        rows = self._phase_rows(phases)
        rows += self._gc_rows(*pauses)
        if collectives.step.size:
            rows += self._collective_rows(collectives)
        kept = [step for step, keep in enumerate(self._keeps) if keep is not None]
        for step in set(kept).difference(phases.step.tolist()):
            self._mark_any(rows, step)
        return rows

    def _mark_any(self, rows: list[SpanRows], step: int) -> None:
        """Put the keep mark on some span of a step that has no phases to bear it."""
        for index, row in enumerate(rows):
            mine = np.flatnonzero((row.trace_ids == self._trace_ids[step]).all(axis=1))
            if mine.size:
                marked = _pick(row, mine[:1])
                marked.constants = {**row.constants, names.ARGUS_KEEP: str(self._keeps[step])}
                others = np.delete(np.arange(row.span_ids.size), mine[0])
                rows[index : index + 1] = [_pick(row, others)] if others.size else []
                rows.append(marked)
                return

    # -- phases -------------------------------------------------------------------------------

    def _phase_rows(self, phases: PhaseRows) -> list[SpanRows]:
        if not phases.step.size:
            return []
        # Fold by (step, name): a step with few phases has one row a phase all the same.
        per_step = np.bincount(phases.step, minlength=self._used.size)
        many = per_step[phases.step] > MAX_PHASE_SPANS
        width = len(PHASES) + len(self._phase_names) + 1
        key = phases.step * width + phases.name
        alone = phases.step.size * width + width + np.arange(phases.step.size)
        _, first, which = np.unique(
            np.where(many, key, alone), return_index=True, return_inverse=True
        )
        n = first.size
        count = np.bincount(which, minlength=n)
        total_ns = np.bincount(which, weights=phases.end_ns - phases.start_ns, minlength=n)
        end_ns = np.full(n, np.iinfo(np.int64).min)
        np.maximum.at(end_ns, which, phases.end_ns)
        order = np.lexsort((phases.start_ns[first], phases.step[first]))
        step, name = phases.step[first][order], phases.name[first][order]
        place = _rank_within(step)
        fits = place < MAX_PHASE_SPANS
        order, step, name, place = order[fits], step[fits], name[fits], place[fits]
        start_ns, end_ns, count = phases.start_ns[first][order], end_ns[order], count[order]
        total_s: NDArray[np.float64] = np.asarray(total_ns[order] * 1e-9, np.float64)
        span_id = self._take_ids(step, place)
        # Where a phase is alone under its name, the collectives issued in it hang below it.
        self._phase_span: dict[tuple[int, int], int] = {}
        for k, (at, code) in enumerate(zip(step.tolist(), name.tolist(), strict=True)):
            if (at, code) in self._phase_span:
                self._phase_span[at, code] = 0
            else:
                self._phase_span[at, code] = int(span_id[k])
        kept = np.array([self._keeps[at] is not None for at in step.tolist()]) & (place == 0)
        rows: list[SpanRows] = []
        for code in np.unique(name).tolist():
            chosen = (name == code) & ~kept
            if chosen.any():
                rows.append(self._phase_span_rows(
                    code, {}, step, start_ns, end_ns, count, total_s, span_id, chosen
                ))  # fmt: skip
        for k in np.flatnonzero(kept).tolist():
            chosen = np.zeros(step.size, dtype=bool)
            chosen[k] = True
            keep = {names.ARGUS_KEEP: str(self._keeps[int(step[k])])}
            rows.append(self._phase_span_rows(
                int(name[k]), keep, step, start_ns, end_ns, count, total_s, span_id, chosen
            ))  # fmt: skip
        return rows

    def _phase_span_rows(
        self,
        code: int,
        constants: dict[str, str],
        step: NDArray[np.int64],
        start_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
        count: NDArray[np.int64],
        total_s: NDArray[np.float64],
        span_id: NDArray[np.uint64],
        chosen: NDArray[np.bool_],
    ) -> SpanRows:
        folded = bool((count[chosen] > 1).any())
        name = PHASES[code] if code < len(PHASES) else self._phase_names[code - len(PHASES)]
        at = step[chosen]
        return SpanRows(
            scope=scopes.TIMELINE,
            name=name,
            constants=constants,
            trace_ids=self._trace_ids[at],
            span_ids=span_id[chosen],
            parent_ids=self._step_ids[at],
            start_ns=start_ns[chosen] + self._offset,
            end_ns=end_ns[chosen] + self._offset,
            ints={names.ARGUS_FOLD_COUNT: count[chosen]} if folded else {},
            doubles={names.ARGUS_FOLD_DURATION: total_s[chosen]} if folded else {},
        )

    # -- pauses -------------------------------------------------------------------------------

    def _gc_rows(self, pauses: NDArray[Any], step: NDArray[np.int64]) -> list[SpanRows]:
        duration_ns = pauses["t1"] - pauses["t0"]
        order = np.lexsort((-duration_ns, step))
        order = order[duration_ns[order] >= MIN_GC_SPAN_NS]
        place = _rank_within(step[order])
        order = order[place < MAX_GC_SPANS]
        if not order.size:
            return []
        at = step[order]
        return [
            SpanRows(
                scope=scopes.TIMELINE,
                name=names.SPAN_GC,
                constants={},
                trace_ids=self._trace_ids[at],
                span_ids=self._take_ids(at, _rank_within(at)),
                parent_ids=self._step_ids[at],
                start_ns=pauses["t0"][order] + self._offset,
                end_ns=pauses["t1"][order] + self._offset,
                ints={
                    names.ARGUS_GC_GENERATION: pauses["a"][order],
                    names.ARGUS_GC_COLLECTED: pauses["b"][order],
                },
                doubles={},
            )
        ]

    # -- collectives --------------------------------------------------------------------------

    def _collective_rows(self, rows: CollectiveRows) -> list[SpanRows]:
        known = rows.end_ns != events.NONE
        finish_ns = np.where(known, np.maximum(rows.end_ns, rows.arrival_ns), rows.arrival_ns)
        kind = (rows.group * len(OPS) + rows.op) * (len(PHASES) + 1) + rows.phase + 1
        span = int(kind.max()) + 1
        _, first, which = np.unique(rows.step * span + kind, return_index=True, return_inverse=True)
        n = first.size
        count = np.bincount(which, minlength=n)
        last_ns = np.full(n, np.iinfo(np.int64).min)
        np.maximum.at(last_ns, which, finish_ns)
        size = np.bincount(which, weights=rows.payload_bytes, minlength=n).astype(np.int64)
        blocked_ns = np.bincount(which, weights=finish_ns - rows.arrival_ns, minlength=n)
        blocked_s: NDArray[np.float64] = np.asarray(blocked_ns * 1e-9, np.float64)
        all_known = np.bincount(which, weights=known, minlength=n) == count
        # The busiest kinds of a step, if there are more kinds than places.
        order = np.lexsort((-count, rows.step[first]))
        order = order[_rank_within(rows.step[first][order]) < MAX_FOLDED_SPANS]
        step = rows.step[first][order]
        span_id = self._take_ids(step, _rank_within(step))
        out: list[SpanRows] = []
        for code in np.unique(kind[first][order]).tolist():
            pick = np.flatnonzero(kind[first][order] == code)
            source = order[pick]
            out.append(
                self._collective_span_rows(
                    rows, first[source], step[pick], span_id[pick],
                    rows.arrival_ns[first[source]], last_ns[source],
                    ints={
                        names.ARGUS_COLLECTIVE_COUNT: count[source],
                        names.ARGUS_COLLECTIVE_SIZE: size[source],
                        names.ARGUS_COLLECTIVE_SEQ: rows.count[first[source]],
                    },
                    doubles={names.ARGUS_FOLD_DURATION: blocked_s[source]},
                    end_known=bool(all_known[source].all()),
                )
            )  # fmt: skip
        return out + self._slowest_rows(rows, known, finish_ns)

    def _slowest_rows(
        self, rows: CollectiveRows, known: NDArray[np.bool_], finish_ns: NDArray[np.int64]
    ) -> list[SpanRows]:
        """The slowest few whose end is known, in steps that are kept: nobody sees the others."""
        kept = np.array([keep is not None for keep in self._keeps])
        candidate = np.flatnonzero(known & kept[rows.step])
        if not candidate.size:
            return []
        duration_ns = finish_ns[candidate] - rows.arrival_ns[candidate]
        order = candidate[np.lexsort((-duration_ns, rows.step[candidate]))]
        order = order[_rank_within(rows.step[order]) < MAX_SLOWEST_SPANS]
        return [
            self._collective_span_rows(
                rows, order[k : k + 1], rows.step[order[k : k + 1]],
                self._take_ids(rows.step[order[k : k + 1]], np.zeros(1, dtype=np.int64)),
                rows.arrival_ns[order[k : k + 1]], finish_ns[order[k : k + 1]],
                ints={
                    names.ARGUS_COLLECTIVE_SIZE: rows.payload_bytes[order[k : k + 1]],
                    names.ARGUS_COLLECTIVE_SEQ: rows.count[order[k : k + 1]],
                },
                doubles={},
                end_known=True,
            )
            for k in range(order.size)
        ]  # fmt: skip

    def _collective_span_rows(
        self,
        rows: CollectiveRows,
        like: NDArray[np.int64],
        step: NDArray[np.int64],
        span_id: NDArray[np.uint64],
        start_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
        *,
        ints: dict[str, NDArray[np.int64]],
        doubles: dict[str, NDArray[np.float64]],
        end_known: bool,
    ) -> SpanRows:
        group, code = self._groups[int(rows.group[like[0]])], int(rows.phase[like[0]])
        constants: dict[str, str | int | float | bool] = {
            names.ARGUS_GROUP_KEY: f"{group.key:016x}",
            names.ARGUS_GROUP_SIZE: len(group.ranks),
            names.ARGUS_COLLECTIVE_END_KNOWN: end_known,
        }
        if code >= 0:
            constants[names.ARGUS_PHASE] = PHASES[code]
        parents = np.array(
            [self._phase_span.get((at, code), 0) for at in step.tolist()], dtype=np.uint64
        )
        return SpanRows(
            scope=scopes.TIMELINE,
            name=OPS[int(rows.op[like[0]])],
            constants=constants,
            trace_ids=self._trace_ids[step],
            span_ids=span_id,
            parent_ids=np.where(parents > 0, parents, self._step_ids[step]),
            start_ns=start_ns + self._offset,
            end_ns=end_ns + self._offset,
            ints=ints,
            doubles=doubles,
        )

    _phase_span: dict[tuple[int, int], int] = {}  # noqa: RUF012 - set by _phase_rows

    def _take_ids(self, step: NDArray[np.int64], place: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The next ids of each step; ``place`` counts within the step, from 0."""
        taken: NDArray[np.uint64] = self._span_ids[step, self._used[step] + place]
        np.maximum.at(self._used, step, self._used[step] + place + 1)
        return taken


def _pick(row: SpanRows, chosen: NDArray[np.int64]) -> SpanRows:
    return SpanRows(
        scope=row.scope,
        name=row.name,
        constants=row.constants,
        trace_ids=row.trace_ids[chosen],
        span_ids=row.span_ids[chosen],
        parent_ids=row.parent_ids[chosen],
        start_ns=row.start_ns[chosen],
        end_ns=row.end_ns[chosen],
        ints={name: values[chosen] for name, values in row.ints.items()},
        doubles={name: values[chosen] for name, values in row.doubles.items()},
    )


def _rank_within(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2 … within each run of equal values of a sorted array."""
    if not group.size:
        return np.empty(0, dtype=np.int64)
    first = np.concatenate(([0], np.flatnonzero(np.diff(group)) + 1))
    lengths = np.diff(np.append(first, group.size))
    place: NDArray[np.int64] = np.arange(group.size) - np.repeat(first, lengths)
    return place


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
