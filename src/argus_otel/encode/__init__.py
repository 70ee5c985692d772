"""OTLP bytes without the SDK: spans, metrics, and the requests that carry them."""

from argus_otel.encode.metrics import Counter, Gauge, Histogram, encode_metrics_request
from argus_otel.encode.requests import EncodedSpans, encode_resource, encode_trace_requests
from argus_otel.encode.shaped import ShapedSpanEncoder
from argus_otel.encode.spans import encode_span
from argus_otel.encode.step_rows import StepRowsEncoder
from argus_otel.encode.templates import SpanTemplate
from argus_otel.encode.user_spans import encode_user_spans

__all__ = [
    "Counter",
    "EncodedSpans",
    "Gauge",
    "Histogram",
    "ShapedSpanEncoder",
    "SpanTemplate",
    "StepRowsEncoder",
    "encode_metrics_request",
    "encode_resource",
    "encode_span",
    "encode_trace_requests",
    "encode_user_spans",
]
