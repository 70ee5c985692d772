"""Timeline and detail: budgets that always hold, ids that never collide, marks in their place."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel._runtime.faults import FaultLog
from argus_otel.condense import detail
from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.digest import decode_digest
from argus_otel.wire.identity import Compilation, Group, UncaughtException


def flatten(parts):
    """(scope, name, trace id, span id, parent id, attributes) of every span."""
    spans = []
    for part in parts:
        spans += [
            (s.scope, s.name, s.trace_id, s.span_id, s.parent_id, dict(s.attributes))
            for s in part.spans
        ]
        for scope, span in ((scope, s) for scope, all_ in part.shaped.items() for s in all_):
            shape = span.shape
            varying = dict(zip((*shape.ints, *shape.doubles), span.values, strict=True))
            assert shape.scope == scope
            spans.append((scope, shape.name, *span[1:4], dict(shape.constants) | varying))
            assert span.end_ns >= span.start_ns
        for row in part.rows:
            for n in range(row.span_ids.size):
                varying = {k: v[n] for k, v in {**row.ints, **row.doubles}.items()}
                spans.append(
                    (
                        row.scope,
                        row.name,
                        row.trace_ids[n].tobytes(),
                        row.span_ids[n : n + 1].tobytes(),
                        row.parent_ids[n : n + 1].tobytes(),
                        dict(row.constants) | varying,
                    )
                )
                assert row.end_ns[n] >= row.start_ns[n]
    return spans


def timeline(spans):
    return [span for span in spans if span[0] == scopes.TIMELINE]


def digests_of(spans):
    return [span for span in spans if span[1] == names.SPAN_RANK_STEP]


# Events of a step in any mixture: kind, begin, duration, and a number for all else.
moments = st.lists(
    st.tuples(
        st.sampled_from(
            [
                events.COLLECTIVE, events.END, events.WAIT, events.DATA, events.FORWARD,
                events.BACKWARD, events.OPTIMIZER, events.PHASE, events.GC, events.EXCEPTION,
                events.WORK, events.VOID, events.COMPILATION,
            ]
        ),
        st.integers(0, 90),
        st.integers(0, 30),
        st.integers(0, 11),
    ),
    max_size=120,
)  # fmt: skip
steps = st.lists(moments, min_size=1, max_size=4)


COMPILATIONS = [Compilation(function=f"f{n % 6}", reason=f"guard {n}") for n in range(12)]


def write(job, moments, at_ms):
    """One step of 100 ms; events in the order of their ends, as threads would record them."""
    for kind, begin, duration, n in sorted(moments, key=lambda m: m[1] + m[2]):
        t0, t1 = at_ms + begin, min(at_ms + begin + duration, at_ms + 100)
        if kind == events.COLLECTIVE:
            op = ("all_reduce", "send", "recv", "barrier")[n % 4]
            peer = n % 3 - 1 if op in {"send", "recv"} else -1
            job.collective(t0, op=op, is_async=n > 5, group=n % 2, op_id=n, peer=peer)
        elif kind in {events.PHASE, events.COMPILATION}:
            job.event(kind, t0, t1, a=n)
        elif kind == events.EXCEPTION:
            job.event(kind, t0, 0, a=n)
        elif kind == events.WORK:
            job.event(kind, t0, 0, a=n % 3, b=n)
        elif kind == events.END:
            job.event(kind, t0, 0, a=n % 2, d=n)
        elif kind == events.VOID:
            job.event(kind, 0, 0)
        else:
            job.event(kind, t0, t1, a=0, b=events.NONE, c=n % 8 if kind != events.GC else 0)
    job.end(at_ms + 100)


@given(steps, st.sampled_from([0.0, 1.0]))
def test_whatever_a_step_holds_its_timeline_stays_within_its_budget(make_job, steps, ratio):
    """Ids are distinct, parents are in the trace, the digest can be read back."""
    job = make_job(
        baseline_ratio=ratio,
        phase_names=[f"phase {n}" for n in range(12)],
        exceptions=[UncaughtException(type_name=f"E{n}", frames=()) for n in range(12)],
        compilations=COMPILATIONS,
        groups=[
            Group(key=n + 1, description="g", ranks=(0, 1), era=0, blocks_host=True)
            for n in range(2)
        ],
    )
    for n, step in enumerate(steps):
        write(job, step, 1000 + 100 * n)

    spans = flatten(job.take())

    per_trace = Counter(span[2] for span in timeline(spans))
    assert max(per_trace.values(), default=0) <= ids.TIMELINE_SPANS_PER_RANK
    assert len({(span[2], span[3]) for span in spans}) == len(spans)
    known = {(span[2], span[3]) for span in spans}
    assert all((span[2], span[4]) in known for span in spans if span[4] not in {None, bytes(8)})
    digests = [decode_digest(span[5], 0, 10**8) for span in digests_of(spans)]
    assert [digest.ordinal for digest in digests] == list(range(len(steps)))
    for span, digest in zip(digests_of(spans), digests, strict=True):
        mine = [s for s in timeline(spans) if s[2] == span[2]]
        marks = [s[5][names.ARGUS_KEEP] for s in mine if names.ARGUS_KEEP in s[5]]
        assert set(marks) <= {digest.keep}
        assert bool(marks) == (digest.keep is not None and bool(mine))
        assert digest.busy_s is None or 0 <= digest.busy_s <= digest.step_s


@given(steps)
def test_whatever_a_step_holds_it_is_the_same_alone_and_among_others(make_job, steps):
    """But for ends that are told late: those of a later batch find their step gone."""
    told = []
    for at_once in (True, False):
        job = make_job(
            baseline_ratio=1.0,
            phase_names=[f"phase {n}" for n in range(12)],
            exceptions=[UncaughtException(type_name=f"E{n}", frames=()) for n in range(12)],
            compilations=COMPILATIONS,
            groups=[
                Group(key=n + 1, description="g", ranks=(0, 1), era=0, blocks_host=n == 0)
                for n in range(2)
            ],
        )
        parts = []
        for n, step in enumerate(steps):
            write(job, [moment for moment in step if moment[0] != events.END], 1000 + 100 * n)
            parts += [] if at_once else job.take()
        told.append(flatten([*parts, *job.take()]))
        for *_, attributes in told[-1]:
            attributes.pop(names.ARGUS_SELF_CPU, None)  # shared among the steps of a batch

    together, apart = told

    def by_id(span):
        return span[2], span[3]

    assert sorted(together, key=by_id) == sorted(apart, key=by_id)


def test_ten_thousand_collectives_fold_and_fit(make_job):
    """Pipelines with many micro-batches; arrivals remain."""
    job = make_job(baseline_ratio=1.0)
    job.forward(1000, 1100)
    for n in range(10_000):
        job.collective(1100 + n * 0.01, is_async=True, op=("all_gather", "reduce_scatter")[n % 2])
    job.backward(1100, 1200).optimizer(1200, 1201).end(1201)

    spans = flatten(job.take())

    (digest_span,) = digests_of(spans)
    digest = decode_digest(digest_span[5], 0, 201_000_000)
    values = [value for value in digest_span[5].values() if isinstance(value, str)]
    assert digest.sync.folded
    assert digest.sync.count.tolist() == [5000, 5000]
    assert digest.sync.arrival_us.tolist() == [100_000, 100_010]
    assert digest.sync.last_arrival_us.tolist() == [199_980, 199_990]
    assert max(map(len, values)) <= 2000
    assert sum(map(len, values)) < 4096
    assert len(timeline(spans)) <= ids.TIMELINE_SPANS_PER_RANK
    assert len([span for span in spans if span[0] == scopes.DETAIL]) == 900


def test_many_phases_fold_by_name(make_job):
    """A hundred micro-batches are two spans and two rows."""
    job = make_job()
    for n in range(100):
        job.forward(1000 + n, 1000.4 + n).backward(1000.4 + n, 1001 + n)
    job.optimizer(1100, 1101).end(1101)

    spans = flatten(job.take())

    folded = {span[1]: span[5] for span in timeline(spans)}
    digest = decode_digest(digests_of(spans)[0][5], 0, 101_000_000)
    assert folded["forward"][names.ARGUS_FOLD_COUNT] == 100
    assert folded["backward"][names.ARGUS_FOLD_DURATION] == pytest.approx(0.06)
    assert digest.phases.folded
    assert digest.phases.duration_us.tolist() == [40_000, 60_000, 1_000]


def test_collectives_hang_below_the_phase_they_were_issued_in(make_job):
    """Where that phase is alone under its name."""
    job = make_job()
    job.forward(1000, 1010).collective(1015, is_async=True)
    job.backward(1010, 1020, events.DDP_WAITS).optimizer(1020, 1021).end(1021)

    spans = {span[1]: span for span in timeline(flatten(job.take()))}

    assert spans["all_reduce"][4] == spans["backward"][3]
    assert spans["all_reduce"][5][names.ARGUS_COLLECTIVE_END_KNOWN] is False


def test_detail_is_the_same_whether_it_is_made_one_by_one_or_in_rows(make_job, monkeypatch):
    """How many collectives a step has decides which is cheaper, and nothing else."""

    def detail_of(few):
        monkeypatch.setattr(detail, "_FEW", few)
        job = make_job(baseline_ratio=1.0)
        job.forward(1000, 1010)
        for n in range(30):
            op = ("all_reduce", "send", "recv")[n % 3]
            job.collective(1001 + n / 10, op=op, peer=1 if n % 3 else -1)
            if n % 2:
                job.wait(1001 + n / 10, 1001 + n / 10 + 0.05)
        job.backward(1010, 1020).end(1021)
        parts = job.take()
        assert any(part.rows for part in parts) == (few == 0)
        spans = [span for span in flatten(parts) if span[0] == scopes.DETAIL]
        return sorted(spans, key=lambda span: span[3])

    one_by_one = detail_of(100)
    assert len(one_by_one) == 30
    assert one_by_one == detail_of(0)


def test_detail_is_made_for_kept_steps_only(make_job):
    """Every collective, with its peer where it has one."""
    job = make_job(exceptions=[UncaughtException(type_name="OSError", frames=())])
    for step in range(2):
        at = 1000 + 50 * step
        job.forward(at, at + 10).collective(at + 2).wait(at + 2, at + 3)
        job.collective(at + 4, op="send", peer=1).wait(at + 4, at + 5)
        job.backward(at + 10, at + 20)
        if step == 1:
            job.event(events.EXCEPTION, at + 21, 0, a=0)
        job.end(at + 22)

    parts = job.take()

    spans = flatten(parts)
    detail = [span for span in spans if span[0] == scopes.DETAIL]
    step_trace = digests_of(spans)[1][2]
    assert {(span[1], span[2]) for span in detail} == {
        ("all_reduce", step_trace),
        ("send", step_trace),
    }
    assert next(s for s in detail if s[1] == "send")[5][names.ARGUS_COLLECTIVE_PEER] == 1


def test_exceptions_of_one_step_are_told_apart(make_job):
    """Each at its own time; two of them, whatever the number."""
    job = make_job(exceptions=[UncaughtException(type_name=f"E{n}", frames=()) for n in range(4)])
    job.forward(1000, 1010).backward(1010, 1020)
    for n in range(4):
        job.event(events.EXCEPTION, 1011 + n, 0, a=n)
    job.end(1021)

    raised = [s for part in job.take() for s in part.spans if s.name == names.SPAN_EXCEPTION]

    assert [span.start_ns for span in raised] == [1011 * 10**6, 1012 * 10**6]
    assert [span.error for span in raised] == ["E0", "E1"]
    assert len({span.span_id for span in raised}) == 2


def test_an_exception_that_ends_the_job_is_in_the_step_that_never_ended(make_job):
    """Sent at exit, though the step has no digest."""
    job = make_job(exceptions=[UncaughtException(type_name="OSError", frames=("a.py:1 f",))])
    job.forward(1000, 1010).backward(1010, 1020).end(1021)
    job.forward(1030, 1035).event(events.EXCEPTION, 1036, 0, a=0)
    job.take()

    identity, spans = job.condenser.take_exceptions(0)

    assert spans[0].trace_id == ids.step_trace_id(identity.nonce, 0, 1, 0)
    assert spans[0].attributes["error.type"] == "OSError"
    assert job.condenser.take_exceptions(0) is None


def test_an_exception_at_exit_is_in_its_own_step_where_the_one_before_was_lost(make_job):
    """Which step it is follows from the boundary, not from what could be made of the step."""
    job = make_job(
        faults=FaultLog(), exceptions=[UncaughtException(type_name="OSError", frames=())]
    )
    job.forward(1000, 1010).end(1021)
    job.forward(1030, 1035).collective(1036, group=7).end(1041)
    job.event(events.EXCEPTION, 1046, 0, a=0)
    job.take()

    identity, spans = job.condenser.take_exceptions(0)

    assert job.faults.counts["condense"]
    assert spans[0].trace_id == ids.step_trace_id(identity.nonce, 0, 2, 0)


def test_only_rank_0_writes_the_root_of_a_shared_trace(make_job, make_identity):
    """A rank that shares no trace with others writes its own."""

    def roots(**who):
        job = make_job(identities=[make_identity(**who)])
        job.forward(1000, 1010).backward(1010, 1020).end(1021)
        return [span[1] for span in flatten(job.take())].count(names.SPAN_TRAIN_STEP)

    assert roots(rank=0) == 1
    assert roots(rank=1) == 0
    assert roots(rank=1, nonce_local=True) == 1
    assert roots(rank=1, world_size=1) == 1


def test_after_an_overflow_the_step_is_marked_and_its_neighbours_are_right(job):
    """What the gap swallowed is neither a step nor between."""
    job.forward(1000, 1010).backward(1010, 1020).end(1021)
    assert [digest.truncated for digest in job.digests()] == [False]
    job.ordinal = 40
    job.backward(2990, 3000).end(3001)
    job.forward(3010, 3020).backward(3020, 3030).end(3031)

    first, second = job.digests(lost=500)

    assert (first.ordinal, first.truncated, first.between_s) == (40, True, 0)
    assert (second.ordinal, second.truncated) == (41, False)
    assert second.between_s == pytest.approx(0.009)


def test_an_overflow_that_swallows_the_beginning_swallows_no_later_step(make_job):
    """An hour of data preparation before the first step, through a DataLoader."""
    job = make_job()
    job.rows.clear()  # the ring has gone round: the identity's event is gone
    job.forward(3010, 3020).backward(3020, 3030).end(3031)

    digests = job.digests(lost=70_000)

    assert [digest.ordinal for digest in digests] == [0]


def test_a_loop_without_steps_is_bounded(make_job):
    """Events that no step ever claims."""
    job = make_job(capacity=64)
    for n in range(200):
        job.data(1000 + n, 1001 + n)
    job.take()

    assert job.condenser.held_events <= 64
    assert job.faults.counts["step_too_large"] > 0
    job.forward(2000, 2010).backward(2010, 2020).end(2021)
    assert [digest.truncated for digest in job.digests()] == [True]


def test_groups_are_told_on_first_use_and_then_rarely(make_job):
    """For readers that start in the middle."""
    job = make_job()
    for step in range(65):
        at = 1000 + 50 * step
        job.forward(at, at + 10).collective(at + 2).wait(at + 2, at + 3).backward(at + 10, at + 20)
        job.end(at + 21)

    told = [digest.ordinal for digest in job.digests() if digest.group_info]

    assert told == [0, 32, 64]


def test_the_counts_at_the_boundary_are_those_of_the_first_collective(make_job):
    """Peers whose counts differ there are not at the same step."""
    job = make_job()
    for step in range(3):
        at = 1000 + 50 * step
        job.forward(at, at + 10)
        for n in range(4):
            job.collective(at + 2 + n).wait(at + 2 + n, at + 3 + n)
        job.backward(at + 10, at + 20).end(at + 21)

    assert [digest.sync.start_counts for digest in job.digests()] == [[0], [4], [8]]


def test_columns_of_an_empty_step_are_empty(job):
    """A boundary and nothing else."""
    job.end(1010)

    (digest,) = job.digests()

    assert digest.sync.group == []
    assert digest.phases.name == []
    assert digest.step_s == pytest.approx(0.010)


def test_what_was_compiled_is_a_span_a_function_and_the_rest_is_one(make_job):
    """Longest first, with the time of all its compilations; the step is kept for everybody."""
    job = make_job(
        compilations=[
            Compilation(function=name, reason=why)
            for name, why in (("a", ""), ("b", "size"), ("b", "size"), ("c", ""), ("d", ""))
        ]
    )
    for place, (t0, t1) in enumerate(
        [(1001, 1002), (1003, 1008), (1010, 1015), (1020, 1023), (1030, 1032)]
    ):
        job.event(events.COMPILATION, t0, t1, a=place)
    job.forward(1001, 1040).backward(1040, 1060).optimizer(1060, 1061).end(1062)

    (part,) = job.take()

    spans = [
        span for span in part.shaped[scopes.TIMELINE] if span.shape.name == names.SPAN_COMPILATION
    ]
    assert [
        (
            span.shape.constants["code.function.name"],
            span.shape.constants.get(names.ARGUS_COMPILATION_REASON),
            span.values,
        )
        for span in spans
    ] == [
        ("b", "size", (2, pytest.approx(0.010))),
        ("c", None, (1, pytest.approx(0.003))),
        ("other functions", None, (2, pytest.approx(0.003))),
    ]
    assert part.digests[0].keep == "event"
