"""What is in a step, what came before it, and who made it wait: exact numbers from events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel._runtime.faults import FaultLog
from argus_otel.condense.condenser import Condenser
from argus_otel.condense.layout import layout_of
from argus_otel.condense.operations import remembered_operations
from argus_otel.wire import events
from argus_otel.wire.codes import PHASES
from argus_otel.wire.identity import Group

MS = 1_000_000
START_MS = 1_000
BACKWARD = PHASES.index("backward")


def phases_ms(digest):
    return [
        (digest.phases.names[name], start / 1000, duration / 1000)
        for name, start, duration in zip(
            digest.phases.name,
            digest.phases.start_us,
            digest.phases.duration_us,
            strict=True,
        )
    ]


def ms(seconds):
    return None if seconds is None else round(seconds * 1000, 3)


def durations_ms(digest):
    return [None if d < 0 else d / 1000 for d in digest.sync.duration_us]


def test_the_wait_for_the_batch_belongs_to_the_step(job):
    """The forward that follows works on it."""
    job.data(1005, 1010, cpu_ms=3).forward(1010, 1030).backward(1030, 1060)
    job.optimizer(1060, 1065).end(1066, cpu_ms=50)

    (digest,) = job.digests()

    assert ms(digest.between_s) == 5
    assert ms(digest.step_s) == 61
    assert ms(digest.data_wait_s) == 5
    assert ms(digest.cpu_s) == 47
    assert digest.run_delay_s is None
    assert phases_ms(digest) == [
        ("between", -5, 5),
        ("data.wait", 0, 5),
        ("forward", 5, 20),
        ("backward", 25, 30),
        ("optimizer.step", 55, 5),
    ]


def test_evaluation_and_its_waits_are_between_steps(job):
    """Forwards without gradients, and the batches for them."""
    job.data(1001, 1002).forward(1002, 1010).backward(1010, 1020).optimizer(1020, 1021).end(1022)
    job.data(1025, 1030).forward(1030, 1040, events.NO_GRAD)
    job.data(1040, 1045).forward(1045, 1055, events.NO_GRAD)
    job.data(1060, 1064).forward(1064, 1074).backward(1074, 1094).optimizer(1094, 1095).end(1096)

    digest = job.digests()[1]

    assert ms(digest.between_s) == 38
    assert ms(digest.step_s) == 36
    assert ms(digest.data_wait_s) == 4
    assert [name for name, _, _ in phases_ms(digest)] == [
        "between", "data.wait", "forward", "backward", "optimizer.step",
    ]  # fmt: skip


def test_an_optimizer_that_follows_the_boundary_is_no_beginning(job):
    """Muon has ended the step, AdamW steps after it; the wait for the batch is the next step's."""
    job.forward(1000, 1010).backward(1010, 1020).optimizer(1020, 1022).end(1022)
    job.optimizer(1022, 1025).data(1026, 1036).backward(1040, 1060).optimizer(1060, 1062).end(1062)

    digest = job.digests()[1]

    assert (ms(digest.between_s), ms(digest.step_s), ms(digest.data_wait_s)) == (4, 36, 10)
    assert [name for name, _, _ in phases_ms(digest)] == [
        "between", "data.wait", "forward", "backward", "optimizer.step",
    ]  # fmt: skip


def test_passes_inside_an_optimizer_begin_after_the_wait_for_their_batch(job):
    """LBFGS calls its closure several times."""
    job.data(1002, 1006)
    job.backward(1010, 1012, events.NESTED).backward(1014, 1016, events.NESTED)
    job.optimizer(1008, 1020).end(1020)

    (digest,) = job.digests()

    assert phases_ms(digest) == [("between", -2, 2), ("data.wait", 0, 4), ("optimizer.step", 6, 12)]


@pytest.mark.parametrize("kind", [events.FORWARD, events.DATA])
def test_what_began_before_the_boundary_is_no_beginning(job, kind):
    """A boundary inside a pass (a step that was set by hand in a callback): never negative."""
    job.forward(1000, 1010).backward(1010, 1020).end(1030)
    job.event(kind, 1025, 1035).backward(1040, 1050).end(1060)

    digest = job.digests()[1]

    assert (ms(digest.between_s), ms(digest.step_s)) == (0, 30)
    assert "between" not in [name for name, _, _ in phases_ms(digest)]


