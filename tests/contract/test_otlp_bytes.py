"""Everything the encoder emits, read by OpenTelemetry's own protobuf classes.

The references are built by hand from the classes of opentelemetry-proto, so that a difference is
a difference to the OTLP schema and not to a second encoder of ours.
"""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from argus_otel.encode import (
    Counter,
    EncodedSpans,
    Gauge,
    Histogram,
    SpanTemplate,
    encode_metrics_request,
    encode_resource,
    encode_span,
    encode_trace_requests,
)
from argus_otel.semconv.names import SCHEMA_URL

TRACE_ID = bytes(range(1, 17))
SAMPLED_RANDOM_LOCAL = 0x103
SAMPLED_RANDOM_REMOTE = 0x303

# What protobuf's own text can hold: no lone surrogates.
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
span_ids = st.integers(1, 2**64 - 1)
times_ns = st.integers(0, 2**64 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
plain_values = st.one_of(names, int64s, st.floats(), st.booleans())
any_values = st.one_of(plain_values, st.lists(names, max_size=5), st.lists(int64s, max_size=5))


def any_value(value):
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))


def key_values(attributes):
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def read_spans(data):
    return list(ScopeSpans.FromString(data).spans)


def canonical(message):
    """Bytes in one fixed form: NaN, which equals nothing, compares too."""
    return message.SerializeToString(deterministic=True)


def span_bytes(span_id):
    return struct.pack("<Q", span_id)


@st.composite
def batches(draw):
    """A template and the columns to fill it with."""
    kinds = {"int": int64s, "double": st.floats(), "bool": st.booleans()}
    fields = draw(st.dictionaries(names, st.sampled_from(sorted(kinds)), max_size=5))
    constants = draw(st.dictionaries(names.filter(lambda key: key not in fields), plain_values))
    n = draw(st.integers(0, 6))

    def column(values, dtype):
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype=dtype)

    dtypes = {"int": np.int64, "double": np.float64, "bool": np.bool_}
    parents = st.one_of(st.just(0), span_ids)
    return {
        "name": draw(names),
        "constants": constants,
        "fields": fields,
        "kind": draw(st.integers(0, 5)),
        "span_id_N": column(span_ids, np.uint64),
        "parent": draw(st.one_of(parents, st.just(column(parents, np.uint64)))),
        "start_ns_N": column(times_ns, np.uint64),
        "end_ns_N": column(times_ns, np.uint64),
        "columns": {key: column(kinds[kind], dtypes[kind]) for key, kind in fields.items()},
        "trace_ids_N": draw(
            st.sampled_from([None, column(st.binary(min_size=16, max_size=16), "S16")])
        ),
    }


@given(batches())
def test_a_template_gives_what_protobuf_gives_for_the_same_spans(batch):
    n = batch["span_id_N"].size
    trace_ids_N = batch["trace_ids_N"]
    if trace_ids_N is not None:
        trace_ids_N = np.frombuffer(trace_ids_N.tobytes(), np.uint8).reshape(n, 16)
    template = SpanTemplate(
        batch["name"], constants=batch["constants"], fields=batch["fields"], kind=batch["kind"]
    )

    data = template.encode(
        trace_id=TRACE_ID,
        span_id_N=batch["span_id_N"],
        parent_span_id=batch["parent"],
        start_ns_N=batch["start_ns_N"],
        end_ns_N=batch["end_ns_N"],
        fields=batch["columns"],
        trace_ids_N=trace_ids_N,
    )

    parents = np.broadcast_to(np.asarray(batch["parent"], np.uint64), n).tolist()
    expected = [
        Span(
            trace_id=TRACE_ID if trace_ids_N is None else trace_ids_N[i].tobytes(),
            span_id=span_bytes(int(batch["span_id_N"][i])),
            parent_span_id=span_bytes(parents[i]) if parents[i] else b"",
            name=batch["name"],
            kind=batch["kind"],
            start_time_unix_nano=int(batch["start_ns_N"][i]),
            end_time_unix_nano=int(batch["end_ns_N"][i]),
            attributes=key_values(
                batch["constants"]
                | {key: column[i].item() for key, column in batch["columns"].items()}
            ),
            flags=SAMPLED_RANDOM_LOCAL,
        )
        for i in range(n)
    ]
    assert list(map(canonical, read_spans(data))) == list(map(canonical, expected))


