"""Every collective of the steps that are kept, as spans of their own.

Shape legend: C = collectives of the step, as many as are told; N = those of one kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.digest import OPS, PHASES
from argus_otel.wire.spans import SpanRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.condense.steps import Collectives
    from argus_otel.wire.identity import Group, Identity


def detail_rows(
    identity: Identity,
    groups: Sequence[Group],
    ordinal: int,
    collectives: Collectives,
    keep: str,
    trace_id: bytes,
    budget: int,
    wall_offset_ns: int,
) -> list[SpanRows]:
    """Spans of the collectives of a step that is kept, at most ``budget``, earliest first.

    They stay in the step's trace while all of its shard's ranks fit; else each rank's detail is
    a trace of its own, whose id follows from the step and the rank.
    """
    parent = ids.span_id(trace_id, ids.RANK_STEP, identity.rank)
    own_trace = not _fits_step_trace(identity.world_size, budget)
    if own_trace:
        trace_id = ids.detail_trace_id(identity.nonce, identity.attempt, ordinal, identity.rank)
        parent = bytes(8)
    kinds = collectives.operations
    group_C, op_C, phase_C, peer_C, arrival_ns_C, count_C, payload_bytes_C = (
        np.array(column[:budget], dtype=np.int64)
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
        end_ns_C[:] = collectives.end_ns[:budget]
    known_C = end_ns_C != events.NONE
    end_ns_C = np.maximum(end_ns_C, arrival_ns_C)  # not known is far below any arrival
    span_ids = ids.span_ids((trace_id,), ids.DETAIL, identity.rank, n)[0]
    has_peer_C = peer_C >= 0
    kind_C = (group_C * len(OPS) + op_C) * (len(PHASES) + 1) + phase_C + 1
    kind_C = (kind_C * 2 + has_peer_C) * 2 + known_C
    rows: list[SpanRows] = []
    for kind in np.unique(kind_C).tolist():
        pick = np.flatnonzero(kind_C == kind)
        first = int(pick[0])
        group = groups[int(group_C[first])]
        constants: dict[str, str | int | float | bool] = {
            names.ARGUS_GROUP_KEY: f"{group.key:016x}",
            names.ARGUS_GROUP_SIZE: len(group.ranks),
            names.ARGUS_COLLECTIVE_END_KNOWN: bool(known_C[first]),
        }
        if own_trace:  # the Collector decides about each trace by itself
            constants[names.ARGUS_KEEP] = keep
        if phase_C[first] >= 0:
            constants[names.ARGUS_PHASE] = PHASES[int(phase_C[first])]
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
                trace_ids=np.broadcast_to(np.frombuffer(trace_id, dtype=np.uint8), (pick.size, 16)),
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
