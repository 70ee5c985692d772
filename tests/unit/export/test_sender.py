"""The sender against a real HTTP server that answers, refuses, stalls, and comes back."""

import email.utils
import gc
import logging
import os
import random
import signal
import socket
import threading
import time
import warnings

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from argus_otel.encode import Counter, encode_metrics_request
from argus_otel.export import Sender, Signal, Target
from argus_otel.testing import InMemoryReceiver

BUDGET_S = 30.0
SHORT_S = 0.3


def test_what_is_submitted_arrives(sender, receiver, spans_body, numbers):
    sender.submit(Signal.TRACES, spans_body(3), 3)

    sender.pump(BUDGET_S)

    assert numbers() == [0, 1, 2]
    stats = sender.stats
    assert (stats.sent_records, stats.requests, stats.drops) == (3, 1, {})
    assert stats.sent_bytes == receiver.requests[0].wire_bytes
    assert (stats.queue_bytes, stats.queue_records, stats.last_error) == (0, 0, None)


def test_metrics_go_to_their_own_path(sender, receiver):
    points = [Counter(name="steps", unit="{step}", value=2, start_ns=1, time_ns=2)]

    sender.submit(Signal.METRICS, *encode_metrics_request(b"", points))
    sender.pump(BUDGET_S)

    assert receiver.requests[0].path == "/v1/metrics"
    assert receiver.metrics(name="steps")[0].points[0].value == 2


@pytest.mark.parametrize("compression", ["gzip", "deflate", "none"])
def test_the_body_is_compressed_as_told(make_sender, receiver, spans_body, compression):
    sender = make_sender(compression=compression)
    body = spans_body(50)

    sender.submit(Signal.TRACES, body, 50)
    sender.pump(BUDGET_S)

    (request,) = receiver.requests
    assert request.body == body
    assert request.headers.get("content-encoding", "none") == compression
    assert (request.wire_bytes < len(body) / 4) == (compression != "none")


def test_headers_are_sent_and_cannot_break_the_protocol(make_sender, receiver, spans_body):
    sender = make_sender(headers={"api-key": "secret", "content-type": "text/plain"})

    sender.submit(Signal.TRACES, spans_body(1), 1)
    sender.pump(BUDGET_S)

    headers = receiver.requests[0].headers
    assert headers["api-key"] == "secret"
    assert headers["content-type"] == "application/x-protobuf"
    assert headers["user-agent"].startswith("argus-otel/")


def test_one_connection_serves_many_posts(sender, receiver, spans_body):
    for n in range(3):
        sender.submit(Signal.TRACES, spans_body(1, first=n), 1)
        sender.pump(BUDGET_S)

    assert len({request.client_port for request in receiver.requests}) == 1


def test_one_pump_sends_everything_in_order(sender, spans_body, numbers):
    for n in range(4):
        sender.submit(Signal.TRACES, spans_body(1, first=n), 1)

    sender.pump(BUDGET_S)

    assert numbers() == [0, 1, 2, 3]


def test_the_first_post_waits_its_turn(make_sender, receiver, spans_body, clock):
    """Ranks that start together must not all connect in one instant."""
    sender = make_sender(random=lambda: 0.5)
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)

    assert receiver.requests == []
    assert sender.next_due_s() == pytest.approx(0.5)
    clock.advance(0.5)
    sender.pump(BUDGET_S)
    assert len(receiver.requests) == 1


def test_an_idle_sender_has_nothing_due(sender):
    assert sender.next_due_s() is None


# --- Answers that ask for patience -------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_endpoint_gets_the_same_request_again(
    sender, receiver, spans_body, numbers, clock, status
):
    receiver.respond(status)
    sender.submit(Signal.TRACES, spans_body(2), 2)

    sender.pump(BUDGET_S)
    assert sender.stats.last_error == f"HTTP {status}"
    assert sender.stats.queue_records == 2
    clock.advance(sender.next_due_s())
    sender.pump(BUDGET_S)

    assert numbers() == [0, 1]
    assert sender.stats.drops == {}