marks = st.tuples(
    st.sampled_from(
        [
            events.DATA, events.FORWARD, events.BACKWARD, events.OPTIMIZER, events.WAIT,
            events.GC, events.PHASE, events.COLLECTIVE, events.STEP_END,
        ]
    ),
    st.integers(900, 1100),
    st.integers(900, 1100),
    st.integers(0, 7),
)  # fmt: skip


@given(st.lists(marks, max_size=40), st.sampled_from([1, 3, 40]))
def test_in_whatever_order_events_come_no_time_is_negative(make_job, rows, at_once):
    """Threads record at their own pace, and a boundary can fall anywhere."""
    job = make_job(phase_names=["rollout"])
    parts = job.take()
    for n, (kind, t0, t1, flags) in enumerate(rows):
        if kind == events.STEP_END:
            job.end(t0)
        elif kind == events.COLLECTIVE:
            job.collective(t0, is_async=flags > 3)
        else:
            job.event(kind, t0, t1, 0, events.NONE, flags if kind != events.PHASE else 0)
        if n % at_once == 0:
            parts += job.take()
    parts += job.take()

    ends = [START_MS * MS]
    for digest in (digest for part in parts for digest in part.digests):
        assert digest.between_s >= 0
        assert ends[-1] <= digest.start_ns <= digest.end_ns
        assert digest.between_s == pytest.approx((digest.start_ns - ends[-1]) * 1e-9)
        ends.append(digest.end_ns)
        assert digest.data_wait_s >= 0
        assert digest.gc_s >= 0
        assert digest.busy_s is None or 0 <= digest.busy_s <= digest.step_s
        assert all(us >= 0 for us in digest.phases.duration_us)
        assert all(us >= -1 for us in digest.sync.duration_us)
    assert all(
        span.end_ns >= span.start_ns
        for part in parts
        for spans in part.shaped.values()
        for span in spans
    )
    assert all((row.end_ns >= row.start_ns).all() for part in parts for row in part.rows)
    assert len(ends) - 1 == sum(kind == events.STEP_END for kind, *_ in rows)


def test_without_a_loader_the_step_begins_at_its_first_forward(job):
    """Synthetic batches."""
    job.forward(1004, 1010, cpu_ms=1).backward(1010, 1020).optimizer(1020, 1021).end(1022, cpu_ms=9)

    (digest,) = job.digests()

    assert (ms(digest.between_s), ms(digest.step_s), ms(digest.cpu_s)) == (4, 18, 8)


def test_a_plain_modules_forward_is_what_lies_before_the_backward(job):
    """It has no hook; two micro-batches have two."""
    job.data(1002, 1004).backward(1010, 1020).backward(1026, 1036).optimizer(1036, 1037).end(1037)

    (digest,) = job.digests()

    assert phases_ms(digest)[1:] == [
        ("data.wait", 0, 2),
        ("forward", 2, 6),
        ("backward", 8, 10),
        ("forward", 18, 6),
        ("backward", 24, 10),
        ("optimizer.step", 34, 1),
    ]


def test_waiting_for_a_synchronous_collective_is_not_busy(job):
    """And its end is known: the wait's."""
    job.forward(1000, 1010).collective(1004).wait(1004, 1009)
    job.backward(1010, 1020).optimizer(1020, 1021).end(1021)

    (digest,) = job.digests()

    assert durations_ms(digest) == [5]
    assert (ms(digest.step_s), ms(digest.busy_s)) == (21, 16)


def test_ddps_tail_is_not_busy(job):
    """The reducer waits in C++ from the last bucket's arrival to the backward's end."""
    job.forward(1000, 1010).collective(1015, is_async=True).collective(1022, is_async=True)
    job.backward(1010, 1030, events.DDP_WAITS).optimizer(1030, 1031).end(1031)

    (digest,) = job.digests()

    assert (ms(digest.step_s), ms(digest.busy_s)) == (31, 23)
    assert durations_ms(digest) == [None, None]
    assert list(digest.sync.phase) == [BACKWARD] * 2


