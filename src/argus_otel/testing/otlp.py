"""OTLP requests as a training job would send them, from digests; for tests of what receives them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from argus_otel.semconv import names
from argus_otel.wire import ids, scopes
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.digest import (
    PhaseColumns,
    StepDigest,
    SyncColumns,
    encode_digests,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

NONCE: Final = "9f2c41d6a0b35e77"
GROUP: Final = 0x00C0FFEE00C0FFEE
"""Key of the group in ``example_digest``."""


def resource_of(
    rank: int,
    *,
    world_size: int,
    nonce: str = NONCE,
    run_id: str = "demo",
    attempt: int = 0,
    role: str = "trainer",
    service: str = "training",
    **more: Any,  # noqa: ANN401 - attribute values of any OTLP type
) -> dict[str, Any]:
    """Resource attributes of one rank's process; ``more`` adds to or replaces them."""
    return {
        "service.name": service,
        "service.instance.id": f"{run_id}-rank{rank}",
        "host.name": f"node-{rank // 8}",
        "host.id": f"node-{rank // 8}",
        "process.pid": 1000 + rank,
        names.ARGUS_RUN_ID: run_id,
        names.ARGUS_RUN_NONCE: nonce,
        names.ARGUS_ATTEMPT: attempt,
        names.ARGUS_ROLE: role,
        names.DL_RANK: rank,
        names.DL_WORLD_SIZE: world_size,
        names.DL_LOCAL_RANK: rank % 8,
        **more,
    }


def example_digest(
    ordinal: int,
    rank: int,
    *,
    start_ns: int = 1_800_000_000_000_000_000,
    buckets: int = 3,
    ranks: str = "0-3",
    **changes: Any,  # noqa: ANN401 - any field of a digest
) -> StepDigest:
    """A plain data-parallel step of 60 ms, one every 100 ms: ``buckets`` all_reduces in backward.

    Args:
        ordinal: The step.
        rank: Its rank; each arrives a little later than the one before, all end together.
        start_ns: Of step 0.
        buckets: Collectives a step.
        ranks: Members of the one group, as the digest writes them.
        changes: Fields of the digest to replace.
    """
    begin_ns = start_ns + ordinal * 100_000_000
    bucket = np.arange(buckets, dtype=np.int64)
    arrival_us = 20_000 + bucket * 5_000 + rank * 100
    digest = StepDigest(
        ordinal=ordinal,
        rank=rank,
        start_ns=begin_ns,
        end_ns=begin_ns + 60_000_000,
        between_s=0.002,
        end_rule="optimizer",
        iteration=1000 + ordinal,
        busy_s=0.04 + rank * 0.001,
        cpu_s=0.039,
        data_wait_s=0.001,
        phases=PhaseColumns(
            name=np.array([0, 2, 3, 4], np.int64),
            start_us=np.array([0, 1_000, 20_000, 55_000], np.int64),
            duration_us=np.array([1_000, 19_000, 35_000, 5_000], np.int64),
        ),
        sync=SyncColumns(
            group_keys=np.array([GROUP], np.uint64),
            start_counts=np.array([ordinal * buckets], np.int64),
            group=np.zeros(buckets, np.int64),
            op=np.full(buckets, OPS.index("all_reduce"), np.int64),
            payload_bytes=np.full(buckets, 1 << 20, np.int64),
            peer=np.full(buckets, -1, np.int64),
            phase=np.full(buckets, PHASES.index("backward"), np.int64),
            arrival_us=arrival_us,
            duration_us=np.maximum(22_000 + bucket * 5_000 - arrival_us, 0),
        ),
        group_info=(f"{GROUP:016x}|default_pg|{ranks}",) if ordinal == 0 else (),
    )
    return replace(digest, **changes)


def digest_request(
    digests: Sequence[StepDigest], resource: Mapping[str, Any]
) -> ExportTraceServiceRequest:
    """One rank's export: each digest as ``rank.step``, and on rank 0 the root above it."""
    request = ExportTraceServiceRequest()
    scope = add_scope(request, resource, scopes.DIGEST)
    for digest, attributes in zip(digests, encode_digests(digests), strict=True):
        trace_id = trace_of(digest.ordinal, digest.rank, resource)
        root_id = ids.span_id(trace_id, ids.ROOT, 0)
        times = (digest.start_ns, digest.end_ns)
        if digest.rank == 0:
            root = {names.ARGUS_STEP_ORDINAL: digest.ordinal}
            add_span(scope, names.SPAN_TRAIN_STEP, trace_id, root_id, times, attributes=root)
        span_id = ids.span_id(trace_id, ids.RANK_STEP, digest.rank)
        add_span(
            scope, names.SPAN_RANK_STEP, trace_id, span_id, times, root_id, attributes=attributes
        )
    return request


def trace_of(ordinal: int, rank: int, resource: Mapping[str, Any]) -> bytes:
    """The trace that a rank's spans of a step belong to."""
    nonce = bytes.fromhex(resource[names.ARGUS_RUN_NONCE])
    return ids.step_trace_id(nonce, resource[names.ARGUS_ATTEMPT], ordinal, ids.shard_of(rank))


def add_scope(
    request: ExportTraceServiceRequest, resource: Mapping[str, Any], scope: str
) -> ScopeSpans:
    """Start a resource and scope to put spans under."""
    resource_spans: ResourceSpans = request.resource_spans.add()
    resource_spans.resource.attributes.extend(_pairs(resource.items()))
    scope_spans: ScopeSpans = resource_spans.scope_spans.add()
    scope_spans.scope.name = scope
    return scope_spans


def add_span(
    scope: ScopeSpans,
    name: str,
    trace_id: bytes,
    span_id: bytes,
    times_ns: tuple[int, int],
    parent_id: bytes = b"",
    *,
    attributes: Mapping[str, Any],
) -> None:
    """Put one span under a scope."""
    span = scope.spans.add(
        name=name,
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent_id,
        start_time_unix_nano=times_ns[0],
        end_time_unix_nano=times_ns[1],
    )
    span.attributes.extend(_pairs(attributes.items()))


def _pairs(items: Iterable[tuple[str, Any]]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in items]


def _value(value: Any) -> AnyValue:  # noqa: ANN401 - attribute values of any OTLP type
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(item) for item in value]))