def test_nothing_is_posted_before_retry_after(sender, receiver, spans_body, clock):
    receiver.respond(429, {"Retry-After": "7"})
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)
    clock.advance(6.9)
    sender.pump(BUDGET_S)

    assert len(receiver.requests) == 1
    assert sender.next_due_s() >= 0.1 - 1e-6


def test_retry_after_may_be_a_date_by_the_endpoints_own_clock(sender, receiver, spans_body):
    """The endpoint's clock is an hour off; what counts is the difference of its two dates."""
    now_s = 1_700_000_000
    headers = {
        "Date": email.utils.formatdate(now_s, usegmt=True),
        "Retry-After": email.utils.formatdate(now_s + 60, usegmt=True),
    }
    receiver.respond(503, headers)
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)

    assert 60 <= sender.next_due_s() <= 66


@pytest.mark.parametrize("value", ["soon", "-3", "1e3", ""])
def test_a_senseless_retry_after_falls_back_to_backoff(sender, receiver, spans_body, value):
    receiver.respond(503, {"Retry-After": value})
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)

    assert 0.5 <= sender.next_due_s() <= 1.0


def test_waits_grow_and_stay_bounded(sender, receiver, spans_body, clock):
    receiver.respond(503, times=8)
    sender.submit(Signal.TRACES, spans_body(1), 1)

    waits_s = []
    for _ in range(8):
        sender.pump(BUDGET_S)
        waits_s.append(sender.next_due_s())
        clock.advance(waits_s[-1])

    assert waits_s == pytest.approx([0.5, 1, 2, 4, 8, 15, 15, 15])


def test_one_signals_trouble_does_not_hold_up_the_other(sender, receiver, spans_body):
    receiver.respond(503)
    sender.submit(Signal.TRACES, spans_body(1), 1)
    points = [Counter(name="steps", unit="1", value=2, start_ns=1, time_ns=2)]
    sender.submit(Signal.METRICS, *encode_metrics_request(b"", points))

    sender.pump(BUDGET_S)

    assert len(receiver.metrics()) == 1


# --- Answers that are final ----------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_a_refused_request_is_counted_and_the_next_one_goes(
    sender, receiver, spans_body, numbers, status
):
    receiver.respond(status)
    sender.submit(Signal.TRACES, spans_body(2), 2)
    sender.submit(Signal.TRACES, spans_body(1, first=2), 1)

    sender.pump(BUDGET_S)

    assert numbers() == [2]
    assert sender.stats.drops == {"refused": 2}


def test_a_redirect_is_not_followed(sender, receiver, spans_body):
    """Headers hold keys; they go to the configured host and to no other."""
    with InMemoryReceiver() as elsewhere:
        receiver.respond(307, {"Location": f"{elsewhere.endpoint}/v1/traces"})
        sender.submit(Signal.TRACES, spans_body(1), 1)

        sender.pump(BUDGET_S)

        assert elsewhere.requests == []
    assert sender.stats.drops == {"refused": 1}


def test_a_request_that_is_too_large_arrives_in_parts(spans_body, clock):
    with InMemoryReceiver(max_body_bytes=1000) as receiver:
        target = Target(url=f"{receiver.endpoint}/v1/traces")
        sender = Sender({Signal.TRACES: target}, clock=clock, random=lambda: 0.0)
        sender.submit(Signal.TRACES, spans_body(40), 40)

        sender.pump(BUDGET_S)
        sender.close()

        assert [span.attributes["n"] for span in receiver.spans()] == list(range(40))
        assert {span.resource["dl.rank"] for span in receiver.spans()} == {0}
        assert sender.stats.sent_records == 40
        assert sender.stats.drops == {}


def test_a_span_that_no_splitting_makes_small_enough_is_dropped(sender, receiver, spans_body):
    receiver.respond(413, times=100)
    sender.submit(Signal.TRACES, spans_body(5), 5)

    sender.pump(BUDGET_S)

    assert sender.stats.drops == {"too_large": 5}
    assert sender.next_due_s() is None


