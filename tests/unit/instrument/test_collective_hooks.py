"""What hangs on a process group, and when: torch reads a group's hooks without a lock."""

from __future__ import annotations

import gc
import importlib
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PreHookArgs
from torch.distributed import distributed_c10d as c10d

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.framework import collectives as collectives_module
from argus_otel.instrument.framework.collectives import Collectives
from argus_otel.wire import events
from argus_otel.wire.codes import OPS

BATCH = torch.ones(4, 8)


class Group:
    """Stands for a process group: keeps its hooks, and every change of them."""

    def __init__(self, name="default"):
        self.group_name = self.group_desc = name
        self.pre = self.post = None
        self.changes = []

    def register_pre_hook(self, _, hook):
        self.pre = hook
        self.changes.append("pre on")

    def unregister_pre_hook(self, _):
        self.pre = None
        self.changes.append("pre off")

    def register_post_hook(self, _, hook):
        self.post = hook
        self.changes.append("post on")

    def unregister_post_hook(self, _):
        self.post = None
        self.changes.append("post off")

    def issue(self):
        """An operation without a name and without tensors, as torch hands it to the pre hook."""
        if self.pre:
            self.pre(PreHookArgs())


@pytest.fixture
def hook(traced, monkeypatch):
    """``hook(group, backend)``: attach to groups that torch is made to know."""
    collectives = Collectives(traced.recorder)
    known = SimpleNamespace(pg_map={}, pg_group_ranks={})
    monkeypatch.setattr(c10d, "_world", known)

    def attach(group, backend="gloo"):
        known.pg_map[group] = (backend, None)
        known.pg_group_ranks[group] = {0: 0}
        collectives.attach_all()
        return collectives

    return attach


def in_another_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def begin_steps(collectives, *ends):
    for wanted in ends:
        collectives.begin_step(wanted)


def recorded(traced, kind):
    return len(traced.recorder.ring.drain().of_kind(kind))


