"""A received span in one form, whichever backend and encoding it came through."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from argus_otel.semconv import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

MAX_INT32: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1

_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=True
)

STATUS: Final = ("unset", "ok", "error")
"""Names of OTLP's status codes 0, 1, 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which process of which run sent a span, from the resource. None means not said."""

    service: str
    run: str | None
    """Nonce in hex, lower case; None where the sender is no argus process."""
    run_id: str
    attempt: int
    role: str
    rank: int | None
    world_size: int | None
    host: str
    local_rank: int | None = None
    pid: int | None = None
    gpu: str | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    cp: int | None = None
    nonce_local: bool = False


@dataclass(slots=True, kw_only=True)
class Span:
    """One span. Ids are lower-case hex; times are Unix nanoseconds that fit 63 bits."""

    origin: Origin
    scope: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    status: str = "unset"
    status_message: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rank(self) -> int | None:
        """The sender's rank, by its resource or else by the span itself."""
        if self.origin.rank is not None:
            return self.origin.rank
        return whole(self.attributes.get(names.DL_RANK), MAX_INT32)

    @property
    def ordinal(self) -> int | None:
        """The step that the span says it belongs to; most leave that to their trace id."""
        value = self.attributes.get(names.ARGUS_STEP_ORDINAL)
        return None if value is None else whole(value, MAX_INT64)


def read_origin(resource: Mapping[str, Any]) -> Origin:
    """Take a process's identity off its resource attributes."""

    def text(name: str, default: str) -> str:
        value = resource.get(name)
        return default if value is None or value == "" else str(value)

    def small(name: str) -> int | None:
        return whole(resource.get(name), MAX_INT32)

    nonce = text(names.ARGUS_RUN_NONCE, "").lower()
    return Origin(
        service=text("service.name", "unknown_service"),
        run=nonce or None,
        run_id=text(names.ARGUS_RUN_ID, nonce or "unknown"),
        attempt=small(names.ARGUS_ATTEMPT) or 0,
        role=text(names.ARGUS_ROLE, "trainer"),
        rank=small(names.DL_RANK),
        world_size=small(names.DL_WORLD_SIZE),
        host=text("host.name", text("host.id", "unknown")),
        local_rank=small(names.DL_LOCAL_RANK),
        pid=whole(resource.get("process.pid"), MAX_INT64),
        gpu=text("hw.id", "") or None,
        dp=small(names.DL_DATA_PARALLEL_RANK),
        tp=small(names.DL_TENSOR_PARALLEL_RANK),
        pp=small(names.DL_PIPELINE_PARALLEL_RANK),
        ep=small(names.DL_EXPERT_PARALLEL_RANK),
        cp=small(names.DL_CONTEXT_PARALLEL_RANK),
        nonce_local=resource.get(names.ARGUS_RUN_NONCE_LOCAL) is True,
    )


def read_request(request: ExportTraceServiceRequest) -> Iterator[Span]:
    """Yield every span of a decoded OTLP request."""
    for resource_spans in request.resource_spans:
        origin = read_origin(_mapping(resource_spans.resource.attributes))
        for scope_spans in resource_spans.scope_spans:
            scope = scope_spans.scope.name
            for span in scope_spans.spans:
                yield _from_otlp(span, scope, origin)


def json_text(value: object) -> str:
    """Strict JSON, equal for equal values: keys sorted, for backends give them in any order.

    What JSON has no number for (NaN, infinity) becomes a string.
    """
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_finite(value))


def clamp_ns(value: int) -> int:
    """OTLP times are unsigned 64 bits, tables are signed; one absurd time must not cost a batch."""
    return min(value, MAX_INT64)


def whole(value: object, limit: int) -> int | None:
    """A whole number in 0..limit, or None: resources come from outside and may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= limit else None


def _from_otlp(span: OtlpSpan, scope: str, origin: Origin) -> Span:
    status = span.status.code
    return Span(
        origin=origin,
        scope=scope,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        start_ns=clamp_ns(span.start_time_unix_nano),
        end_ns=clamp_ns(span.end_time_unix_nano),
        status=STATUS[status] if status < len(STATUS) else STATUS[0],
        status_message=span.status.message or None,
        attributes=_mapping(span.attributes),
        events=[
            {
                "time_ns": event.time_unix_nano,
                "name": event.name,
                "attributes": _mapping(event.attributes),
            }
            for event in span.events
        ],
        links=[
            {
                "trace_id": link.trace_id.hex(),
                "span_id": link.span_id.hex(),
                "attributes": _mapping(link.attributes),
            }
            for link in span.links
        ],
    )


def _mapping(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> Any:  # noqa: ANN401 - OTLP's AnyValue is any value
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _mapping(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode("ascii")
    return getattr(value, kind)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
