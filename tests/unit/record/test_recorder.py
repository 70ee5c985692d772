"""Tables beside the ring: groups and their keys, phase names, exceptions; the capture plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argus_otel._runtime.faults import FaultLog
from argus_otel.record.capture import END_COST_FLOOR_NS, CapturePlan
from argus_otel.record.recorder import Recorder
from argus_otel.record.ring import EventRing
from argus_otel.wire.identity import Identity, UncaughtException
from argus_otel.wire.ids import is_baseline

IDENTITY = Identity(
    nonce=b"12345678",
    nonce_local=False,
    run_id="test",
    attempt=0,
    role="trainer",
    rank=0,
    world_size=4,
    local_rank=0,
)


def make_recorder(started=lambda: None):
    recorder = Recorder(
        ring=EventRing(64),
        faults=FaultLog(),
        plan=CapturePlan(baseline_ratio=1.0, overhead_budget=0.01),
        on_first_record=started,
    )
    recorder.set_identity(IDENTITY)
    return recorder


@pytest.fixture
def recorder():
    return make_recorder()


def keys(recorder):
    return [group.key for group in recorder.groups]


def test_equal_groups_have_keys_of_their_own_and_the_same_on_every_rank(recorder):
    """Two new_group([0, 1]) have the same members and the same description."""
    other_rank = make_recorder()
    for each in (recorder, other_rank):
        each.add_group("undefined", [0, 1], blocks_host=True)
        each.add_group("undefined", [0, 1], blocks_host=True)
        each.add_group("undefined", [1, 0], blocks_host=True)

    assert len(set(keys(recorder))) == 3
    assert keys(recorder) == keys(other_rank)


def test_equal_lists_of_members_are_kept_once(recorder):
    """Ten thousand ranks in each of a hundred groups would be megabytes."""
    for description in ("tp", "dp"):
        recorder.add_group(description, list(range(100)), blocks_host=True)

    tensor, data = recorder.groups
    assert tensor.ranks is data.ranks
    assert tensor.key != data.key


def test_groups_of_a_new_world_count_from_the_start(recorder):
    """A rank that was restarted in place and one that was not must agree."""
    recorder.add_group("default_pg", [0, 1], blocks_host=True)
    recorder.set_identity(replace(IDENTITY, nonce=b"87654321"))
    recorder.add_group("default_pg", [0, 1], blocks_host=True)

    first, second = keys(recorder)
    assert first == second


def test_the_background_thread_is_started_once():
    """By whichever hook comes first."""
    starts = []
    recorder = make_recorder(lambda: starts.append(1))

    recorder.start()
    recorder.start()

    assert starts == [1]


def test_a_thread_that_cannot_be_started_is_tried_again_later(monkeypatch):
    """A limit on processes that others use up: nothing reaches the job, and nothing is hurried."""
    now_s, free, starts = [0], [False], []

    def start():
        starts.append(now_s[0])
        if not free[0]:
            message = "can't start new thread"
            raise RuntimeError(message)

    monkeypatch.setattr("argus_otel.record.recorder.monotonic_ns", lambda: now_s[0] * 10**9)
    recorder = make_recorder(start)
    for second in range(30):
        now_s[0] = second
        free[0] = second >= 15
        recorder.start()

    assert starts == [0, 10, 20]
    assert recorder.faults.counts["worker_not_started"] == 2


def test_phase_names_are_bounded(recorder):
    """A name with a number in it would fill the job's memory."""
    indices = [recorder.phase_index(f"rollout {n}") for n in range(300)]

    assert indices[:3] == [0, 1, 2]
    assert indices[-1] == -1
    assert recorder.phase_index("rollout 7") == 7
    assert recorder.faults.counts["phase_names_full"] == 300 - 256


class Mute:
    """Cannot say what it is."""

    def __str__(self):
        raise ValueError


class Enumerated(str):
    """A name that prints as something else."""

    __slots__ = ()

    def __str__(self):
        return "kind.rollout"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("rollout", "rollout"),
        (7, "7"),
        (None, "None"),
        (["a"], "['a']"),
        ("", "phase"),
        ("x" * 5000, "x" * 100),
        ("bad \udcff name", "bad ? name"),
        (Mute(), "Mute"),
        (Enumerated("rollout"), "kind.rollout"),
    ],
)
def test_whatever_a_phase_is_called_its_name_can_be_sent(recorder, name, kept):
    """One that cannot would take the whole step with it."""
    index = recorder.phase_index(name)

    assert recorder.phase_names[index] == kept
    assert type(recorder.phase_names[index]) is str
    assert recorder.phase_index(name) == index


def test_exceptions_are_bounded(recorder):
    """Threads that die by the hundred."""
    for _ in range(20):
        recorder.record_exception(UncaughtException(type_name="OSError", frames=()))

    assert len(recorder.exceptions) == 16
    assert recorder.faults.counts["exceptions_full"] == 4


def test_ends_are_asked_for_from_the_third_step_on():
    """Step 0 is warm-up, and in step 1 DDP rebuilds its buckets."""
    plan = CapturePlan(baseline_ratio=1.0, overhead_budget=1.0)
    plan.set_identity(IDENTITY)
    wanted = []
    for ordinal in range(4):
        plan.begin_step(ordinal, 10**9)
        wanted.append(plan.ends)

    assert wanted == [False, False, True, True]


def test_ends_are_asked_for_on_the_steps_that_all_ranks_agree_on():
    """Looked up ahead; for a new identity anew, also where its steps have numbers seen before."""
    plan = CapturePlan(baseline_ratio=0.2, overhead_budget=1.0)
    for identity in (IDENTITY, replace(IDENTITY, attempt=1)):
        plan.set_identity(identity)
        for ordinal in (*range(100), 1_000_000, 0):
            plan.begin_step(ordinal, 10**9)
            agreed = is_baseline(identity.nonce, identity.attempt, ordinal, 0.2)
            assert plan.ends == (agreed and ordinal >= 2)


def test_ends_stay_within_the_overhead_budget():
    """A hundred ends of a 10 ms step cost 6 ms: at 1 % every sixtieth step can have them."""
    plan = CapturePlan(baseline_ratio=1.0, overhead_budget=0.01)
    plan.set_identity(IDENTITY)
    steps, step_ns = 2000, 10_000_000
    for ordinal in range(steps):
        plan.begin_step(ordinal, step_ns)
        if plan.ends:
            for _ in range(100):
                plan.charge_end(1)

    spent_ns = plan.ends_asked * END_COST_FLOOR_NS
    assert 0.9 <= spent_ns / (0.01 * steps * step_ns) <= 1.05
    assert plan.steps_refused > steps * 0.9