@given(
    name=names,
    ids=st.tuples(span_ids, st.one_of(st.none(), span_ids)),
    start_ns=times_ns,
    end_ns=times_ns,
    attributes=st.dictionaries(names, any_values, max_size=8),
    links=st.lists(st.tuples(st.binary(min_size=16, max_size=16), span_ids), max_size=3),
    error=st.one_of(st.none(), names),
    remote=st.booleans(),
)
def test_a_single_span_gives_what_protobuf_gives(
    name, ids, start_ns, end_ns, attributes, links, error, remote
):
    span_id, parent = ids

    data = encode_span(
        name=name,
        trace_id=TRACE_ID,
        span_id=span_bytes(span_id),
        parent_span_id=None if parent is None else span_bytes(parent),
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=attributes,
        links=[(trace, span_bytes(linked)) for trace, linked in links],
        error=error,
        parent_is_remote=remote,
    )

    expected = Span(
        trace_id=TRACE_ID,
        span_id=span_bytes(span_id),
        parent_span_id=b"" if parent is None else span_bytes(parent),
        name=name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=end_ns,
        attributes=key_values(attributes),
        links=[Span.Link(trace_id=trace, span_id=span_bytes(linked)) for trace, linked in links],
        flags=SAMPLED_RANDOM_REMOTE if remote else SAMPLED_RANDOM_LOCAL,
    )
    if error is not None:
        expected.status.CopyFrom(Status(message=error, code=Status.STATUS_CODE_ERROR))
    assert list(map(canonical, read_spans(data))) == [canonical(expected)]


def numbered_spans(count, *, name="s"):
    template = SpanTemplate(name, constants={}, fields={"n": "int"})
    data = template.encode(
        trace_id=TRACE_ID,
        span_id_N=np.arange(1, count + 1, dtype=np.uint64),
        parent_span_id=0,
        start_ns_N=np.zeros(count, np.int64),
        end_ns_N=np.zeros(count, np.int64),
        fields={"n": np.arange(count)},
    )
    return EncodedSpans(data, count)


def ragged_spans(count):
    """The same numbers in spans of different lengths, as digests have."""
    spans = [
        encode_span(
            name="s" * (n % 7),
            trace_id=TRACE_ID,
            span_id=span_bytes(n + 1),
            parent_span_id=None,
            start_ns=0,
            end_ns=0,
            attributes={"n": n},
        )
        for n in range(count)
    ]
    return EncodedSpans(b"".join(spans), count)


def test_a_request_carries_resource_scopes_and_schema():
    resource = {"service.name": "trainer", "dl.rank": 3, "process.pids": [1, 2]}

    bodies = list(
        encode_trace_requests(
            encode_resource(resource),
            {"a": [numbered_spans(1), numbered_spans(2)], "none": [], "b": [numbered_spans(1)]},
            scope_version="0.1",
        )
    )

    def scope_spans(name, *batches):
        spans = [span for batch in batches for span in read_spans(batch.data)]
        scope = InstrumentationScope(name=name, version="0.1")
        return ScopeSpans(scope=scope, spans=spans, schema_url=SCHEMA_URL)

    expected = ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=key_values(resource)),
                scope_spans=[
                    scope_spans("a", numbered_spans(1), numbered_spans(2)),
                    scope_spans("b", numbered_spans(1)),
                ],
                schema_url=SCHEMA_URL,
            )
        ]
    )
    assert [(ExportTraceServiceRequest.FromString(body), n) for body, n in bodies] == [
        (expected, 4)
    ]


@given(
    counts=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 40),
            st.sampled_from([numbered_spans, ragged_spans]),
        ),
        max_size=8,
    ),
    max_bytes=st.integers(1, 4000),
)
def test_bodies_stay_under_the_limit_and_lose_no_span(counts, max_bytes):
    """Only a body of one single span may be longer than the limit."""
    scopes = {"a": [], "b": []}
    for scope, count, make in counts:
        scopes[scope].append(make(count))
    total = sum(count for _, count, _ in counts)

    bodies = list(encode_trace_requests(encode_resource({"k": "v"}), scopes, max_bytes=max_bytes))

    assert all(len(body) <= max_bytes or count == 1 for body, count in bodies)
    read = [ExportTraceServiceRequest.FromString(body) for body, _ in bodies]
    order = []
    for request, (_, count) in zip(read, bodies, strict=True):
        in_body = [
            (scope_spans.scope.name, span.attributes[0].value.int_value)
            for scope_spans in request.resource_spans[0].scope_spans
            for span in scope_spans.spans
        ]
        assert len(in_body) == count > 0
        order += in_body
    assert len(order) == total
    assert order == [
        (scope, n)
        for scope, batches in scopes.items()
        for batch in batches
        for n in range(batch.count)
    ]


