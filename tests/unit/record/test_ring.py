"""The ring that the training thread writes to: what comes out is what went in, or is counted."""

from __future__ import annotations

import threading
import tracemalloc
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.record.ring import EventRing
from argus_otel.settings import Settings
from argus_otel.wire import events

LARGEST = (1 << 63) - 1


def values(drained):
    """Field t0 of each event."""
    return [event[1] for event in drained.unpacked()]


def append(ring, value, *, kind=events.PHASE):
    ring.append(kind, value, 0, 0, 0, 0, 0)


def test_events_come_out_in_order_and_once():
    """With every field as it was written."""
    ring = EventRing(64)
    ring.append(events.COLLECTIVE, 1, 2, 3, 4, LARGEST, -LARGEST)
    append(ring, 7)

    drained = ring.drain()

    assert list(drained.unpacked()) == [
        (events.COLLECTIVE, 1, 2, 3, 4, LARGEST, -LARGEST),
        (events.PHASE, 7, 0, 0, 0, 0, 0),
    ]
    assert len(ring.drain()) == 0
    assert ring.lost == 0


def test_events_can_be_counted_and_taken_out_by_kind():
    """Without a look at the others."""
    ring = EventRing(64)
    for value, kind in enumerate((events.GC, events.PHASE, events.GC, events.END)):
        append(ring, value, kind=kind)

    drained = ring.drain()

    counts = events.kind_counts(drained)
    assert (len(counts), counts[events.GC], counts[events.WAIT]) == (16, 2, 0)
    assert [event[1] for event in drained.of_kind(events.GC)] == [0, 2]
    assert values(drained.without(events.GC)) == [1, 3]
    assert values(drained.part(-2)) == [2, 3]


@given(st.lists(st.integers(0, 200), max_size=12), st.sampled_from([16, 64, 256]))
def test_whatever_the_rhythm_of_reading_nothing_is_doubled_and_every_loss_is_counted(
    bursts, capacity
):
    """Bursts of events with a reading after each."""
    ring = EventRing(capacity)
    written = 0
    seen = []
    for burst in bursts:
        for _ in range(burst):
            append(ring, written)
            written += 1
        seen += values(ring.drain())

    assert seen == sorted(set(seen))
    assert len(seen) + ring.lost == written
    if max(bursts, default=0) <= capacity:
        assert ring.lost == 0


def test_an_overflow_keeps_the_newest_events():
    """As many as there is room for."""
    ring = EventRing(64)
    for value in range(1000):
        append(ring, value)

    drained = values(ring.drain())

    assert drained == list(range(1000 - 64, 1000))
    assert ring.lost == 1000 - 64


def test_memory_stays_bounded_by_what_hooks_append_themselves():
    """Even where one forgot to count what it drove out."""
    ring = EventRing(64)
    for value in range(1000):
        ring.held.append((events.WAIT, value, 0, 0, 0, 0, 0))

    assert values(ring.drain()) == list(range(1000 - 64, 1000))


class Raising:
    """What a framework's own kind of number may do."""

    def __index__(self):
        raise ZeroDivisionError


def test_the_largest_queue_that_can_be_set_takes_a_gigabyte_at_most():
    """With the largest times and counters in every field."""
    count = 20_000
    ring = EventRing(count)
    tracemalloc.start()
    try:
        for n in range(count):
            now = 10**18 + 10 * n
            ring.append(events.DATA, now, now + 1, now + 2, now + 3, now + 4, now + 5)
        each = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()

    (most,) = [one.metadata["most"] for one in fields(Settings) if one.name == "ring_events"]
    assert 250 < each < 330  # less by up to 10 where Python had tuples of this length to spare
    assert each * most < 1e9


@pytest.mark.parametrize("unfit", [1 << 64, 1.5, None, Raising()])
def test_a_value_that_64_bits_do_not_hold_loses_its_own_event_only(unfit):
    """It is found where events are packed, long after the hook has gone on."""
    ring = EventRing(64)
    append(ring, 1)
    append(ring, unfit)
    append(ring, 2)

    drained = ring.drain()

    assert list(drained.kinds) == [events.PHASE, events.VOID, events.PHASE]
    assert events.kind_counts(drained)[events.PHASE] == 2
    assert values(drained) == [1, 0, 2]
    assert (ring.unfit, ring.lost) == (1, 0)


def test_reading_gives_the_gil_away_and_ends():
    """Where the trainer records on, what comes meanwhile is for the next reading."""
    ring = EventRing(1 << 12)
    for value in range(1500):
        append(ring, value)
    pauses = []

    def pause():
        pauses.append(None)
        append(ring, 1500 + len(pauses))

    assert values(ring.drain(pause)) == list(range(1500))
    assert len(pauses) == 3
    assert values(ring.drain()) == [1501, 1502, 1503]


def test_concurrent_writers_lose_and_double_nothing():
    """Four threads write while a fifth reads; the ring is large enough for all of it."""
    writers, each = 4, 5_000
    ring = EventRing(writers * each)
    done = threading.Event()
    read = []

    def write(writer):
        for n in range(each):
            ring.append(events.PHASE, writer, n, 0, 0, 0, 0)

    def read_on():
        while not done.is_set():
            read.extend(ring.drain().unpacked())

    reader = threading.Thread(target=read_on)
    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    reader.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    read += [*ring.drain().unpacked(), *ring.drain().unpacked()]

    for writer in range(writers):
        assert [t1 for _, t0, t1, *_ in read if t0 == writer] == list(range(each))
    assert ring.lost == 0
