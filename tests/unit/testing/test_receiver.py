"""The test kit's own receiver and clock: what other tests lean on."""

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from argus_otel.testing import CounterClock, InMemoryReceiver


@pytest.fixture
def receiver():
    with InMemoryReceiver() as running:
        yield running


@pytest.fixture
def tracer(receiver):
    provider = TracerProvider(resource=Resource({"service.name": "trainer"}))
    exporter = OTLPSpanExporter(endpoint=f"{receiver.endpoint}/v1/traces")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("a.scope")
    provider.shutdown()


def test_spans_of_a_stock_exporter_arrive_as_plain_values(receiver, tracer):
    with tracer.start_as_current_span("step", attributes={"n": 3, "names": ["a", "b"]}):
        pass

    receiver.wait_for(lambda got: got.spans())
    (span,) = receiver.spans(name="step", scope="a.scope")
    assert span.attributes == {"n": 3, "names": ["a", "b"]}
    assert span.resource["service.name"] == "trainer"
    assert span.parent_span_id is None
    assert span.status == "unset"
    assert receiver.requests[0].status == 200


def test_waiting_in_vain_says_what_had_arrived(receiver, tracer):
    with tracer.start_as_current_span("step"):
        pass

    with pytest.raises(TimeoutError, match=r"1 requests .*'step': 1"):
        receiver.wait_for(lambda got: len(got.spans()) > 1, timeout_s=0.01)


def test_a_stopped_receiver_starts_again_on_its_port(receiver):
    before = receiver.endpoint

    receiver.stop()
    receiver.start()

    assert receiver.endpoint == before


def test_the_clock_moves_only_when_told():
    clock = CounterClock(start_ns=5)

    clock.advance(2)
    clock.sleep(0.5)

    assert clock() == 2.5
    assert clock.time_ns() == 2_500_000_005
    assert clock.slept_s == [0.5]


def test_a_ticking_clock_never_shows_one_time_twice():
    clock = CounterClock(start_ns=0, tick_ns=1)

    assert [clock.time_ns() for _ in range(3)] == [0, 1, 2]
