"""What arrived, as plain values that a test can compare with what it expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opentelemetry.proto.common.v1 import common_pb2
    from opentelemetry.proto.metrics.v1 import metrics_pb2

AttributeValue: TypeAlias = (
    "str | int | float | bool | bytes | list[AttributeValue] | dict[str, AttributeValue] | None"
)

_STATUS: Final = ("unset", "ok", "error")
_TEMPORALITY: Final = ("unspecified", "delta", "cumulative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedLink:
    """A link from one span to another."""

    trace_id: bytes
    span_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """One span as it came over the wire."""

    name: str
    scope: str
    resource: dict[str, AttributeValue]
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes | None
    """None for a root."""
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    status: str
    """``unset``, ``ok`` or ``error``."""
    status_message: str
    links: tuple[ReceivedLink, ...]
    kind: int
    """OTLP SpanKind; 1 is internal."""
    flags: int
    schema_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPoint:
    """One data point; the histogram's fields are empty for the other kinds."""

    attributes: dict[str, AttributeValue]
    start_ns: int
    time_ns: int
    value: float | int
    """The sum of all observations for a histogram."""
    count: int = 0
    bucket_counts: tuple[int, ...] = ()
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMetric:
    """One metric of one request."""

    name: str
    scope: str
    resource: dict[str, AttributeValue]
    kind: str
    """``gauge``, ``sum`` or ``histogram``."""
    unit: str
    description: str
    temporality: str
    """``cumulative``, ``delta`` or, for gauges, ``unspecified``."""
    monotonic: bool
    points: tuple[ReceivedPoint, ...]


def read_trace_request(body: bytes) -> list[ReceivedSpan]:
    """Spans of an uncompressed ExportTraceServiceRequest."""
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
    spans = []
    for resource_spans in request.resource_spans:
        resource = read_attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            spans += [
                ReceivedSpan(
                    name=span.name,
                    scope=scope_spans.scope.name,
                    resource=resource,
                    trace_id=span.trace_id,
                    span_id=span.span_id,
                    parent_span_id=span.parent_span_id or None,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=read_attributes(span.attributes),
                    status=_STATUS[span.status.code],
                    status_message=span.status.message,
                    links=tuple(
                        ReceivedLink(trace_id=link.trace_id, span_id=link.span_id)
                        for link in span.links
                    ),
                    kind=span.kind,
                    flags=span.flags,
                    schema_url=scope_spans.schema_url,
                )
                for span in scope_spans.spans
            ]
    return spans


def read_metrics_request(body: bytes) -> list[ReceivedMetric]:
    """Metrics of an uncompressed ExportMetricsServiceRequest."""
    request = metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
    metrics = []
    for resource_metrics in request.resource_metrics:
        resource = read_attributes(resource_metrics.resource.attributes)
        for scope_metrics in resource_metrics.scope_metrics:
            for metric in scope_metrics.metrics:
                kind = metric.WhichOneof("data") or "none"
                metrics.append(
                    ReceivedMetric(
                        name=metric.name,
                        scope=scope_metrics.scope.name,
                        resource=resource,
                        kind=kind,
                        unit=metric.unit,
                        description=metric.description,
                        temporality=_temporality(metric, kind),
                        monotonic=metric.sum.is_monotonic,
                        points=tuple(_points(metric, kind)),
                    )
                )
    return metrics


def read_attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, AttributeValue]:
    """Attributes as a dictionary of Python values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return read_attributes(value.kvlist_value.values)
    plain: AttributeValue = getattr(value, kind)
    return plain


def _temporality(metric: metrics_pb2.Metric, kind: str) -> str:
    if kind == "sum":
        return _TEMPORALITY[metric.sum.aggregation_temporality]
    if kind == "histogram":
        return _TEMPORALITY[metric.histogram.aggregation_temporality]
    return _TEMPORALITY[0]


def _points(metric: metrics_pb2.Metric, kind: str) -> Iterator[ReceivedPoint]:
    if kind == "histogram":
        for bucketed in metric.histogram.data_points:
            yield ReceivedPoint(
                attributes=read_attributes(bucketed.attributes),
                start_ns=bucketed.start_time_unix_nano,
                time_ns=bucketed.time_unix_nano,
                value=bucketed.sum,
                count=bucketed.count,
                bucket_counts=tuple(bucketed.bucket_counts),
                bounds=tuple(bucketed.explicit_bounds),
            )
        return
    if kind not in {"sum", "gauge"}:
        return
    for point in metric.sum.data_points if kind == "sum" else metric.gauge.data_points:
        yield ReceivedPoint(
            attributes=read_attributes(point.attributes),
            start_ns=point.start_time_unix_nano,
            time_ns=point.time_unix_nano,
            value=point.as_int if point.WhichOneof("value") == "as_int" else point.as_double,
        )
