"""The background thread's rounds, driven by hand, with a real endpoint."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from argus_otel import worker as worker_module
from argus_otel._runtime.clock import monotonic_ns
from argus_otel._runtime.faults import FaultLog
from argus_otel.condense import Condensed, condenser
from argus_otel.export import Sender, targets_from_environment
from argus_otel.semconv import names
from argus_otel.settings import Settings
from argus_otel.testing import InMemoryReceiver
from argus_otel.wire import events
from argus_otel.wire.identity import Identity
from argus_otel.wire.spans import ShapedSpan, SpanShape
from argus_otel.worker import Worker

MS = 1_000_000
IDENTITY = Identity(
    nonce=b"12345678",
    nonce_local=False,
    run_id="run",
    attempt=0,
    role="trainer",
    rank=0,
    world_size=1,
    local_rank=0,
)


@pytest.fixture
def receiver():
    """A real OTLP endpoint."""
    with InMemoryReceiver() as running:
        yield running


@pytest.fixture
def make_worker(receiver):
    """Makes workers that send to the endpoint; no thread, since nothing is started."""
    made = []

    def make(*, metric_interval_s=None, **settings):
        worker = Worker(
            Settings(ring_events=1024, **settings),
            FaultLog(),
            Sender(targets_from_environment(receiver.environment), first_post_jitter_s=0),
            resource=lambda: {"service.name": "test"},
            metric_interval_s=metric_interval_s,
        )
        worker.recorder.set_identity(IDENTITY)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker._sender.close()


@pytest.fixture
def worker(make_worker):
    """One with a small ring."""
    return make_worker()


BEGAN_MS = monotonic_ns() // MS + 3_600_000
"""After any identity that a test sets, however long the others took."""


def step(worker, ordinal):
    at = BEGAN_MS + 100 * ordinal
    append = worker.recorder.append
    append(events.FORWARD, at * MS, (at + 10) * MS, 0, 0, 0, 0)
    append(events.BACKWARD, (at + 10) * MS, (at + 20) * MS, 0, 0, 0, 0)
    append(events.STEP_END, (at + 21) * MS, 0, ordinal, events.NONE, 0, 0)


def attributes(receiver):
    return [span.attributes for span in receiver.spans(name="rank.step")]


def test_drops_are_told_by_the_next_digest_even_if_rounds_without_steps_come_between(
    worker, receiver
):
    """And once."""
    worker._faults.report("collective_hook", records=5)
    worker.recorder.append(events.GC, 0, MS, 2, 1, 0, 0)
    assert worker.flush(30)
    for ordinal in range(2):
        step(worker, ordinal)
        assert worker.flush(30)

    assert [got.get("argus.drops") for got in attributes(receiver)] == [5, None]


def test_an_overflow_is_counted_and_marks_the_step_it_cut(worker, receiver):
    """Later steps are whole again."""
    for _ in range(3000):
        worker.recorder.append(events.GC, 0, MS, 2, 1, 0, 0)
    step(worker, 0)
    step(worker, 1)
    assert worker.flush(30)

    first, second = attributes(receiver)
    assert first["argus.digest.truncated"] is True
    assert first["argus.drops"] > 1900
    assert "argus.digest.truncated" not in second


def test_a_forked_child_has_nothing_to_send(worker, receiver):
    """What the parent has recorded is the parent's to send."""
    step(worker, 0)

    worker.reset_after_fork()

    assert worker.flush(30)
    assert receiver.spans() == []


def test_a_span_that_cannot_be_encoded_costs_only_itself(worker, receiver, monkeypatch):
    """The other steps of its round are sent."""
    encode = worker_module.encode_span

    def fail_once(**kwargs):
        if kwargs["attributes"].get("argus.step.ordinal") == 1:
            raise OverflowError
        return encode(**kwargs)

    monkeypatch.setattr(worker_module, "encode_span", fail_once)
    for ordinal in range(3):
        step(worker, ordinal)
    assert worker.flush(30)

    assert [got["argus.step.ordinal"] for got in attributes(receiver)] == [0, 2]
    assert worker._drops()["encode"] == 1