def test_ddps_wait_for_buffers_is_not_busy(job):
    """Broadcast in C++ before the forward; the wait is timed around it."""
    job.collective(1002, op="broadcast", is_async=True).wait(1001, 1005, by_module=True)
    job.forward(1000, 1010).collective(1015, is_async=True)
    job.backward(1010, 1020, events.DDP_WAITS).optimizer(1020, 1021).end(1021)

    (digest,) = job.digests()

    assert ms(digest.busy_s) == 21 - 4 - 5


def test_busy_is_unknown_where_something_waits_unseen(job):
    """A functional collective waits in C++, for a time that nobody knows."""
    job.forward(1000, 1010).collective(1004, is_async=True)
    job.backward(1010, 1020).optimizer(1020, 1021).end(1021)

    (digest,) = job.digests()

    assert digest.busy_s is None


def test_an_asynchronous_collective_that_is_waited_for_later_is_accounted_for(job):
    """Only what the rank really stood still is taken off."""
    job.forward(1000, 1010).collective(1004, is_async=True)
    job.backward(1010, 1020).wait(1020, 1022).optimizer(1022, 1023).end(1023)

    (digest,) = job.digests()

    assert ms(digest.busy_s) == 21
    assert durations_ms(digest) == [None]


def test_on_an_accelerator_host_times_do_not_tell_who_waits(job):
    """The host runs ahead of the device."""
    job.forward(1000, 1010).backward(1010, 1020).optimizer(1020, 1021)
    job.end(1021, flags=events.DEVICE)

    (digest,) = job.digests()

    assert digest.busy_s is None


def test_a_step_without_collectives_is_busy_throughout(job):
    """Nobody to wait for."""
    job.forward(1000, 1010).backward(1010, 1020).optimizer(1020, 1021).end(1021)

    assert ms(job.digests()[0].busy_s) == 21


def test_true_ends_are_matched_by_group_and_operation(job):
    """Where callbacks were asked for."""
    job.forward(1000, 1010)
    job.collective(1012, is_async=True, op_id=7).collective(1014, is_async=True, op_id=8)
    job.event(events.END, 1019, 0, a=0, d=8).event(events.END, 1017, 0, a=0, d=7)
    job.event(events.END, 1018, 0, a=1, d=8)
    job.backward(1010, 1020, events.DDP_WAITS).optimizer(1020, 1021)
    job.end(1021, flags=events.ENDS_CAPTURED)

    (digest,) = job.digests()

    assert digest.ends_captured
    assert durations_ms(digest) == [5, 5]


def test_a_callback_that_came_late_ends_nothing_after_the_wait_for_it(job):
    """It had to wait for the GIL; by then the backward, or Work.wait, was over."""
    job.forward(1000, 1010).collective(1002, op_id=1).wait(1002, 1004)
    job.collective(1012, is_async=True, op_id=2).backward(1010, 1020, events.DDP_WAITS)
    job.event(events.END, 1021, 0, a=0, d=1).event(events.END, 1022, 0, a=0, d=2)
    job.optimizer(1022, 1023).end(1023, flags=events.ENDS_CAPTURED)

    assert durations_ms(job.digests()[0]) == [2, 8]


def test_a_callback_that_came_after_the_step_ends_its_operation_all_the_same(job):
    """While both are in one batch."""
    job.forward(1000, 1010).collective(1012, is_async=True, op_id=2)
    job.backward(1010, 1020, events.DDP_WAITS).optimizer(1020, 1021)
    job.end(1021, flags=events.ENDS_CAPTURED).event(events.END, 1022, 0, a=0, d=2)

    assert durations_ms(job.digests()[0]) == [8]


def test_waits_and_callbacks_of_a_group_on_a_device_end_nothing(make_job):
    """NCCL's wait is over once the device knows of it; its callback, once it is enqueued."""
    nccl = Group(key=1, description="default_pg", ranks=(0, 1), era=0, blocks_host=False)
    job = make_job(groups=[nccl])
    job.forward(1000, 1010).collective(1002, op_id=1).wait(1002, 1003)
    job.collective(1012, is_async=True, op_id=2).event(events.END, 1013, 0, a=0, d=2)
    job.backward(1010, 1020, events.DDP_WAITS).optimizer(1022, 1023)
    job.end(1023, flags=events.ENDS_CAPTURED)

    (digest,) = job.digests()

    assert durations_ms(digest) == [None, None]
    assert digest.busy_s is None


