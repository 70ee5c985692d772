"""OTLP requests as a training job would send them, from digests; for tests of what receives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from argus_otel.semconv import names
from argus_otel.wire import ids, scopes
from argus_otel.wire.digest import encode_digests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

    from argus_otel.wire.digest import StepDigest

NONCE = "9f2c41d6a0b35e77"


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
