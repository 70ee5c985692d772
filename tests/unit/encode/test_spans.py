"""What the encoder refuses, and what it leaves out."""

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from argus_otel.encode import (
    SpanTemplate,
    encode_metrics_request,
    encode_span,
    encode_trace_requests,
)
from argus_otel.encode.user_spans import encode_user_spans
from argus_otel.wire import ids

TRACE_ID = bytes(range(1, 17))


def encode_two(template, **changes):
    arguments = {
        "trace_id": TRACE_ID,
        "span_id_N": np.array([1, 2], np.uint64),
        "parent_span_id": 0,
        "start_ns_N": np.array([1, 2]),
        "end_ns_N": np.array([3, 4]),
        "fields": {"n": [5, 6]},
    }
    return template.encode(**(arguments | changes))


@pytest.fixture
def template():
    return SpanTemplate("s", constants={}, fields={"n": "int"})


def test_a_forgotten_field_is_named(template):
    with pytest.raises(ValueError, match=r"s has fields \['n'\], got \['m'\]"):
        encode_two(template, fields={"m": [1, 2]})


def test_a_column_of_another_length_is_refused(template):
    with pytest.raises(ValueError, match=r"column n has shape \(3,\) for 2 spans"):
        encode_two(template, fields={"n": [1, 2, 3]})


def test_spans_without_a_trace_are_refused(template):
    with pytest.raises(ValueError, match="16 bytes"):
        encode_two(template, trace_id=b"")


def test_a_truncated_id_is_refused():
    with pytest.raises(ValueError, match="a span id 8"):
        encode_span(
            name="s",
            trace_id=TRACE_ID,
            span_id=b"1234567",
            parent_span_id=None,
            start_ns=0,
            end_ns=0,
            attributes={},
        )


def test_a_template_can_be_used_again(template):
    """Nothing of one batch may stay in the next one's rows."""
    first = encode_two(template)

    encode_two(template, parent_span_id=np.array([0, 9], np.uint64), fields={"n": [7, 8]})

    assert encode_two(template) == first


def test_every_span_of_a_batch_takes_the_same_bytes(template):
    data = encode_two(
        template,
        parent_span_id=np.array([0, 9], np.uint64),
        fields={"n": np.array([-1, 2**63 - 1])},
    )

    half = len(data) // 2
    assert data[:2] == data[half : half + 2]


def test_a_long_batch_is_whole_and_in_order(template):
    """Longer than the blocks that rows are filled in, with every kind of column."""
    count = 2500
    numbers = np.arange(count)

    data = encode_two(
        template,
        span_id_N=np.arange(1, count + 1, dtype=np.uint64),
        parent_span_id=np.arange(count, dtype=np.uint64),
        start_ns_N=numbers,
        end_ns_N=numbers + 1,
        fields={"n": numbers},
        trace_ids_N=np.repeat(numbers.astype("<u8"), 2).view(np.uint8).reshape(count, 16),
    )

    spans = ScopeSpans.FromString(data).spans
    read = [
        (
            int.from_bytes(span.trace_id[8:], "little"),
            int.from_bytes(span.span_id, "little"),
            int.from_bytes(span.parent_span_id, "little"),
            span.start_time_unix_nano,
            span.attributes[0].value.int_value,
        )
        for span in spans
    ]
    assert read == [(n, n + 1, n, n, n) for n in range(count)]


def test_a_hashed_id_and_a_word_of_its_bytes_are_one_id(template):
    """Children in a batch must find the parent whose id came as bytes."""
    span_id = ids.span_id(TRACE_ID, ids.RANK_STEP, 0)
    word = np.frombuffer(span_id, "<u8")

    data = encode_two(template, parent_span_id=word[0])

    assert data.count(span_id) == 2


def test_nothing_to_send_makes_no_request():
    assert list(encode_trace_requests(b"", {"a": []})) == []
    assert encode_metrics_request(b"", []) == (b"", 0)


def test_spans_of_the_sdk_keep_what_ours_do_not_have():
    """Events and scope names of the user's own spans go through the SDK's encoder."""
    finished = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(finished))
    with provider.get_tracer("user.code").start_as_current_span("mine") as span:
        span.add_event("loaded")

    body, count = encode_user_spans(finished.get_finished_spans())

    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (scope_spans,) = resource_spans.scope_spans
    assert count == 1
    assert scope_spans.scope.name == "user.code"
    assert [event.name for event in scope_spans.spans[0].events] == ["loaded"]
