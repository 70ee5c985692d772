"""Steps of one shape, read by OpenTelemetry's own protobuf classes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from argus_otel.encode import StepRowsEncoder, step_rows
from argus_otel.wire.spans import SpanShape, StepRows, StepShape

int64s = st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1))
times_ns = st.integers(0, 2**63 - 1)
KINDS = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}


@st.composite
def shapes(draw):
    count = draw(st.integers(0, 3))
    ordinal = ("ordinal",)
    return StepShape(
        own=SpanShape(
            "digest", "rank.step", {"rank": 3, "rule": "optimizer"},
            ints=ordinal + draw(st.sampled_from([(), ("iteration", "memory")])),
            doubles=("duration", "busy")[: draw(st.integers(0, 2))],
        ),
        texts=("phases", "sync")[: draw(st.integers(0, 2))],
        root=draw(st.sampled_from([None, SpanShape("digest", "train.step", {}, ints=ordinal)])),
        below=tuple(
            SpanShape("timeline", f"phase {n}", {"known": False}, ints=("count",) * (n % 2),
                      doubles=("blocked",) * (n % 3 == 1))
            for n in range(count)
        ),
        parents=tuple(draw(st.integers(-1, n - 1)) for n in range(count)),
    )  # fmt: skip


@st.composite
def some_rows(draw):
    shape = draw(shapes())
    n, k = draw(st.integers(1, 5)), len(shape.below)
    spans = (shape.own, *shape.below)
    ints, doubles = (sum(len(getattr(span, of)) for span in spans) for of in ("ints", "doubles"))

    def each(strategy, size):
        return [draw(st.lists(strategy, min_size=size, max_size=size)) for _ in range(n)]

    def ids(size):
        return [one for (one,) in each(st.binary(min_size=size, max_size=size), 1)]

    return StepRows(
        shape=shape,
        trace_ids=ids(16),
        own_ids=ids(8),
        root_ids=ids(8),
        ids_below=ids(8 * k),
        times_ns=np.array(each(times_ns, 2 + 2 * k), dtype=np.int64),
        ints=np.array(each(int64s, ints), dtype=np.int64),
        doubles=np.array(each(st.floats(allow_nan=False), doubles), dtype=np.float64).reshape(
            n, doubles
        ),
        texts=each(st.text("abc+/=", max_size=300).map(str.encode), len(shape.texts)),
    )


def span_of(shape, trace_id, span_id, parent_id, times, values):
    attributes = {**shape.constants, **values}
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent_id,
        name=shape.name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=times[0],
        end_time_unix_nano=times[1],
        attributes=sorted(
            (
                KeyValue(key=key, value=AnyValue(**{KINDS[type(value)]: value}))
                for key, value in attributes.items()
            ),
            key=lambda one: one.key,
        ),
        flags=0x103,
    )


def expected(rows):
    """The spans of each step: the rank's own and the root, and those below."""
    shape, own, below = rows.shape, [], []
    for n, trace_id in enumerate(rows.trace_ids):
        times, ints = rows.times_ns[n].tolist(), rows.ints[n].tolist()
        values = dict(zip(shape.own.ints, ints, strict=False))
        doubles = iter(rows.doubles[n].tolist())
        values |= {key: next(doubles) for key in shape.own.doubles}
        texts = [text.decode() for text in rows.texts[n]]
        values |= dict(zip(shape.texts, texts, strict=True))
        own.append(span_of(shape.own, trace_id, rows.own_ids[n], rows.root_ids[n], times, values))
        if shape.root is not None:
            values = {"ordinal": ints[0]}
            own.append(span_of(shape.root, trace_id, rows.root_ids[n], b"", times, values))
        left = iter(ints[len(shape.own.ints) :])
        ids = [rows.ids_below[n][8 * k : 8 * k + 8] for k in range(len(shape.below))]
        for k, span in enumerate(shape.below):
            values = {key: next(left) for key in span.ints}
            values |= {key: next(doubles) for key in span.doubles}
            parent_id = rows.own_ids[n] if shape.parents[k] < 0 else ids[shape.parents[k]]
            moments = times[2 + 2 * k : 4 + 2 * k]
            below.append(span_of(span, trace_id, ids[k], parent_id, moments, values))
    return own, below


def read(encoded):
    spans = list(ScopeSpans.FromString(encoded.data).spans)
    for span in spans:
        attributes = sorted(span.attributes, key=lambda one: one.key)
        span.ClearField("attributes")
        span.attributes.extend(attributes)
    return spans


@given(some_rows())
def test_steps_of_one_shape_are_what_protobuf_makes_of_them(rows):
    """In order and counted, whatever the widths of their numbers; a second time too."""
    encoder = StepRowsEncoder()
    for _ in range(2):
        pauses = []
        own, below = encoder.encode(rows, lambda: pauses.append(None))  # noqa: B023 - called at once

        assert len(pauses) >= 4
        assert (read(own), read(below)) == expected(rows)
        assert (own.count, below.count) == tuple(map(len, expected(rows)))
        assert own.count + below.count == rows.spans


def test_shapes_of_steps_are_not_hoarded():
    """A job whose shapes never recur would fill memory that is the user's."""
    encoder = StepRowsEncoder()
    for n in range(200):
        own = SpanShape("digest", f"name {n}", {}, ints=("ordinal",))
        encoder.encode(
            StepRows(
                shape=StepShape(own, (), None, (), ()),
                trace_ids=[b"t" * 16], own_ids=[b"o" * 8], root_ids=[b"r" * 8], ids_below=[b""],
                times_ns=np.zeros((1, 2), np.int64), ints=np.zeros((1, 1), np.int64),
                doubles=np.zeros((1, 0)), texts=[()],
            )
        )  # fmt: skip

    assert len(encoder._layouts) == step_rows._MAX_SHAPES