def test_of_steps_that_cannot_be_sent_at_all_every_span_is_counted(worker, receiver, monkeypatch):
    """Phases and roots too, whichever way they would have been encoded."""

    def fail(identity):
        raise OSError

    with monkeypatch.context() as patched:
        patched.setattr(worker, "_resource", fail)
        step(worker, 0)
        worker.flush(30)
    lost = worker._drops()["encode"]
    step(worker, 1)
    assert worker.flush(30)

    assert lost == len(receiver.spans()) > 1


def shaped_span(shape, trace_id, number, *values):
    at_ns = BEGAN_MS * MS
    span_id = number.to_bytes(8, "big")
    return ShapedSpan(shape, trace_id, span_id, bytes(8), at_ns, at_ns + 1, values)


def test_shaped_spans_are_sent_in_their_scopes_and_a_wrong_one_costs_only_itself(worker, receiver):
    """More of them than are encoded in one go."""
    shape = SpanShape(scope="a", name="n", constants={"c": "d"}, ints=("i",), doubles=("x",))
    other = SpanShape(scope="b", name="m", constants={})
    spans = [shaped_span(shape, b"t" * 16, n, n, n / 2) for n in range(1, 301)]
    spans[40] = shaped_span(shape, b"t" * 16, 41)  # without its values
    spans.append(shaped_span(other, b"t" * 16, 301))

    by_scope = {"a": spans[:-1], "b": spans[-1:]}
    worker._submit(
        Condensed(identity=IDENTITY, digests=[], shaped=by_scope), worker_module._Pause()
    )
    assert worker.flush(30)

    numbers = [span.attributes["i"] for span in receiver.spans(name="n")]
    assert numbers == [n for n in range(1, 301) if n != 41]
    assert {span.scope for span in receiver.spans(name="n")} == {"a"}
    assert [span.scope for span in receiver.spans(name="m")] == ["b"]
    assert worker._drops() == {"encode": 1}


def test_events_that_nothing_can_be_made_of_are_counted_and_not_tried_again(
    worker, receiver, monkeypatch
):
    """The next step is whole."""

    def fail(*args, **kwargs):
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(condenser, "condense_step", fail)
        step(worker, 0)
        assert worker.flush(30)
    step(worker, 1)
    assert worker.flush(30)

    (got,) = attributes(receiver)
    assert (got["argus.step.ordinal"], got["argus.drops"]) == (1, 3)
    assert got["argus.digest.truncated"] is True


def test_events_are_counted_even_where_taking_them_fails_as_a_whole(worker, monkeypatch):
    """Those held back from the round before with them."""
    worker.recorder.append(events.FORWARD, 0, MS, 0, 0, 0, 0)
    worker.flush(0)

    def fail(event, offset_ns):
        raise ValueError

    monkeypatch.setattr(worker._condenser, "_begin_identity", fail)
    worker.recorder.set_identity(IDENTITY)
    worker.flush(0)

    assert worker._drops()["condense"] == 2
    assert worker._condenser.held_events == 0


def test_a_fault_that_costs_no_record_is_no_drop(worker, receiver):
    """A hook that could not be set, a nonce that was not shared."""
    for cause in ("nonce_not_shared", "sigterm_hook", "torch_without_collective_hooks"):
        worker._faults.report(cause)
    step(worker, 0)
    assert worker.flush(30)

    assert worker._drops() == {}
    assert "argus.drops" not in attributes(receiver)[0]


def test_drops_and_costs_are_told_once_where_an_identity_cuts_a_round(worker, receiver):
    """Two worlds in half a second, one digest with the count."""
    worker._faults.report("collective_hook", records=5)
    step(worker, 0)
    worker.recorder.set_identity(replace(IDENTITY, nonce=b"87654321"))
    step(worker, 0)
    assert worker.flush(30)

    told = attributes(receiver)
    assert [got.get("argus.drops") for got in told] == [5, None]
    assert [got["argus.self.cpu"] > 0 for got in told] == [True, False]