def test_ends_of_a_group_on_the_host_stand_beside_those_of_one_on_a_device(make_job):
    """A gloo group for checkpoints, next to NCCL."""
    gloo = Group(key=1, description="default_pg", ranks=(0, 1), era=0, blocks_host=True)
    job = make_job(groups=[gloo, replace(gloo, key=2, blocks_host=False)])
    job.forward(1000, 1010)
    for group in (0, 1):
        at = 1002 + 4 * group
        job.collective(at, group=group, op_id=1).wait(at, at + 3)
        job.event(events.END, at + 2, 0, a=group, d=1)
    job.backward(1010, 1020).optimizer(1022, 1023).end(1023, flags=events.ENDS_CAPTURED)

    assert durations_ms(job.digests()[0]) == [2, None]


def test_collections_between_steps_are_not_the_steps(job):
    """Only what falls into the step is charged to it."""
    job.event(events.GC, 1001, 1003, 2, 10)
    job.forward(1010, 1020).event(events.GC, 1012, 1015, 2, 10).event(events.GC, 1016, 1017, 0, 1)
    job.backward(1020, 1030).optimizer(1030, 1031).end(1031)

    (digest,) = job.digests()

    assert (ms(digest.gc_s), digest.gc_count) == (4, 2)


def test_steps_do_not_depend_on_how_the_events_were_batched(make_job):
    """One event at a time gives what all at once give."""

    def write(job):
        for step in range(3):
            at = 1000 + 50 * step
            job.data(at + 1, at + 4).forward(at + 4, at + 10).collective(at + 12, is_async=True)
            job.backward(at + 10, at + 20, events.DDP_WAITS).optimizer(at + 20, at + 21)
            job.end(at + 22)

    together, apart = make_job(), make_job()
    write(together)
    write(apart)
    expected = [
        (d.ordinal, ms(d.between_s), ms(d.busy_s), phases_ms(d)) for d in together.digests()
    ]
    rows, apart.rows = apart.rows, []
    got = []
    for row in rows:
        apart.rows = [row]
        got += [(d.ordinal, ms(d.between_s), ms(d.busy_s), phases_ms(d)) for d in apart.digests()]

    assert got == expected
    assert [ordinal for ordinal, *_ in got] == [0, 1, 2]


@pytest.mark.parametrize("rule", events.RULES)
def test_the_digest_says_what_ended_the_step(job, rule):
    """So that a reader can tell a guess from a loop that said so."""
    job.forward(1000, 1010).backward(1010, 1020).end(1021, rule=rule)

    assert job.digests()[0].end_rule == rule


def test_a_receive_from_whoever_comes_first_is_on_no_channel(job):
    """Nobody knows the sender when the call is made; the step is told all the same."""
    job.forward(1000, 1010).collective(1004, op="recv").collective(1006, op="recv", peer=1)
    job.backward(1010, 1020).optimizer(1020, 1021).end(1021)

    (part,) = job.take()
    (digest,) = part.digests

    assert digest.sync.peer == [-1, 1]
    assert [channel[1:3] for channel in digest.sync.channels] == [(1, 0)]
    assert part.spans


def test_steps_that_cannot_be_condensed_cost_no_later_ones(make_job):
    """They are counted, and the next digest says that something is missing."""
    job = make_job(faults=FaultLog())
    job.forward(1000, 1010).collective(1004, group=7).end(1021)

    assert job.digests() == []
    assert job.faults.counts["condense"] == 3
    job.forward(1030, 1040).collective(1034).end(1041)
    (digest,) = job.digests()
    assert (digest.ordinal, digest.truncated, ms(digest.between_s)) == (1, True, 9)
    assert digest.group_info


def test_a_step_that_cannot_be_condensed_costs_no_other_of_its_batch(make_job):
    """The one before it, and the one after it."""
    job = make_job(faults=FaultLog())
    for step in range(3):
        at = 1000 + 30 * step
        job.forward(at, at + 10).collective(at + 4, group=7 if step == 1 else 0).end(at + 21)

    digests = job.digests()

    assert [(digest.ordinal, digest.truncated) for digest in digests] == [(0, False), (2, True)]
    assert job.faults.counts["condense"] == 3


