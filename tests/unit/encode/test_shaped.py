"""Spans of known shapes, read by OpenTelemetry's own protobuf classes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from argus_otel.encode import ShapedSpanEncoder, shaped
from argus_otel.wire.spans import ShapedSpan, SpanShape

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)
int64s = st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1))
times_ns = st.integers(0, 2**64 - 1)
ids_8 = st.binary(min_size=8, max_size=8)
ids_16 = st.binary(min_size=16, max_size=16)


@st.composite
def shapes(draw):
    keys = draw(st.lists(names, unique=True, max_size=7))
    ints, doubles = sorted(draw(st.tuples(*[st.integers(0, len(keys))] * 2)))
    constant = st.one_of(names, int64s, st.floats(allow_nan=False), st.booleans())
    return SpanShape(
        scope=draw(st.sampled_from(["timeline", "detail"])),
        name=draw(names),
        constants={key: draw(constant) for key in keys[doubles:]},
        ints=tuple(keys[:ints]),
        doubles=tuple(keys[ints:doubles]),
    )


@st.composite
def spans_of(draw, shape):
    return ShapedSpan(
        shape,
        draw(ids_16),
        draw(ids_8),
        draw(st.one_of(st.just(bytes(8)), ids_8)),
        draw(times_ns),
        draw(times_ns),
        (
            *[draw(int64s) for _ in shape.ints],
            *[draw(st.floats(allow_nan=False)) for _ in shape.doubles],
        ),
    )


@st.composite
def some_spans(draw):
    """A few spans of a few shapes, mixed."""
    known = draw(st.lists(shapes(), min_size=1, max_size=4))
    return draw(st.lists(st.sampled_from(known).flatmap(spans_of), max_size=12))


def any_value(value):
    kind = {str: "string", bool: "bool", int: "int", float: "double"}[type(value)]
    return AnyValue(**{f"{kind}_value": value})


def reference(span):
    shape = span.shape
    varying = zip((*shape.ints, *shape.doubles), span.values, strict=True)
    attributes = [*shape.constants.items(), *varying]
    return Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id if any(span.parent_id) else b"",
        name=shape.name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=[KeyValue(key=key, value=any_value(value)) for key, value in attributes],
        flags=0x103,
    )


def span_of(shape, *values):
    return ShapedSpan(shape, b"t" * 16, b"s" * 8, b"p" * 8, 1, 2, values)


def read(encoded):
    return list(ScopeSpans.FromString(encoded.data).spans)


@given(some_spans())
def test_shaped_spans_are_what_protobuf_makes_of_them(spans):
    """In order, counted; roots without a parent."""
    encoded = ShapedSpanEncoder().encode(spans)

    assert read(encoded) == [reference(span) for span in spans]
    assert encoded.count == len(spans)


@given(some_spans())
def test_what_is_known_of_a_shape_changes_nothing(spans):
    """A second batch, and one span at a time, give the same bytes."""
    encoder = ShapedSpanEncoder()
    first = encoder.encode(spans)

    again = encoder.encode(spans)
    alone = [encoder.encode([span]).data for span in spans]

    assert again == first
    assert b"".join(alone) == first.data


def test_shapes_are_not_hoarded():
    """A job whose shapes never recur would fill memory that is the user's."""
    encoder = ShapedSpanEncoder()
    for n in range(2000):
        shape = SpanShape(scope="s", name=f"phase {n}", constants={})
        encoder.encode([span_of(shape)])

    assert len(encoder._layouts) <= shaped._MAX_SHAPES


def test_values_are_not_hoarded():
    """Those of a counter never come again."""
    encoder = ShapedSpanEncoder()
    shape = SpanShape(scope="s", name="x", constants={}, ints=("n",))
    spans = [span_of(shape, n) for n in range(1000)]

    assert read(encoder.encode(spans)) == [reference(span) for span in spans]
    assert [len(known) for _, known in encoder._layouts[shape]._fields] == [
        shaped._MAX_KNOWN_VALUES
    ]


@pytest.mark.parametrize("values", [(), (1,), (1, 2), (1, 2, 3.0, 4.0)])
def test_a_span_with_too_few_or_too_many_values_is_refused(values):
    """Rather than sent with another attribute's value."""
    shape = SpanShape(scope="s", name="x", constants={}, ints=("a", "b"), doubles=("c",))

    with pytest.raises(ValueError, match=rf"x has 3 values, got {len(values)}"):
        ShapedSpanEncoder().encode([span_of(shape, *values)])


def test_a_value_for_a_shape_that_has_none_is_refused():
    """For the same reason."""
    with pytest.raises(ValueError, match="x has 0 values, got 1"):
        ShapedSpanEncoder().encode([span_of(SpanShape(scope="s", name="x", constants={}), 1)])