def test_the_half_step_that_an_overflow_leaves_behind_is_counted(worker):
    """What was held of it is thrown away with what the ring lost."""
    for _ in range(10):
        worker.recorder.append(events.GC, 0, MS, 2, 1, 0, 0)
    worker.flush(0)
    for _ in range(3000):
        worker.recorder.append(events.GC, 0, MS, 2, 1, 0, 0)
    worker.flush(0)

    held = worker._condenser.held_events
    assert worker._drops()["ring_overflow"] == 3010 - held


def test_an_event_that_does_not_fit_costs_its_step_nothing_else(worker, receiver):
    """It is counted under its own name; nothing has overflowed, and no half step is thrown away."""
    append = worker.recorder.append
    append(events.FORWARD, BEGAN_MS * MS, (BEGAN_MS + 10) * MS, 0, 0, 0, 0)
    worker.flush(0)
    append(events.WORK, 1 << 64, 0, 0, 1, 0, 0)
    append(events.BACKWARD, (BEGAN_MS + 10) * MS, (BEGAN_MS + 20) * MS, 0, 0, 0, 0)
    append(events.STEP_END, (BEGAN_MS + 21) * MS, 0, 0, events.NONE, 0, 0)
    assert worker.flush(30)

    (told,) = attributes(receiver)
    assert worker._drops() == {"unfit_event": 1}
    assert (told["argus.drops"], told.get("argus.digest.truncated")) == (1, None)
    assert told["argus.step.duration"] == pytest.approx(0.021)


def test_metrics_add_up_over_the_rounds(make_worker, receiver):
    """Waits, steps: what a dashboard takes the rate of."""
    worker = make_worker(metric_interval_s=3600)
    for ordinal in range(3):
        at = BEGAN_MS + 100 * ordinal
        worker.recorder.append(events.WAIT, (at + 2) * MS, (at + 7) * MS, 0, 0, 0, 0)
        step(worker, ordinal)
        assert worker.flush(30)

    for name, each in ((names.METRIC_ARGUS_COLLECTIVE_WAIT, 0.005), (names.METRIC_ARGUS_STEPS, 1)):
        values = [metric.points[0].value for metric in receiver.metrics(name=name)]
        assert values == pytest.approx([each, 2 * each, 3 * each])


def test_the_thread_outlives_a_bug_in_a_round(make_worker, receiver, monkeypatch):
    """What comes after it is sent."""
    worker = make_worker(interval_s=0.05)
    whole, failed = worker._cycle, threading.Event()

    def fail_once():
        monkeypatch.setattr(worker, "_cycle", whole)
        failed.set()
        raise ValueError

    monkeypatch.setattr(worker, "_cycle", fail_once)
    worker.recorder.start()
    assert failed.wait(30)
    step(worker, 0)
    until_s = time.monotonic() + 30
    while not attributes(receiver) and time.monotonic() < until_s:
        time.sleep(0.05)
    worker.stop()
    worker._thread.join(30)
    worker._sender.close()

    assert [got["argus.step.ordinal"] for got in attributes(receiver)] == [0]
    assert worker._faults.counts["worker"] == 1


def test_the_gil_is_given_away_while_events_are_taken_from_the_ring(worker, monkeypatch):
    """A thousand of them take longer to pack than the trainer may wait."""
    slept = []
    monkeypatch.setattr(worker_module, "_LONGEST_TURN_NS", -1)
    monkeypatch.setattr(worker_module.time, "sleep", slept.append)
    for _ in range(1000):
        worker.recorder.append(events.GC, 0, MS, 2, 1, 0, 0)

    worker._cycle()

    assert slept == [0, 0]


def test_the_gil_is_given_away_by_the_clock(monkeypatch):
    """Not after every piece of work: the yield costs more than most pieces."""
    now_ns, slept = [0], []
    monkeypatch.setattr(worker_module, "monotonic_ns", lambda: now_ns[0])
    monkeypatch.setattr(worker_module.time, "sleep", slept.append)
    pause = worker_module._Pause()

    for _ in range(100):  # 1 ms
        now_ns[0] += 10_000
        pause()

    assert slept == [0, 0, 0]
