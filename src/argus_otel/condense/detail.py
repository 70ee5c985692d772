"""Every collective of the steps that are kept, as spans of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.digest import OPS, PHASES
from argus_otel.wire.spans import SpanRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.condense.steps import CollectiveRows, StepColumns
    from argus_otel.wire.identity import Group, Identity


def detail_rows(
    identity: Identity,
    groups: Sequence[Group],
    columns: StepColumns,
    collectives: CollectiveRows,
    keeps: Sequence[str | None],
    traces: Sequence[bytes],
    budget: int,
    wall_offset_ns: int,
) -> list[SpanRows]:
    """Spans of the collectives of some steps, at most ``budget`` a step, earliest first.

    They stay in the step's trace while all of its shard's ranks fit; else each rank's detail is
    a trace of its own, whose id follows from the step and the rank.
    """
    own_trace = not _fits_step_trace(identity.world_size, budget)
    cut = np.searchsorted(collectives.step, np.arange(columns.ordinal.size + 1))
    rows: list[SpanRows] = []
    for step, keep in enumerate(keeps):
        if keep is None:
            continue
        c = np.arange(cut[step], min(cut[step + 1], cut[step] + budget))
        if not c.size:
            continue
        ordinal = int(columns.ordinal[step])
        trace_id, parent = traces[step], ids.span_id(traces[step], ids.RANK_STEP, identity.rank)
        if own_trace:
            trace_id = ids.detail_trace_id(identity.nonce, identity.attempt, ordinal, identity.rank)
            parent = bytes(8)
        span_ids = ids.span_ids((trace_id,), ids.DETAIL, identity.rank, c.size)[0]
        kind = (collectives.group[c] * len(OPS) + collectives.op[c]) * (len(PHASES) + 1)
        kind += collectives.phase[c] + 1
        has_peer = collectives.peer[c] >= 0
        kind = kind * 2 + has_peer
        known = collectives.end_ns[c] != events.NONE
        end_ns = np.where(known, collectives.end_ns[c], collectives.arrival_ns[c])
        for code in np.unique(kind).tolist():
            for is_known in (True, False):
                pick = np.flatnonzero((kind == code) & (known == is_known))
                if not pick.size:
                    continue
                first = int(c[pick[0]])
                group = groups[int(collectives.group[first])]
                constants: dict[str, str | int | float | bool] = {
                    names.ARGUS_GROUP_KEY: f"{group.key:016x}",
                    names.ARGUS_GROUP_SIZE: len(group.ranks),
                    names.ARGUS_COLLECTIVE_END_KNOWN: is_known,
                }
                if own_trace:  # the Collector decides about each trace by itself
                    constants[names.ARGUS_KEEP] = keep
                if int(collectives.phase[first]) >= 0:
                    constants[names.ARGUS_PHASE] = PHASES[int(collectives.phase[first])]
                ints = {
                    names.ARGUS_COLLECTIVE_SEQ: collectives.count[c[pick]],
                    names.ARGUS_COLLECTIVE_SIZE: collectives.payload_bytes[c[pick]],
                }
                if has_peer[pick[0]]:
                    ints[names.ARGUS_COLLECTIVE_PEER] = collectives.peer[c[pick]]
                rows.append(
                    SpanRows(
                        scope=scopes.DETAIL,
                        name=OPS[int(collectives.op[first])],
                        constants=constants,
                        trace_ids=np.broadcast_to(
                            np.frombuffer(trace_id, dtype=np.uint8), (pick.size, 16)
                        ),
                        span_ids=span_ids[pick],
                        parent_ids=np.full(
                            pick.size, np.frombuffer(parent, dtype="<u8")[0], dtype=np.uint64
                        ),
                        start_ns=collectives.arrival_ns[c[pick]] + wall_offset_ns,
                        end_ns=np.maximum(end_ns[pick], collectives.arrival_ns[c[pick]])
                        + wall_offset_ns,
                        ints=ints,
                        doubles={},
                    )
                )
    return rows


def _fits_step_trace(world_size: int, budget: int) -> bool:
    ranks = min(world_size, ids.RANKS_PER_SHARD)
    return ranks * (ids.TIMELINE_SPANS_PER_RANK + budget) <= ids.MAX_SPANS_PER_TRACE