def test_full_size_bodies_are_filled_well():
    """A limit that is kept by sending many half-empty bodies would double the posts."""
    spans = numbered_spans(30_000, name="x" * 80)

    bodies = list(encode_trace_requests(b"", {"a": [spans]}))

    assert len(bodies) == math.ceil(len(spans.data) / 3_000_000)


def test_metrics_carry_unit_start_and_temporality():
    points = [
        Counter(name="steps", unit="{step}", value=7, start_ns=10, time_ns=20),
        Counter(name="drops", unit="1", value=2, start_ns=10, time_ns=20, attributes={"c": "full"}),
        Counter(name="drops", unit="1", value=1, start_ns=10, time_ns=20, attributes={"c": "net"}),
        Counter(name="cpu", unit="s", value=0.5, start_ns=10, time_ns=20),
        Gauge(name="queue", unit="By", value=np.int64(-3), time_ns=20),
        Histogram(
            name="step",
            unit="s",
            bounds=(0.1, 1.0),
            bucket_counts=np.array([1, 0, 2]),
            sum=4.5,
            start_ns=10,
            time_ns=20,
            attributes={"role": "trainer"},
        ),
    ]

    body, count = encode_metrics_request(encode_resource({"dl.rank": 1}), points)

    def number(value, start_ns, **attributes):
        kind = "as_int" if isinstance(value, int) else "as_double"
        return metrics_pb2.NumberDataPoint(
            **{kind: value},
            start_time_unix_nano=start_ns,
            time_unix_nano=20,
            attributes=key_values(attributes),
        )

    def total(*data_points):
        return metrics_pb2.Sum(
            data_points=data_points,
            is_monotonic=True,
            aggregation_temporality=metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE,
        )

    histogram = metrics_pb2.Histogram(
        data_points=[
            metrics_pb2.HistogramDataPoint(
                start_time_unix_nano=10,
                time_unix_nano=20,
                count=3,
                sum=4.5,
                bucket_counts=[1, 0, 2],
                explicit_bounds=[0.1, 1.0],
                attributes=key_values({"role": "trainer"}),
            )
        ],
        aggregation_temporality=metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE,
    )
    expected = metrics_pb2.ResourceMetrics(
        resource=Resource(attributes=key_values({"dl.rank": 1})),
        scope_metrics=[
            metrics_pb2.ScopeMetrics(
                scope=InstrumentationScope(name="argus_otel.metrics"),
                metrics=[
                    metrics_pb2.Metric(name="steps", unit="{step}", sum=total(number(7, 10))),
                    metrics_pb2.Metric(
                        name="drops",
                        unit="1",
                        sum=total(number(2, 10, c="full"), number(1, 10, c="net")),
                    ),
                    metrics_pb2.Metric(name="cpu", unit="s", sum=total(number(0.5, 10))),
                    metrics_pb2.Metric(
                        name="queue",
                        unit="By",
                        gauge=metrics_pb2.Gauge(data_points=[number(-3, 0)]),
                    ),
                    metrics_pb2.Metric(name="step", unit="s", histogram=histogram),
                ],
                schema_url=SCHEMA_URL,
            )
        ],
        schema_url=SCHEMA_URL,
    )
    request = ExportMetricsServiceRequest.FromString(body)
    assert request == ExportMetricsServiceRequest(resource_metrics=[expected])
    assert count == 6


@given(plain_values)
def test_an_attribute_value_keeps_its_type(value):
    body = encode_resource({"k": value})

    assert canonical(Resource.FromString(body)) == canonical(
        Resource(attributes=key_values({"k": value}))
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int32(-4), -4),
        (np.bool_(1), True),
        (np.array([1, 2]), [1, 2]),
        (("a", "b"), ["a", "b"]),
        ("broken \ud800 name", "broken ? name"),
        (None, "None"),
    ],
)
def test_values_that_python_code_hands_in_by_accident_still_parse(value, expected):
    body = encode_resource({"k": value})

    assert Resource.FromString(body) == Resource(attributes=key_values({"k": expected}))
