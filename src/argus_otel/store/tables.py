"""Digests to the tables of one run, a column at a time.

Shape legend: D = digests, G = (digest, group) pairs, P = phases of all digests, C = collectives
of all digests, K = (digest, point-to-point channel) pairs.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from argus_otel.store.sequences import sequence_numbers
from argus_otel.tables.kernels import rows_of, sketch_column
from argus_otel.tables.schemas import COLLECTIVES, EXPERTS, KERNELS, RANKS, STEPS
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.kernels import REST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from argus_otel.store.digests import Received
    from argus_otel.store.spans import Origin
    from argus_otel.wire.digest import PhaseColumns, StepDigest

_US_PER_S: Final = 1e6


def steps_table(received: Sequence[Received]) -> pa.Table:
    """One row a digest, in the order given.

    Args:
        received: Digests of one run, shape [D].
    """
    digests = [item.digest for item in received]
    plain: dict[str, list[Any]] = {
        name: [getattr(digest, name) for digest in digests]
        for name in STEPS.names
        if name in _PLAIN_STEP_COLUMNS
    }
    columns: dict[str, Any] = {
        **plain,
        "run": [item.origin.run for item in received],
        "attempt": [item.origin.attempt for item in received],
        "trace_id": [item.trace_id for item in received],
        "phases": _phases(digests),
        "boundary_counts": _boundary_counts(digests),
    }
    return _table(STEPS, columns, len(digests))


def collectives_table(received: Sequence[Received]) -> pa.Table:
    """One row an operation (or a folded row), in the order given, then of arrival.

    Args:
        received: Digests of one run, shape [D].
    """
    digests = [item.digest for item in received]
    syncs = [digest.sync for digest in digests]
    sizes_D = np.fromiter((sync.group.size for sync in syncs), np.int64, len(syncs))
    groups_D = np.fromiter((sync.group_keys.size for sync in syncs), np.int64, len(syncs))
    digest_C = np.repeat(np.arange(sizes_D.size), sizes_D)
    group_C = _joined(sync.group for sync in syncs)
    # One numbering of (digest, group) pairs over all digests, so that one pass serves all.
    pair_C = group_C + (np.cumsum(groups_D) - groups_D)[digest_C]
    key_G = _joined((sync.group_keys for sync in syncs), np.uint64)
    op_C = _joined(sync.op for sync in syncs)
    peer_C = _joined(sync.peer for sync in syncs)
    rank_C = _per_digest(digests, "rank")[digest_C]
    arrival_C = _joined(sync.arrival_us for sync in syncs)
    # Folded rows stand for many; and in a step whose buffer overflowed nobody knows how many
    # operations are missing between those that are there.
    unnumbered_D = np.fromiter((d.sync.folded or d.truncated for d in digests), bool, len(digests))
    seq_C = sequence_numbers(syncs, pair_C=pair_C, op_C=op_C, peer_C=peer_C, rank_C=rank_C)
    duration_C = _joined(sync.duration_us for sync in syncs)
    columns = {
        "run": _repeated([item.origin.run for item in received], digest_C),
        "attempt": np.array([item.origin.attempt for item in received], np.int32)[digest_C],
        "ordinal": _per_digest(digests, "ordinal")[digest_C],
        "rank": rank_C,
        "group": key_G[pair_C],
        "op": _named(OPS, np.where(op_C < len(OPS), op_C, 0)),
        "seq": _nullable(seq_C, (seq_C < 0) | unnumbered_D[digest_C]),
        "peer": _nullable(peer_C, peer_C < 0),
        "phase": _named(PHASES, _joined(sync.phase for sync in syncs)),
        "payload_bytes": _joined(sync.payload_bytes for sync in syncs),
        "arrival_s": arrival_C / _US_PER_S,
        "duration_s": _nullable(duration_C / _US_PER_S, duration_C < 0),
        "count": _joined(
            np.ones(s.group.size, np.int64) if s.count is None else s.count for s in syncs
        ),
        "last_arrival_s": _joined(
            s.arrival_us if s.last_arrival_us is None else s.last_arrival_us for s in syncs
        )
        / _US_PER_S,
        "min_duration_s": _least(syncs),
    }
    return _table(COLLECTIVES, columns, digest_C.size)


def kernels_table(received: Sequence[Received]) -> pa.Table:
    """One row a (name, stream, phase) of each digest, in the order given.

    Args:
        received: Digests of one run; many have no kernels.
    """
    rows = []
    sketches = []
    for item in received:
        sketch = item.digest.kernels
        if sketch is None or not sketch.name.size:
            continue
        sketches.append(sketch)
        of_digest = {
            "run": item.origin.run,
            "attempt": item.origin.attempt,
            "ordinal": item.digest.ordinal,
            "rank": item.digest.rank,
        }
        # What was folded is of no one stream.
        rows += [
            {**of_digest, "name": name, "stream": None if name == REST else stream, "phase": phase}
            for name, stream, phase in sketch.labels()
        ]
    if not rows:
        return KERNELS.empty_table()
    packed = [
        sketch_column(rows_of(list(alike)))
        for _, alike in groupby(sketches, key=attrgetter("error_per_mille"))
    ]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    return _table(KERNELS, {**columns, "sketch": pa.concat_arrays(packed)}, len(rows))


def experts_table(received: Sequence[Received]) -> pa.Table:
    """One row for each digest that knows the tokens of its experts, in the order given."""
    known = [item for item in received if item.digest.expert_tokens]
    columns = {
        "run": [item.origin.run for item in known],
        "attempt": [item.origin.attempt for item in known],
        "ordinal": [item.digest.ordinal for item in known],
        "rank": [item.digest.rank for item in known],
        "tokens": [list(item.digest.expert_tokens) for item in known],
    }
    return _table(EXPERTS, columns, len(known)) if known else EXPERTS.empty_table()


def ranks_table(origins: Iterable[Origin]) -> pa.Table:
    """One row a rank, sorted, from what its processes said of themselves (see ``merge_origins``)."""
    rows = sorted((origin for origin in origins if origin.rank is not None), key=_rank_of)
    columns = {
        name: [getattr(origin, name) for origin in rows]
        for name in RANKS.names
        if name != "world_size"
    }
    # A sender without a world size is at least as large as its own rank says.
    columns["world_size"] = [
        _rank_of(origin) + 1 if origin.world_size is None else origin.world_size for origin in rows
    ]
    return _table(RANKS, columns, len(rows))


_PLAIN_STEP_COLUMNS: Final = frozenset(
    {
        "ordinal",
        "rank",
        "iteration",
        "start_ns",
        "step_s",
        "between_s",
        "busy_s",
        "cpu_s",
        "run_delay_s",
        "data_wait_s",
        "gc_s",
        "gc_count",
        "tokens",
        "samples",
        "sum_len2",
        "memory_bytes",
        "end_rule",
        "keep",
        "truncated",
        "drops",
        "self_cpu_s",
    }
)


def _rank_of(origin: Origin) -> int:
    return -1 if origin.rank is None else origin.rank


def _phases(digests: Sequence[StepDigest]) -> pa.Array:
    columns = [digest.phases for digest in digests]
    codes: dict[str, int] = {name: code for code, name in enumerate(PHASES)}
    name_P = _joined(_phase_codes(phases, codes) for phases in columns)
    rows = pa.StructArray.from_arrays(
        [
            _named(tuple(codes), name_P),
            pa.array(_joined(phases.start_us for phases in columns) / _US_PER_S),
            pa.array(_joined(phases.duration_us for phases in columns) / _US_PER_S),
            pa.nulls(name_P.size, pa.float64()),  # no GPU times in layout 1 of the digest
        ],
        fields=list(STEPS.field("phases").type.value_type),
    )
    return _lists([phases.name.size for phases in columns], rows)


def _phase_codes(phases: PhaseColumns, codes: dict[str, int]) -> NDArray[np.int64]:
    if len(phases.names) == len(PHASES):
        return phases.name
    table = np.array([codes.setdefault(name, len(codes)) for name in phases.names], np.int64)
    return table[phases.name]


def _boundary_counts(digests: Sequence[StepDigest]) -> pa.Array:
    syncs = [digest.sync for digest in digests]
    rows = pa.StructArray.from_arrays(
        [
            pa.array(_joined((sync.group_keys for sync in syncs), np.uint64)),
            pa.array(_joined(sync.start_counts for sync in syncs)),
        ],
        fields=list(STEPS.field("boundary_counts").type.value_type),
    )
    return _lists([sync.group_keys.size for sync in syncs], rows)


def _least(syncs: Sequence[Any]) -> pa.Array:
    least_C = _joined(
        s.duration_us if s.min_duration_us is None else s.min_duration_us for s in syncs
    )
    return _nullable(least_C / _US_PER_S, least_C < 0)


def _joined(parts: Iterable[NDArray[Any]], kind: type[np.generic] = np.int64) -> NDArray[Any]:
    listed = list(parts)
    return np.concatenate(listed) if listed else np.empty(0, kind)


def _per_digest(digests: Sequence[StepDigest], name: str) -> NDArray[np.int64]:
    return np.fromiter((getattr(digest, name) for digest in digests), np.int64, len(digests))


def _lists(sizes: Sequence[int], rows: pa.Array) -> pa.Array:
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), rows)


def _named(dictionary: Sequence[str], code: NDArray[np.int64]) -> pa.Array:
    """Strings for codes; null where the code is outside the dictionary."""
    unknown = (code < 0) | (code >= len(dictionary))
    codes = pa.array(np.where(unknown, 0, code).astype(np.int32), mask=unknown)
    return pc.take(pa.array(dictionary, pa.string()), codes)


def _repeated(values: Sequence[Any], index: NDArray[np.int64]) -> pa.Array:
    return pc.take(pa.array(values, pa.string()), pa.array(index))


def _nullable(values: NDArray[Any], missing: NDArray[np.bool_]) -> pa.Array:
    return pa.array(values, mask=missing)


def _table(schema: pa.Schema, columns: dict[str, Any], rows: int) -> pa.Table:
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(rows, field.type))
            continue
        # from_pandas: a NaN that somebody sent is no number that is known.
        array = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