def test_partially_rejected_records_are_counted(sender, receiver, spans_body, caplog):
    answer = ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(rejected_spans=2, error_message="too many tags")
    )
    receiver.respond(200, body=answer.SerializeToString(), times=2)

    for _ in range(2):
        sender.submit(Signal.TRACES, spans_body(5), 5)
    sender.pump(BUDGET_S)

    assert sender.stats.drops == {"partial_success": 4}
    assert sender.stats.sent_records == 6
    warnings_said = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert ["too many tags" in record.getMessage() for record in warnings_said] == [True]


def test_an_answer_that_is_no_protobuf_is_a_plain_success(sender, receiver, spans_body):
    receiver.respond(200, body=b"<html>fine</html>")
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)

    assert sender.stats.sent_records == 1


def test_an_endless_answer_is_not_read_to_its_end(sender, receiver, spans_body):
    receiver.respond(200, body=b"x" * 5_000_000)
    for n in range(2):
        sender.submit(Signal.TRACES, spans_body(1, first=n), 1)

    sender.pump(BUDGET_S)

    assert sender.stats.sent_records == 2
    assert len({request.client_port for request in receiver.requests}) == 2


def test_an_accepted_request_is_not_sent_again_because_its_answer_broke_off(
    make_sender, receiver, spans_body, numbers
):
    sender = make_sender(timeout_s=SHORT_S)
    receiver.respond(200, {"Content-Length": "100"}, b"cut short")
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)

    assert sender.stats.sent_records == 1
    assert sender.next_due_s() is None


# --- No answer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["hang", "dribble"])
def test_a_silent_endpoint_costs_no_more_than_the_timeout(make_sender, receiver, spans_body, fault):
    """One that sends a byte now and then counts as silent: no single read ever times out."""
    sender = make_sender(timeout_s=SHORT_S)
    getattr(receiver, fault)(times=float("inf"))
    sender.submit(Signal.TRACES, spans_body(1), 1)

    began_s = time.monotonic()
    sender.pump(BUDGET_S)
    took_s = time.monotonic() - began_s

    assert SHORT_S <= took_s < BUDGET_S / 2
    assert sender.stats.queue_records == 1
    assert sender.stats.drops == {}


def test_a_silent_endpoint_costs_no_more_than_the_budget(sender, receiver, spans_body):
    receiver.hang(times=float("inf"))
    sender.submit(Signal.TRACES, spans_body(1), 1)

    began_s = time.monotonic()
    sender.pump(SHORT_S)

    assert time.monotonic() - began_s < sender._targets[Signal.TRACES].timeout_s / 2


def test_a_host_that_drops_packets_costs_no_more_than_the_timeout(make_sender, spans_body):
    """A listener whose queue is full ignores new connections, as a firewall would."""
    with socket.socket() as full, socket.socket() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting.connect(full.getsockname())
        port = full.getsockname()[1]
        sender = make_sender(url=f"http://127.0.0.1:{port}/v1/traces", timeout_s=SHORT_S)
        sender.submit(Signal.TRACES, spans_body(1), 1)

        began_s = time.monotonic()
        sender.pump(BUDGET_S)

        assert time.monotonic() - began_s < BUDGET_S / 2
        assert sender.stats.queue_records == 1


def test_spans_resume_when_the_endpoint_comes_back(sender, receiver, spans_body, numbers, clock):
    receiver.stop()
    for n in range(3):
        sender.submit(Signal.TRACES, spans_body(1, first=n), 1)
        sender.pump(BUDGET_S)
    assert "refused" in sender.stats.last_error

    receiver.start()
    clock.advance(sender.next_due_s())
    sender.pump(BUDGET_S)

    assert numbers() == [0, 1, 2]
    assert sender.stats.drops == {}
    assert sender.stats.last_error is None


