"""Metrics as OTLP bytes: a dozen series a rank, cumulative, so that a lost request costs nothing."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from argus_otel.encode.protobuf import attributes as encode_attributes
from argus_otel.encode.protobuf import double, fixed64, message, text
from argus_otel.encode.requests import encode_scope
from argus_otel.semconv.names import SCHEMA_URL
from argus_otel.wire import scopes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from argus_otel.encode.protobuf import AttributeValue

_CUMULATIVE: Final = b"\x10\x02"  # aggregation_temporality, field 2 of Sum and Histogram
_MONOTONIC: Final = b"\x18\x01"  # is_monotonic, field 3 of Sum

# Field numbers in Metric.
_GAUGE, _SUM, _HISTOGRAM = 5, 7, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A total since ``start_ns`` that never falls."""

    name: str
    unit: str
    """UCUM."""
    value: float
    start_ns: int
    """Unix nanoseconds at which the total was 0; the same until the process ends."""
    time_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A value as it stands at ``time_ns``."""

    name: str
    unit: str
    value: float
    time_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts per bucket since ``start_ns``."""

    name: str
    unit: str
    bounds: Sequence[float]
    """Upper bounds (inclusive) of all buckets but the last, which has none; shape [B]."""
    bucket_counts: Sequence[int]
    """Shape [B + 1]."""
    sum: float
    """Of all values seen."""
    start_ns: int
    time_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


def encode_metrics_request(
    resource: bytes,
    points: Iterable[Counter | Gauge | Histogram],
    *,
    scope: str = scopes.METRICS,
    scope_version: str = "",
) -> tuple[bytes, int]:
    """Body of an ExportMetricsServiceRequest, and the number of its data points.

    Points that share kind, name and unit become one metric. Without points the body is empty.

    Args:
        resource: From ``encode_resource``.
        points: In any order.
        scope: Instrumentation scope.
        scope_version: Version of the instrumentation.

    Raises:
        ValueError: A histogram does not have one more count than bounds: a bug of the caller's.
    """
    metrics: dict[tuple[type, str, str], list[bytes]] = {}
    count = 0
    for point in points:
        series = metrics.setdefault((type(point), point.name, point.unit), [])
        series.append(message(1, _point(point)))
        count += 1
    if not count:
        return b"", 0
    encoded = [
        message(2, message(1, text(name)) + message(3, text(unit)) + _data(kind, b"".join(series)))
        for (kind, name, unit), series in metrics.items()
    ]
    schema = message(3, text(SCHEMA_URL))
    scope_metrics = b"".join((encode_scope(scope, scope_version), *encoded, schema))
    body = message(1, message(1, resource) + message(2, scope_metrics) + schema)
    return body, count


def _data(kind: type, data_points: bytes) -> bytes:
    if kind is Counter:
        return message(_SUM, data_points + _CUMULATIVE + _MONOTONIC)
    if kind is Gauge:
        return message(_GAUGE, data_points)
    return message(_HISTOGRAM, data_points + _CUMULATIVE)


def _point(point: Counter | Gauge | Histogram) -> bytes:
    if isinstance(point, Histogram):
        return _histogram_point(point)
    start = fixed64(2, point.start_ns) if isinstance(point, Counter) else b""
    # Counters and gauges may hold numpy's integers and doubles as well as Python's.
    whole = hasattr(point.value, "__index__")
    value = fixed64(6, int(point.value)) if whole else double(4, point.value)
    return start + fixed64(3, point.time_ns) + value + encode_attributes(7, point.attributes)


def _histogram_point(point: Histogram) -> bytes:
    counts = [int(count) for count in point.bucket_counts]
    if len(counts) != len(point.bounds) + 1:
        msg = f"{point.name} has {len(point.bounds)} bounds and {len(counts)} counts"
        raise ValueError(msg)
    return b"".join(
        (
            fixed64(2, point.start_ns),
            fixed64(3, point.time_ns),
            fixed64(4, sum(counts)),
            double(5, point.sum),
            message(6, struct.pack(f"<{len(counts)}Q", *counts)),
            message(7, struct.pack(f"<{len(point.bounds)}d", *point.bounds)),
            encode_attributes(9, point.attributes),
        )
    )
