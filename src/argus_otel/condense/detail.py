"""Every collective of the steps that are kept, as spans of their own.

Shape legend: C = collectives of the step, as many as are told; N = those of one kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.spans import ShapedSpan, SpanRows, SpanShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.condense.steps import Collectives
    from argus_otel.wire.identity import Group, Identity


_FEW: Final = 100
"""Collectives up to which spans are made one by one: numpy's calls cost as much as these."""

_MAX_SHAPES: Final = 512


class Detail:
    """Builds the detail spans of steps; remembers their shapes.

    Args:
        groups: The process's table, which only grows.
        budget: Most spans of a step.
    """

    def __init__(self, groups: Sequence[Group], budget: int) -> None:
        self._groups = groups
        self._budget = budget
        self._shapes: dict[tuple[object, ...], SpanShape] = {}

    def spans(
        self,
        identity: Identity,
        ordinal: int,
        collectives: Collectives,
        keep: str,
        trace_id: bytes,
        wall_offset_ns: int,
    ) -> tuple[list[ShapedSpan], list[SpanRows]]:
        """Spans of the collectives of a step that is kept, earliest first, as far as there is room.

        They stay in the step's trace while all of its shard's ranks fit; else each rank's detail
        is a trace of its own, whose id follows from the step and the rank.

        Returns:
            Few of them one by one, many as rows.
        """
        parent = ids.span_id(trace_id, ids.RANK_STEP, identity.rank)
        mark: str | None = None
        if not _fits_step_trace(identity.world_size, self._budget):
            trace_id = ids.detail_trace_id(identity.nonce, identity.attempt, ordinal, identity.rank)
            parent = bytes(8)
            mark = keep  # the Collector decides about each trace by itself
        count = min(len(collectives.arrival_ns), self._budget)
        span_ids = ids.span_ids(trace_id, ids.DETAIL, identity.rank, count)
        if count > _FEW:
            return [], self._rows(collectives, mark, trace_id, span_ids, parent, wall_offset_ns)
        return self._few(collectives, mark, trace_id, span_ids, parent, wall_offset_ns), []

    def _few(
        self,
        collectives: Collectives,
        mark: str | None,
        trace_id: bytes,
        span_ids: bytes,
        parent: bytes,
        wall_offset_ns: int,
    ) -> list[ShapedSpan]:
        kinds = collectives.operations
        arrival_ns = collectives.arrival_ns
        spans = []
        for row in range(len(span_ids) // 8):
            start_ns = end_ns = arrival_ns[row]
            if collectives.end_ns is not None:
                end_ns = max(end_ns, collectives.end_ns[row])  # not known is far below any arrival
            known = collectives.end_ns is not None and collectives.end_ns[row] != events.NONE
            peer = kinds.peer[row]
            shape = self._shape(
                kinds.group[row], kinds.op[row], collectives.phase[row], known, peer >= 0, mark
            )
            values: tuple[int, ...] = (collectives.count[row], collectives.payload_bytes[row])
            if peer >= 0:
                values = (*values, peer)
            spans.append(
                ShapedSpan(
                    shape,
                    trace_id,
                    span_ids[8 * row : 8 * row + 8],
                    parent,
                    start_ns + wall_offset_ns,
                    end_ns + wall_offset_ns,
                    values,
                )
            )
        return spans

    def _shape(
        self, group: int, op: int, phase: int, known: bool, has_peer: bool, mark: str | None
    ) -> SpanShape:
        key = (group, op, phase, known, has_peer, mark)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            constants = self._constants(group, phase, known, mark)
            ints: tuple[str, ...] = (names.ARGUS_COLLECTIVE_SEQ, names.ARGUS_COLLECTIVE_SIZE)
            if has_peer:
                ints = (*ints, names.ARGUS_COLLECTIVE_PEER)
            shape = self._shapes[key] = SpanShape(scopes.DETAIL, OPS[op], constants, ints)
        return shape

    def _constants(
        self, group: int, phase: int, known: bool, mark: str | None
    ) -> dict[str, str | int | float | bool]:
        members = self._groups[group]
        constants: dict[str, str | int | float | bool] = {
            names.ARGUS_GROUP_KEY: f"{members.key:016x}",
            names.ARGUS_GROUP_SIZE: len(members.ranks),
            names.ARGUS_COLLECTIVE_END_KNOWN: known,
        }
        if mark is not None:
            constants[names.ARGUS_KEEP] = mark
        if phase >= 0:
            constants[names.ARGUS_PHASE] = PHASES[phase]
        return constants

    def _rows(
        self,
        collectives: Collectives,
        mark: str | None,
        trace_id: bytes,
        span_ids_8: bytes,
        parent: bytes,
        wall_offset_ns: int,
    ) -> list[SpanRows]:
        kinds = collectives.operations
        group_C, op_C, phase_C, peer_C, arrival_ns_C, count_C, payload_bytes_C = (
            np.array(column[: self._budget], dtype=np.int64)
            for column in (
                kinds.group,
                kinds.op,
                collectives.phase,
                kinds.peer,
                collectives.arrival_ns,
                collectives.count,
                collectives.payload_bytes,
            )
        )
        n = group_C.size
        end_ns_C = np.full(n, events.NONE)
        if collectives.end_ns is not None:
            end_ns_C[:] = collectives.end_ns[: self._budget]
        known_C = end_ns_C != events.NONE
        end_ns_C = np.maximum(end_ns_C, arrival_ns_C)  # not known is far below any arrival
        span_ids = np.frombuffer(span_ids_8, dtype="<u8")
        has_peer_C = peer_C >= 0
        kind_C = (group_C * len(OPS) + op_C) * (len(PHASES) + 1) + phase_C + 1
        kind_C = (kind_C * 2 + has_peer_C) * 2 + known_C
        rows: list[SpanRows] = []
        for kind in np.unique(kind_C).tolist():
            pick = np.flatnonzero(kind_C == kind)
            first = int(pick[0])
            constants = self._constants(
                int(group_C[first]), int(phase_C[first]), bool(known_C[first]), mark
            )
            ints = {
                names.ARGUS_COLLECTIVE_SEQ: count_C[pick],
                names.ARGUS_COLLECTIVE_SIZE: payload_bytes_C[pick],
            }
            if has_peer_C[first]:
                ints[names.ARGUS_COLLECTIVE_PEER] = peer_C[pick]
            rows.append(
                SpanRows(
                    scope=scopes.DETAIL,
                    name=OPS[int(op_C[first])],
                    constants=constants,
                    trace_ids=np.broadcast_to(
                        np.frombuffer(trace_id, dtype=np.uint8), (pick.size, 16)
                    ),
                    span_ids=span_ids[pick],
                    parent_ids=np.full(
                        pick.size, np.frombuffer(parent, dtype="<u8")[0], dtype=np.uint64
                    ),
                    start_ns=arrival_ns_C[pick] + wall_offset_ns,
                    end_ns=end_ns_C[pick] + wall_offset_ns,
                    ints=ints,
                    doubles={},
                )
            )
        return rows


def _fits_step_trace(world_size: int, budget: int) -> bool:
    ranks = min(world_size, ids.RANKS_PER_SHARD)
    return ranks * (ids.TIMELINE_SPANS_PER_RANK + budget) <= ids.MAX_SPANS_PER_TRACE