def test_a_kept_connection_that_the_endpoint_closed_is_replaced(
    sender, receiver, spans_body, numbers, clock
):
    sender.submit(Signal.TRACES, spans_body(1), 1)
    sender.pump(BUDGET_S)
    receiver.stop()
    receiver.start()

    sender.submit(Signal.TRACES, spans_body(1, first=1), 1)
    sender.pump(BUDGET_S)
    clock.advance(sender.next_due_s() or 0)
    sender.pump(BUDGET_S)

    assert numbers() == [0, 1]


def test_a_cut_connection_is_tried_again(sender, receiver, spans_body, numbers, clock):
    receiver.close_connection()
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)
    clock.advance(sender.next_due_s())
    sender.pump(BUDGET_S)

    assert numbers() == [0]


def test_an_unknown_host_is_no_exception(make_sender, spans_body):
    sender = make_sender(url="http://collector.invalid:4318/v1/traces")
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)

    assert sender.stats.queue_records == 1


def test_each_cause_is_logged_once(sender, receiver, spans_body, clock, caplog):
    """A job runs for weeks, and 10,000 ranks write to one log."""
    receiver.respond(503, times=5)
    sender.submit(Signal.TRACES, spans_body(1), 1)
    with caplog.at_level(logging.WARNING, logger="argus_otel"):
        for _ in range(5):
            sender.pump(BUDGET_S)
            clock.advance(sender.next_due_s())

    assert len(caplog.records) == 1
    assert "HTTP 503" in caplog.text


# --- Bounds --------------------------------------------------------------------------------------------


def test_a_full_queue_gives_up_the_oldest(make_sender, receiver, spans_body, numbers):
    size = len(spans_body(1))
    sender = make_sender(compression="none", queue_limit_bytes=3 * size)
    receiver.stop()
    for n in range(5):
        sender.submit(Signal.TRACES, spans_body(1, first=n), 1)
    assert sender.stats.drops == {"queue_full": 2}
    assert sender.stats.queue_bytes == 3 * size

    receiver.start()
    sender.pump(BUDGET_S)

    assert numbers() == [2, 3, 4]


def test_a_request_above_the_limit_costs_itself_and_no_other(make_sender, spans_body, numbers):
    small = spans_body(1)
    sender = make_sender(compression="none", queue_limit_bytes=len(small))
    sender.submit(Signal.TRACES, small, 1)

    sender.submit(Signal.TRACES, spans_body(50, first=1), 50)
    sender.pump(BUDGET_S)

    assert numbers() == [0]
    assert sender.stats.drops == {"queue_full": 50}


def test_a_signal_without_a_target_is_counted(receiver, spans_body):
    sender = Sender({})

    sender.submit(Signal.TRACES, spans_body(2), 2)

    assert sender.stats.drops == {"no_target": 2}


def test_everything_submitted_is_accounted_for(make_sender, receiver, spans_body, clock):
    """Whatever happened: records in = sent + dropped + waiting."""
    chance = random.Random(3)  # noqa: S311  # a fixed course of events
    sender = make_sender(compression="none", queue_limit_bytes=20 * len(spans_body(10)))
    submitted = 0
    for _ in range(60):
        status = chance.choice([200, 200, 429, 503, 400, 413])
        receiver.recover()
        receiver.respond(status)
        count = chance.randint(1, 20)
        sender.submit(Signal.TRACES, spans_body(count), count)
        submitted += count
        sender.pump(BUDGET_S)
        clock.advance(chance.random())

    stats = sender.stats
    assert stats.sent_records == len(receiver.spans())
    assert submitted == stats.sent_records + sum(stats.drops.values()) + stats.queue_records


# --- The end, and forks ---------------------------------------------------------------------------------


def test_flush_does_not_wait_for_the_first_post_or_a_backoff(
    make_sender, receiver, spans_body, numbers, clock
):
    sender = make_sender(random=lambda: 1.0)
    sender.submit(Signal.TRACES, spans_body(1), 1)

    assert sender.flush(1.0)

    assert numbers() == [0]
    assert clock.slept_s == []


def test_flush_tries_again_within_its_deadline(sender, receiver, spans_body, numbers):
    receiver.respond(503, times=2)
    sender.submit(Signal.TRACES, spans_body(1), 1)

    assert sender.flush(10.0)

    assert numbers() == [0]