@pytest.mark.parametrize("stage", ["_measure", "_name", "_draw", "_digest", "_pack"])
def test_whichever_stage_a_step_fails_in_the_others_of_its_batch_are_whole(
    make_job, monkeypatch, stage
):
    """And the one after it says that something is missing; drops are told once."""
    job = make_job(faults=FaultLog())
    work = getattr(Condenser, stage)

    def fail_once(self, part, step):
        if step.ordinal == 1:
            raise OverflowError
        work(self, part, step)

    monkeypatch.setattr(Condenser, stage, fail_once)
    for step in range(4):
        at = 1000 + 30 * step
        job.forward(at, at + 10).collective(at + 4).end(at + 21)
    (part,) = job.take()

    digests = part.digests
    assert [(digest.ordinal, digest.truncated) for digest in digests] == [
        (0, False), (2, True), (3, False),
    ]  # fmt: skip
    assert [span.attributes["argus.step.ordinal"] for span in part.spans] == [0, 2, 3]
    traces = {span.trace_id for spans in part.shaped.values() for span in spans}
    assert traces == {span.trace_id for span in part.spans}
    assert job.faults.counts["condense"] == 3


def test_the_step_after_one_that_was_lost_says_so_however_many_come_at_once(make_job, monkeypatch):
    """Steps are condensed 32 at a time; the first of the next ones follows the last of those."""
    job = make_job(faults=FaultLog())
    digest = Condenser._digest

    def fail_once(self, part, step):
        if step.ordinal == 31:
            raise OverflowError
        digest(self, part, step)

    monkeypatch.setattr(Condenser, "_digest", fail_once)
    for step in range(40):
        at = 1000 + 30 * step
        job.forward(at, at + 10).end(at + 21)

    assert [digest.ordinal for digest in job.digests() if digest.truncated] == [32]
    job.forward(2200, 2210).end(2221)
    assert [digest.truncated for digest in job.digests()] == [False]


def test_the_trainer_may_have_the_gil_after_each_step_and_within_large_ones(make_job):
    """Five thousand collectives are not worked on in one go."""
    job = make_job()
    for step in range(4):
        job.forward(1000 + 10 * step, 1005 + 10 * step).end(1006 + 10 * step)
    job.take()
    small, job.pauses = job.pauses, 0
    for n in range(5000):
        job.collective(1040 + n * 0.01, is_async=True)
    job.end(1100)
    job.take()

    assert small >= 4
    assert job.pauses >= 5000 / 500


def test_a_group_that_is_too_long_to_tell_is_left_out_and_counted(make_job):
    """Once; the others of the step are told."""
    scattered = tuple(n * n for n in range(1000))
    job = make_job(
        groups=[
            Group(key=n + 1, description="g", ranks=ranks, era=0, blocks_host=True)
            for n, ranks in enumerate((scattered, tuple(range(0, 10_000, 8))))
        ]
    )
    for at in (1000, 1100):
        job.forward(at, at + 1).collective(at + 2).collective(at + 3, group=1).end(at + 4)

    told = [digest.group_info for digest in job.digests()]

    assert told == [("0000000000000002|g|0-9992/8",), ()]
    assert job.faults.counts["group_info_too_long"] == 1


def test_a_group_that_is_made_later_is_known_by_its_steps(make_job):
    """Whether it blocks the host is looked up anew when there are more groups."""
    job = make_job()
    job.forward(1000, 1010).collective(1002).wait(1002, 1004).end(1011)
    (first,) = job.digests()
    job.groups.append(Group(key=5, description="nccl", ranks=(0, 1), era=0, blocks_host=False))
    job.forward(1020, 1030).collective(1022, group=1).wait(1022, 1024).end(1031)
    (second,) = job.digests()

    assert (durations_ms(first), durations_ms(second)) == ([2], [None])
    assert job.condenser._blocks(job.groups) is job.condenser._blocks(job.groups)


def test_shapes_of_past_steps_are_not_hoarded(make_job):
    """A loop whose steps all differ would fill memory that is the user's."""
    job = make_job()
    for step in range(40):
        at = 1000 + 100 * step
        for n in range(step):
            job.collective(at + n)
        job.end(at + 90)

    assert len(job.digests()) == 40
    assert layout_of.cache_info().currsize <= 32
    assert remembered_operations.cache_info().currsize <= 16
