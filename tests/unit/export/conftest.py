"""A receiver, a sender that points at it, and bodies to send."""

import numpy as np
import pytest

from argus_otel.encode import EncodedSpans, SpanTemplate, encode_resource, encode_trace_requests
from argus_otel.export import Sender, Signal, Target
from argus_otel.testing import CounterClock, InMemoryReceiver

BUDGET_S = 30.0
"""Far more than any post here takes; what is about time-outs sets its own."""


@pytest.fixture
def receiver():
    with InMemoryReceiver() as running:
        yield running


@pytest.fixture
def clock():
    return CounterClock()


@pytest.fixture
def make_sender(receiver, clock):
    """Senders without jitter (``random`` is 0), closed at the end."""
    made = []

    def make(*, target=None, url=None, random=lambda: 0.0, queue_limit_bytes=1 << 20, **changes):
        if target is None:
            target = Target(url=url or f"{receiver.endpoint}/v1/traces", **changes)
        metrics = Target(url=f"{receiver.endpoint}/v1/metrics")
        sender = Sender(
            {Signal.TRACES: target, Signal.METRICS: metrics},
            clock=clock,
            random=random,
            sleep=clock.sleep,
            queue_limit_bytes=queue_limit_bytes,
        )
        made.append(sender)
        return sender

    yield make
    for sender in made:
        sender.close()


@pytest.fixture
def sender(make_sender):
    return make_sender()


@pytest.fixture
def spans_body():
    """Makes an uncompressed request of so many spans, numbered in attribute ``n``."""

    def make(count, first=0):
        template = SpanTemplate("s", constants={}, fields={"n": "int"})
        data = template.encode(
            trace_id=bytes(range(1, 17)),
            span_id_N=np.arange(first + 1, first + count + 1, dtype=np.uint64),
            parent_span_id=0,
            start_ns_N=np.zeros(count, np.int64),
            end_ns_N=np.zeros(count, np.int64),
            fields={"n": np.arange(first, first + count)},
        )
        resource = encode_resource({"dl.rank": 0})
        ((body, _),) = encode_trace_requests(resource, {"s": [EncodedSpans(data, count)]})
        return body

    return make


@pytest.fixture
def numbers(receiver):
    """The attribute ``n`` of all spans that arrived."""

    def read():
        return [span.attributes["n"] for span in receiver.spans()]

    return read