def test_flush_gives_up_at_its_deadline(sender, receiver, spans_body, clock):
    receiver.respond(503, times=float("inf"))
    sender.submit(Signal.TRACES, spans_body(1), 1)

    assert not sender.flush(2.0)

    assert sum(clock.slept_s) < 2.0
    assert sender.stats.queue_records == 1


def test_closing_counts_what_was_left(sender, receiver, spans_body):
    receiver.stop()
    sender.submit(Signal.TRACES, spans_body(3), 3)

    sender.close()
    sender.submit(Signal.TRACES, spans_body(2), 2)
    sender.pump(BUDGET_S)

    assert sender.stats.drops == {"closed": 5}
    assert sender.next_due_s() is None


def in_a_fork(work):
    """Run ``work`` in a forked child; whether it returned true there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads, on purpose
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_sends_nothing_of_its_parents(sender, receiver, spans_body, numbers):
    """A data loader's worker is a fork; the parent's connection and queue are not its own."""
    sender.submit(Signal.TRACES, spans_body(1), 1)

    def in_the_child():
        sender.submit(Signal.TRACES, spans_body(1, first=1), 1)
        sender.pump(BUDGET_S)
        sender.close()
        return sender.flush(1.0) and sender.next_due_s() is None

    assert in_a_fork(in_the_child)
    assert receiver.requests == []
    sender.pump(BUDGET_S)
    assert numbers() == [0]


def test_a_child_that_is_rearmed_uses_a_connection_of_its_own(
    sender, receiver, spans_body, numbers
):
    sender.submit(Signal.TRACES, spans_body(1), 1)
    sender.pump(BUDGET_S)
    sender.submit(Signal.TRACES, spans_body(1, first=1), 1)

    def in_the_child():
        sender.reset_after_fork()
        sender.submit(Signal.TRACES, spans_body(1, first=7), 1)
        return sender.flush(BUDGET_S) and sender.stats.sent_records == 1

    assert in_a_fork(in_the_child)
    sender.pump(BUDGET_S)
    assert numbers() == [0, 7, 1]
    first, childs, second = [request.client_port for request in receiver.requests]
    assert first == second != childs


def test_a_fork_in_the_midst_of_a_post_does_not_lock_up_the_child(
    make_sender, receiver, spans_body
):
    """The worker thread may hold any lock then, and is not there to release it."""
    sender = make_sender(timeout_s=BUDGET_S)
    receiver.hang()
    sender.submit(Signal.TRACES, spans_body(1), 1)
    poster = threading.Thread(target=sender.pump, args=(BUDGET_S,))
    poster.start()
    receiver.wait_for(lambda seen: seen.requests)

    def in_the_child():
        signal.alarm(5)  # instead of hanging
        sender.reset_after_fork()
        gc.collect()  # as at the interpreter's end
        sender.submit(Signal.TRACES, spans_body(1, first=7), 1)
        return sender.flush(BUDGET_S) and sender.stats.sent_records == 1

    try:
        assert in_a_fork(in_the_child)
    finally:
        receiver.recover()
        poster.join()


def test_a_child_lets_go_of_its_parents_connections(sender, spans_body):
    """Else the endpoint would not see the parent hang up."""
    sender.submit(Signal.TRACES, spans_body(1), 1)
    sender.pump(BUDGET_S)
    connected = sender._routes[Signal.TRACES].connection._connected
    descriptor = connected.fileno()

    def in_the_child():
        sender.reset_after_fork()
        try:
            os.fstat(descriptor)
        except OSError:
            return True
        return False

    assert in_a_fork(in_the_child)
    assert connected.fileno() == descriptor


def test_a_http_proxy_carries_the_posts(make_sender, receiver, spans_body, numbers):
    sender = make_sender(url="http://collector.invalid:4318/v1/traces", proxy_url=receiver.endpoint)
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)

    assert numbers() == [0]
    assert receiver.requests[0].path == "http://collector.invalid:4318/v1/traces"
