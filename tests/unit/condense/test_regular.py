"""Steps that follow a model are told as the general way tells them, to the last attribute."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from argus_otel._runtime.faults import FaultLog
from argus_otel.condense import condenser, regular
from argus_otel.condense.condenser import Costs
from argus_otel.encode import ShapedSpanEncoder, StepRowsEncoder, encode_span
from argus_otel.wire import events
from argus_otel.wire.codes import OPS
from argus_otel.wire.digest import RepeatedColumns
from argus_otel.wire.identity import Compilation, Group

COMPILED = [Compilation(function="f", reason="")]
GROUPS = [
    Group(key=0xC0FFEE, description="default_pg", ranks=(0, 1), era=0, blocks_host=True),
    Group(key=0xBEEF, description="pp", ranks=(0, 1), era=0, blocks_host=False),
]


def spans_of(parts):
    """Every span as protobuf reads it, by (trace, id); attributes as a dict."""
    shaped, step_rows = ShapedSpanEncoder(), StepRowsEncoder()
    data = []
    for part in parts:
        for span in part.spans:
            data.append(
                encode_span(
                    name=span.name, trace_id=span.trace_id, span_id=span.span_id,
                    parent_span_id=span.parent_id, start_ns=span.start_ns, end_ns=span.end_ns,
                    attributes=span.attributes, error=span.error,
                )
            )  # fmt: skip
        data += [shaped.encode(spans).data for spans in part.shaped.values()]
        for rows in part.steps:
            own, below = step_rows.encode(rows)
            assert own.count + below.count == rows.spans
            data += [own.data, below.data]
    read = ScopeSpans.FromString(b"".join(data)).spans
    found = {}
    for span in read:
        attributes = {
            one.key: (one.value.WhichOneof("value"), one.value.SerializeToString())
            for one in span.attributes
        }
        assert len(attributes) == len(span.attributes)
        span.ClearField("attributes")
        found[span.trace_id, span.span_id] = (span.SerializeToString(), attributes)
    assert len(found) == len(read)
    assert len(found) == sum(part.span_count for part in parts)
    return found


def regular_steps(parts):
    return sum(len(rows.trace_ids) for part in parts for rows in part.steps)


# Of one micro-batch: whether it waits for its batch, gap before its backward in tenths of a
# millisecond, whether DDP waits in it, and its collectives: where, in tenths of the backward
# (below 0: in the forward), and what.
collectives = st.lists(
    st.tuples(st.integers(-9, 9), st.sampled_from(["all_reduce", "send", "recv", "all_gather"])),
    max_size=5,
)
micro_batches = st.tuples(st.booleans(), st.sampled_from([0, 5]), st.booleans(), collectives)
loops = st.tuples(
    st.lists(micro_batches, min_size=1, max_size=3),
    st.booleans(),  # an iteration is known
    st.booleans(),  # CPU time is known
    st.integers(0, 1),  # the group of collectives
    # What else it records: waits for collectives, phases of the user's, amounts of work.
    st.sets(st.sampled_from(["waits", "phases", "work"])),
)
# What a step has beyond the loop: jitter of its times, and something odd.
oddities = st.sampled_from(
    [None] * 12
    + ["gc", "end", "late end", "bytes", "gap", "same time", "swapped", "no cpu", "rule", "nested"]
    + ["slow", "compiled", "wait", "device", "no grad", "moved", "moved"]
    + ["module", "renamed", "less work"]
)
jitters = st.lists(st.tuples(st.integers(0, 400), oddities), min_size=4, max_size=24)


def write_step(job, loop, at_us, jitter, odd):
    """One step of a loop, in microseconds that the jitter moves; returns its end."""
    micro, has_iteration, has_cpu, group, others = loop
    rows = []
    cpu = 1000 * at_us if has_cpu and odd != "no cpu" else events.NONE

    def moment(us):
        return round(us * 1000)

    def event(kind, t0, t1=0.0, a=0, b=0, c=0, d=0):
        rows.append([kind, moment(t0), moment(t1), a, b, c, d])

    if "phases" in others:  # one before the step
        event(events.PHASE, at_us + 3, at_us + 30 + jitter / 10, 1)
    at = at_us + 50 + jitter
    for waits, gap, ddp, issued in micro:
        if waits:
            event(events.DATA, at, at + 300 + jitter, cpu, cpu, cpu + 500, cpu + 7)
            at += 320 + jitter
        forward = at
        at += 2000 + jitter
        if "work" in others:
            amounts = [(0, 4000 + jitter), (2, (1 << 60) + 1000 * jitter)]
            for what, amount in amounts[odd == "less work" :]:
                event(events.WORK, forward + 4, 0, what, amount)
        flags = events.NO_GRAD if odd == "no grad" else 0
        event(events.FORWARD, forward, at, cpu, cpu, flags)
        gap_us = 100 * gap if odd != "gap" else 100 * (5 - gap)
        backward = at if odd == "same time" else at + gap_us + 20
        at = backward + 10_000 + 3 * jitter
        for n, (place, op) in enumerate(issued):
            begin, length = (forward, 2000) if place < 0 else (backward, 10_000)
            arrival = begin + length * (abs(place) + 0.05 * n) / 10 + jitter / 20 + 1
            peer = 1 if op in {"send", "recv"} else -1
            packed = events.pack_collective(
                group, OPS.index(op), is_async=place % 2 == 0, peer=peer
            )
            size = 1024 if odd != "bytes" else 1000 + jitter
            event(events.COLLECTIVE, arrival, 0, packed, job.counts, size, job.counts)
            job.counts += 1
            if "waits" in others:  # of which some are over after the next has come
                event(events.WAIT, arrival + 2, arrival + 12 + jitter / 9, int(odd == "module"))
            if odd in {"end", "late end"}:
                row = [events.END, moment(arrival + 200), 0, group, 0, 0, job.counts - 1]
                rows.append(row)
        event(
            events.BACKWARD, backward, at, 0, events.NONE,
            (events.DDP_WAITS * ddp) | (events.NESTED * (odd == "nested")),
        )  # fmt: skip
        if "phases" in others:  # around a pass, or within
            event(events.PHASE, forward + 5, backward + 50, int(odd == "renamed"))
            event(events.PHASE, backward + 60, backward + 70 + jitter, 2)
        at += 15
    if odd == "slow":
        at += 40_000
    if odd == "gc":
        event(events.GC, at_us + 900, at_us + 1900, 2, 5)
    if odd == "wait":
        event(events.WAIT, at - 500, at - 20)
    if odd == "compiled":
        event(events.COMPILATION, at_us + 900, at_us + 950)
    event(events.OPTIMIZER, at + 20, at + 500)
    late = [row for row in rows if row[0] == events.END and odd == "late end"]
    rows = [row for row in rows if row not in late]
    # As threads record: a collective when it is issued, all else at its end.
    rows.sort(key=lambda row: row[1] if row[0] == events.COLLECTIVE else row[2] or row[1])
    if odd == "swapped" and len(rows) > 2:
        rows[0], rows[1] = rows[1], rows[0]
    issued = [row for row in rows if row[0] == events.COLLECTIVE]
    if odd == "moved" and issued:  # in time alone: from before the step to after its passes
        issued[jitter % len(issued)][1] = moment((at_us + 10, at + 510)[jitter % 2])
    end = at + 520
    mark = events.RULES.index("backward" if odd == "rule" else "optimizer")
    mark |= events.DEVICE if odd == "device" else 0
    iteration = 7 * job.ordinal if has_iteration else events.NONE
    cpu_end = cpu + 9_000_000 if cpu != events.NONE else cpu
    rows.append([events.STEP_END, moment(end), mark, job.ordinal, iteration, cpu_end, cpu_end])
    rows += late
    job.ordinal += 1
    for row in rows:
        job.rows.append((len(job.rows), *row))
    return end


def condensed(make_job, loop, jitters, at_once, ratio, *, least):
    job = make_job(
        baseline_ratio=ratio, groups=list(GROUPS), compilations=list(COMPILED), faults=FaultLog(),
        phase_names=["tokenize", "reward", "forward"],
    )  # fmt: skip
    parts = []
    at = 1_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regular, "LEAST_STEPS", least)
        for n, (jitter, odd) in enumerate(jitters):
            at = write_step(job, loop, at + jitter, jitter, odd)
            if n % at_once == at_once - 1:
                parts += job.take()
        parts += job.take()
    assert not job.faults.counts
    return parts


@given(loops, jitters, st.sampled_from([1, 5, 24]), st.sampled_from([0.0, 0.1]))
def test_a_model_changes_nothing(make_job, loop, jitters, at_once, ratio):
    """Whatever is odd about some of the steps; those without a model go the general way."""
    settled = [(jitter % 50, None) for jitter, _ in jitters[:4]]  # so that there is a model
    jitters = [*settled, *jitters]

    with_models = condensed(make_job, loop, jitters, at_once, ratio, least=1)
    without = condensed(make_job, loop, jitters, at_once, ratio, least=10**9)

    assert regular_steps(without) == 0
    assert spans_of(with_models) == spans_of(without)


DDP = (
    [(False, 5, True, [(2, "all_reduce"), (4, "all_reduce"), (6, "all_reduce")])],
    False,
    True,
    0,
    set(),
)


def ddp_steps(job, count, at_us=1_000_000):
    for n in range(count):
        at_us = write_step(job, DDP, at_us + n % 7, n % 50, None)
    return job.take()


def test_the_steps_of_a_plain_loop_follow_a_model(make_job):
    """But for the first ones, and those that tell of the groups."""
    job = make_job()
    first = ddp_steps(job, 8)

    parts = ddp_steps(job, 40, 2_000_000)

    assert regular_steps(first) == 0
    assert regular_steps(parts) == 39
    assert len(job.condenser._models._kinds) == 1
    assert job.condenser.steps_seen == 48


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("others", ["waits", "phases", "work"])
def test_steps_with_waits_or_what_the_user_adds_follow_a_model(make_job, others, group):
    """Where waits tell when the operations end, and where only the device is told to wait."""
    job = make_job(groups=list(GROUPS), phase_names=["tokenize", "reward", "forward"])
    issued = [(1, "all_reduce"), (3, "all_gather"), (4, "all_reduce"), (7, "all_reduce")]
    loop = ([(False, 5, True, issued)], False, True, group, {others})
    at = 1_000_000
    for n in range(28):
        at = write_step(job, loop, at, n, None)
        if n == 7:
            job.take()
    parts = job.take()

    assert regular_steps(parts) >= 19
    tokens = [one.tokens for part in parts for one in part.charted]
    assert tokens == [4000 + n if others == "work" else None for n in range(28 - len(tokens), 28)]


def test_columns_of_many_collectives_give_the_gil_away(make_job, monkeypatch):
    """While they are packed: every 1024 numbers, however many steps are condensed at once."""
    job = make_job()
    loop = ([(False, 5, True, [(0, "all_reduce")] * 180)], *DDP[1:])
    packed = [0]
    pack = RepeatedColumns.pack

    def count(self, start_us, duration_us, arrival_us, *others):
        packed[-1] += len(arrival_us)
        return pack(self, start_us, duration_us, arrival_us, *others)

    monkeypatch.setattr(RepeatedColumns, "pack", count)
    monkeypatch.setattr(job, "_count_pause", lambda: packed.append(0))
    at = 1_000_000
    for n in range(28):
        at = write_step(job, loop, at, n % 50, None)
        if n == 7:
            job.take()

    assert regular_steps(job.take()) >= 19
    assert sum(packed) == 20 * 180
    assert max(packed) <= 1024


@pytest.mark.parametrize("turns", [(None, "gap"), (None, None, "gap"), (None, "gap", "rule")])
def test_steps_that_take_turns_have_a_model_each(make_job, turns):
    """Of one kind: those whose gaps are long, and those that something else has ended."""
    job = make_job()
    at = 1_000_000
    for n in range(8 * len(turns)):
        at = write_step(job, DDP, at, n % 50, turns[n % len(turns)])
    job.take()
    for n in range(8 * len(turns)):
        at = write_step(job, DDP, at, n % 50, turns[n % len(turns)])

    assert regular_steps(job.take()) >= 8 * len(turns) - 1  # one may tell of the groups
    (kind,) = job.condenser._models._kinds.values()
    assert len(kind.models) == len(set(turns))


def test_a_loop_with_few_steps_a_second_spends_no_time_on_models(make_job):
    """They would never be used."""
    job = make_job()
    for n in range(10):
        ddp_steps(job, regular.LEAST_STEPS - 1, 1_000_000 + 500_000 * n)

    assert not job.condenser._models._kinds


def test_a_step_that_can_have_no_model_is_tried_once(make_job, monkeypatch):
    """A nested pass is none of the phases that a model knows."""
    job = make_job()
    tried = []
    of = regular.Model.of

    def count(*args):
        tried.append(of(*args))
        return tried[-1]

    monkeypatch.setattr(regular.Model, "of", count)
    at = 1_000_000
    for n in range(60):
        at = write_step(job, DDP, at, n % 50, "nested")
    job.take()

    assert tried == [None]


def test_times_that_coincide_by_chance_keep_no_later_step_from_a_model(make_job):
    """Though they lie in the same order otherwise."""
    job = make_job()
    (micro,), *others = DDP
    without_gap = ([(micro[0], 0, *micro[2:])], *others)
    at = 1_000_000
    for n in range(16):
        at = write_step(job, without_gap, at, n, "same time" if n < 8 else None)
    job.take()

    (kind,) = job.condenser._models._kinds.values()
    assert len(kind.models) == 1


def test_a_count_that_grows_by_a_byte_is_read_all_the_same(make_job):
    """127 and 128, 16,383 and 16,384: in one batch, and as wide as the wider one."""
    for before in (100, 16_350):
        told = []
        for least in (1, 10**9):
            job = make_job(counts=before)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(regular, "LEAST_STEPS", least)
                told.append(spans_of([*ddp_steps(job, 4), *ddp_steps(job, 26, 1_500_000)]))
        assert told[0] == told[1]


@pytest.mark.parametrize("owner", [regular.Models, regular.RegularSteps])
def test_if_columns_fail_the_steps_go_the_general_way(make_job, monkeypatch, owner):
    """None is lost, and the log says why."""
    expected = make_job()
    job = make_job(faults=FaultLog())
    told = [[*ddp_steps(one, 8)] for one in (expected, job)]

    def fail(*_, **__):
        raise OverflowError

    told[0] += ddp_steps(expected, 10, 2_000_000)
    monkeypatch.setattr(owner, "match" if owner is regular.Models else "spans", fail)
    told[1] += ddp_steps(job, 10, 2_000_000)

    assert regular_steps(told[1]) == 0
    assert "regular_steps" in job.faults.counts
    assert spans_of(told[1]) == spans_of(told[0])


def test_if_no_model_can_be_made_no_step_is_lost(make_job, monkeypatch):
    """It would only have saved time."""
    expected, job = make_job(), make_job(faults=FaultLog())
    told = spans_of([*ddp_steps(expected, 16)])

    def fail(*_, **__):
        raise OverflowError

    monkeypatch.setattr(regular.Model, "of", fail)

    assert spans_of([*ddp_steps(job, 16)]) == told
    assert job.faults.counts == {"regular_steps": 0}


def test_after_a_step_that_was_lost_the_next_says_so_though_it_follows_a_model(
    make_job, monkeypatch
):
    """Which its model has no place for."""
    job = make_job(faults=FaultLog())
    ddp_steps(job, 8)
    name = condenser.Condenser._name

    def fail_once(self, part, step):
        if step.ordinal == 12:
            raise OverflowError
        name(self, part, step)

    monkeypatch.setattr(condenser.Condenser, "_name", fail_once)
    (part,) = ddp_steps(job, 10, 2_000_000)

    assert [digest.ordinal for digest in part.digests if digest.truncated] == [13]
    assert len(part.digests) + regular_steps([part]) == 9


def test_drops_are_told_by_the_first_step_though_it_follows_a_model(make_job):
    """Once."""
    job = make_job()
    ddp_steps(job, 8)
    for n in range(5):
        write_step(job, DDP, 2_000_000 + 100_000 * n, n, None)
    rows, job.rows = job.rows, []

    drained = events.Events(b"".join(struct.pack("<8q", *row) for row in rows))
    (part,) = job.condenser.take(
        drained, wall_offset_ns=0, lost=0, costs=Costs(self_cpu_s=0.0, drops=3, memory_bytes=None)
    )

    assert [(digest.ordinal, digest.drops) for digest in part.digests] == [(8, 3)]
    assert regular_steps([part]) == 4


def test_models_are_not_hoarded(make_job):
    """Of loops whose steps differ a little, or much."""
    job = make_job()
    at = 1_000_000
    for n in range(120):
        micro = [(False, 5, True, [(2, "all_reduce")] * (n // 4))]
        for _ in range(4):
            at = write_step(job, (micro, False, False, 0, set()), at, 1, None)
    job.take()

    assert len(job.condenser._models._kinds) <= 16
