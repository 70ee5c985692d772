"""The same spans made in two ways: by our encoder, and by the OpenTelemetry SDK.

A kernel-like span: a name of 100 characters and 8 attributes (2 texts, 4 integers, 2 doubles).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from argus_otel.encode import EncodedSpans, SpanTemplate, encode_resource, encode_trace_requests
from argus_otel.wire import ids

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span

NAME = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn_epilogue_bias_gelu_aux_".ljust(
    100, "x"
)
TEXTS = {"argus.phase": "forward", "gpu.stream": "compute"}
INTEGERS = (
    "argus.collective.seq",
    "argus.collective.size",
    "argus.fold.count",
    "argus.correlation",
)
DOUBLES = ("argus.fold.duration", "argus.occupancy")
RESOURCE = {"service.name": "trainer", "host.name": "node-17", "dl.rank": 3}

_EPOCH_NS = 1_750_000_000_000_000_000


class KernelColumns:
    """What a recorder would hand over: numbers of ``count`` kernels, as columns."""

    def __init__(self, count: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.count = count
        self.start_ns = _EPOCH_NS + np.cumsum(random.integers(1_000, 100_000, count))
        self.end_ns = self.start_ns + random.integers(1_000, 90_000, count)
        self.fields: dict[str, np.ndarray] = {
            **{name: random.integers(0, 1 << 24, count) for name in INTEGERS},
            **{name: random.random(count) for name in DOUBLES},
        }


class OurMaker:
    """Ids, template rows, and the request around them."""

    def __init__(self) -> None:
        self._resource = encode_resource(RESOURCE)
        self._template = SpanTemplate(
            NAME,
            constants=TEXTS,
            fields=dict.fromkeys(INTEGERS, "int") | dict.fromkeys(DOUBLES, "double"),
        )
        self._trace_id = ids.step_trace_id(b"nonce", 0, 1, 0)
        self._parent = np.frombuffer(ids.span_id(self._trace_id, ids.RANK_STEP, 3), "<u8")[0]

    def __call__(self, columns: KernelColumns) -> list[bytes]:
        """Request bodies."""
        data = self._template.encode(
            trace_id=self._trace_id,
            span_id_N=np.frombuffer(
                ids.span_ids(self._trace_id, ids.DETAIL, 3, columns.count), dtype="<u8"
            ),
            parent_span_id=self._parent,
            start_ns_N=columns.start_ns,
            end_ns_N=columns.end_ns,
            fields=columns.fields,
        )
        spans = EncodedSpans(data, columns.count)
        requests = encode_trace_requests(self._resource, {"argus_otel.detail": [spans]})
        return [body for body, _ in requests]


class _Keep(SpanProcessor):
    """Keeps ended spans, which costs less than any processor that people use."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


class SdkMaker:
    """Create, end and encode, each span by itself, as code against the SDK does."""

    def __init__(self) -> None:
        provider = TracerProvider(resource=Resource(RESOURCE), shutdown_on_exit=False)
        self._keep = _Keep()
        provider.add_span_processor(self._keep)
        self._tracer = provider.get_tracer("argus_otel.detail")

    def __call__(self, columns: KernelColumns) -> list[bytes]:
        """Request bodies."""
        start_ns, end_ns = columns.start_ns.tolist(), columns.end_ns.tolist()
        rows = zip(*(column.tolist() for column in columns.fields.values()), strict=True)
        names = tuple(columns.fields)
        for index, row in enumerate(rows):
            attributes = {**TEXTS, **dict(zip(names, row, strict=True))}
            span = self._tracer.start_span(NAME, attributes=attributes, start_time=start_ns[index])
            span.end(end_ns[index])
        ended, self._keep.ended = self._keep.ended, []
        return [encode_spans(ended).SerializeToString()]