def train(model, optimizer, *, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(BATCH).sum().backward()
        optimizer.step()


def test_a_post_hook_is_there_only_where_ends_are_wanted(hook):
    """It costs every operation a call from C++. A new group keeps it for two steps."""
    group = Group()
    collectives = hook(group)
    group.issue()

    begin_steps(collectives, False, False)
    new = group.post
    begin_steps(collectives, False)
    settled = group.post
    begin_steps(collectives, True)
    wanted = group.post
    begin_steps(collectives, False)

    assert new is not None
    assert settled is None
    assert wanted is not None
    assert group.post is None


def test_steps_that_want_the_same_change_nothing(hook):
    """Ninety-eight of a hundred boundaries do nothing."""
    group = Group()
    collectives = hook(group)
    begin_steps(collectives, False, False, False)
    before = list(group.changes)

    begin_steps(collectives, *[False] * 50)

    assert group.changes == before


@pytest.mark.parametrize("first", ["own", "other"])
def test_hooks_of_a_group_that_another_thread_uses_are_left_alone(hook, first):
    """Autograd's on a GPU, or a checkpointer's: changing them would crash the process."""
    group = Group()
    collectives = hook(group)
    calls = [group.issue, lambda: in_another_thread(group.issue)]
    for call in calls if first == "own" else reversed(calls):
        call()
    before = list(group.changes)

    begin_steps(collectives, False, False, False, True, False)

    assert group.changes == before
    assert group.post is not None


def test_a_group_that_only_another_thread_uses_is_left_alone_too(hook):
    """Whoever changes hooks has to be the one who issues operations."""
    group = Group()
    collectives = hook(group)
    in_another_thread(group.issue)

    begin_steps(collectives, False, False, False)

    assert group.post is not None


def test_a_thread_that_comes_later_stops_further_changes(hook):
    """Its operations stay without ends, which is allowed; a crash is not."""
    group = Group()
    collectives = hook(group)
    begin_steps(collectives, False, False, False)
    in_another_thread(group.issue)
    before = list(group.changes)

    begin_steps(collectives, True, False, True)
    collectives.detach_all()

    assert group.changes == before


def test_hooks_that_have_to_stay_record_nothing_after_detaching(traced, hook):
    """They cost a call, and do nothing."""
    group = Group()
    collectives = hook(group)
    group.issue()
    in_another_thread(group.issue)
    used_by_both = recorded(traced, events.COLLECTIVE)

    collectives.detach_all()
    group.issue()
    in_another_thread(group.issue)

    assert used_by_both == 2
    assert group.pre is not None
    assert recorded(traced, events.COLLECTIVE) == 0


def test_a_group_of_one_thread_is_left_as_it_was(hook):
    """No hook stays behind."""
    group = Group()
    collectives = hook(group)
    group.issue()

    collectives.detach_all()

    assert (group.pre, group.post) == (None, None)


def test_ends_are_never_asked_of_nccl(traced, hook):
    """It completes its futures at enqueue: that is no end."""
    group = Group()
    collectives = hook(group, "cuda:nccl")

    begin_steps(collectives, True, True, True, True)
    group.issue()

    assert group.changes == ["pre on"]
    assert recorded(traced, events.COLLECTIVE) == 1


def test_one_group_that_cannot_be_changed_does_not_keep_others_from_it(traced, hook):
    """Destroyed by other means, for one; never an exception into the user's step."""
    traced.recorder.faults._reraise = False
    broken, whole = Group("broken"), Group("whole")
    hook(broken)
    collectives = hook(whole)
    begin_steps(collectives, False, False)
    broken.unregister_post_hook = None

    begin_steps(collectives, False)

    assert whole.post is None
    assert traced.recorder.faults.counts["collective_end_hook"] == 1


@pytest.fixture
def ends_from_step_4(traced, monkeypatch):
    """Long enough for the groups to have shown which threads use them."""
    plan = traced.recorder.plan
    monkeypatch.setattr(plan, "begin_step", lambda ordinal, _: setattr(plan, "ends", ordinal == 4))


def test_only_the_steps_of_the_sample_have_ends(ends_from_step_4, alone, model):
    """On a real group: each operation of that step has one, no other."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        dist.all_reduce(BATCH.clone())
        dist.all_reduce(BATCH.clone(), async_op=True).wait()
        train(model, optimizer)

    rows = alone.recorder.ring.drain()
    ended = [op_id for *_, op_id in rows.of_kind(events.END)]
    asked = [
        (count, op_id) for *_, count, _, op_id in rows.of_kind(events.COLLECTIVE) if op_id >= 0
    ]

    assert len(ended) == 2
    assert sorted(ended) == sorted(op_id for _, op_id in asked)
    assert sorted(count for count, _ in asked) == [8, 9]


def test_a_group_made_within_such_a_step_has_its_ends_too(ends_from_step_4, alone, model):
    """And none in the steps after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=4)
    group = dist.new_group([0])
    dist.all_reduce(BATCH.clone(), group=group)
    train(model, optimizer)
    dist.all_reduce(BATCH.clone(), group=group)
    train(model, optimizer)

    assert recorded(alone, events.END) == 1


def test_operations_in_flight_do_not_mind(ends_from_step_4, alone, model):
    """Issued in one step, waited for in the next; the group is destroyed meanwhile."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=3)
    group = dist.new_group([0])
    for _ in range(4):
        works = [dist.all_reduce(torch.zeros(1 << 16), group=group, async_op=True)]
        train(model, optimizer)
        works[0].wait()
    dist.destroy_process_group(group)
    train(model, optimizer, steps=3)

    assert recorded(alone, events.COLLECTIVE) == 4


def test_a_wait_takes_its_time_out_as_before(alone):
    """By position or by name; what torch refuses, it refuses."""
    from datetime import timedelta

    def issue():
        return dist.all_reduce(BATCH.clone(), async_op=True)

    issue().wait(timedelta(seconds=1))
    issue().wait(timeout=timedelta(seconds=1))
    with pytest.raises(TypeError):
        issue().wait("soon")

    assert recorded(alone, events.WAIT) == 3


def test_a_wait_of_another_thread_makes_nobody_wait(alone, model):
    """A checkpointer's; its operation is one of the group all the same."""
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    alone.recorder.ring.drain()

    in_another_thread(lambda: dist.all_reduce(BATCH.clone()))
    there = alone.recorder.ring.drain()
    dist.all_reduce(BATCH.clone())
    here = alone.recorder.ring.drain()

    assert [bytes([events.WAIT]) in drained.kinds for drained in (there, here)] == [False, True]
    assert [len(drained.of_kind(events.COLLECTIVE)) for drained in (there, here)] == [1, 1]


@pytest.fixture
def of_two(traced, tmp_path):
    """Rank 0 of a world of two whose operations torch issues without a peer."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    yield traced
    dist.destroy_process_group()


def test_what_is_sent_and_what_is_received_count_by_themselves(of_two):
    """Per source and destination, whether anybody waits for it at once or not; so does the other."""
    for call in (dist.send, dist.recv, dist.send, dist.irecv, dist.isend):
        call(BATCH.clone(), 1)
    dist.all_reduce(BATCH.clone())

    told = [
        (OPS[op], peer, count, size)
        for _, _, _, packed, count, size, _ in of_two.recorder.ring.drain().of_kind(
            events.COLLECTIVE
        )
        for _, op, _, peer in [events.unpack_collective(packed)]
    ]
    assert told == [
        ("send", 1, 0, BATCH.nbytes),
        ("recv", 1, 0, BATCH.nbytes),
        ("send", 1, 1, BATCH.nbytes),
        ("recv", 1, 1, BATCH.nbytes),
        ("send", 1, 2, BATCH.nbytes),
        ("all_reduce", -1, 0, BATCH.nbytes),
    ]


def test_the_arrival_is_taken_before_anything_is_read(hook, traced, monkeypatch):
    """What the hook takes itself must not make the rank look late."""
    name_of, *others = collectives_module._getters()
    read_ns = []

    def timed(args):
        read_ns.append(monotonic_ns())
        return name_of(args)

    monkeypatch.setattr(collectives_module, "_getters", lambda: (timed, *others))
    group = Group()
    hook(group)
    group.issue()

    (event,) = traced.recorder.ring.drain().of_kind(events.COLLECTIVE)
    assert event[1] <= read_ns[0]


def test_whether_the_caller_waits_at_once_is_told(alone):
    """A synchronous call is over where its wait is; of another, a later wait says nothing."""
    dist.all_reduce(BATCH.clone())
    dist.all_reduce(BATCH.clone(), async_op=True).wait()

    told = alone.recorder.ring.drain().of_kind(events.COLLECTIVE)
    assert [events.unpack_collective(event[3])[2] for event in told] == [False, True]


def test_a_process_that_was_disabled_records_no_operations(alone):
    """In a forked child the hooks are those of its parent."""
    alone.recorder.ring.drain()
    alone.recorder.enabled = False

    dist.all_reduce(BATCH.clone())

    assert not alone.recorder.ring.held


@pytest.fixture
def no_collections():
    """Pauses for garbage are events too."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("lengths", "told"), [([1, 2, 5], 32), ([3] * 64, 768), ([2] * 80, 640)])
def test_the_payload_of_an_operation_on_several_tensors_is_theirs_together(alone, lengths, told):
    """Beyond 64 of them, by the first."""
    with warnings.catch_warnings(action="ignore"):  # torch means to drop this call
        dist.all_reduce_coalesced([torch.zeros(length) for length in lengths])

    (event,) = alone.recorder.ring.drain().of_kind(events.COLLECTIVE)
    assert (event[5], OPS[events.unpack_collective(event[3])[1]]) == (told, "all_reduce")


@pytest.mark.usefixtures("no_collections")
def test_hooks_count_what_they_drive_out_of_a_full_queue(alone):
    """One event each by the operation and by its wait."""
    ring = alone.recorder.ring
    ring.drain()
    for n in range(ring.capacity):
        alone.recorder.append(events.PHASE, n, n, 0, 0, 0, 0)

    dist.all_reduce(BATCH.clone())

    drained = ring.drain()
    assert (len(drained), ring.lost) == (ring.capacity, 2)
    assert drained.part(-2).kinds == bytes([events.COLLECTIVE, events.WAIT])


def test_events_hold_nothing_but_integers(ends_from_step_4, alone, model):
    """A tensor in one of them would live until the background thread comes by."""
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(6):
        dist.all_reduce(BATCH.clone())
        train(ddp, optimizer)

    held = list(alone.recorder.ring.held)
    assert {event[0] for event in held} >= {
        events.COLLECTIVE, events.END, events.WAIT, events.FORWARD, events.BACKWARD,
        events.OPTIMIZER, events.STEP_END,
    }  # fmt: skip
    assert {len(event) for event in held} == {7}
    assert {type(field) for event in held for field in event} == {int}
