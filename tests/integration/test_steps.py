"""Collectives of every kind between two ranks: counted alike, to the right peer, with true ends."""

from __future__ import annotations

from collections import defaultdict

import pytest

from argus_otel.testing import InMemoryReceiver
from argus_otel.wire import scopes
from argus_otel.wire.codes import OPS
from argus_otel.wire.digest import decode_digest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

# One step for each way of communicating; `report` says what was done, by a count of our own.
SCRIPT = """
    import torch, torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    seen = []

    def tell(**what):
        report(seen=list(seen), **what)
        seen.clear()

    dist.group.WORLD.register_pre_hook(4711, lambda args: seen.append(args.name.name))
    twins = [dist.new_group([0, 1]) for _ in range(2)]
    plain = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, both = torch.ones(4), [torch.empty(4) for _ in range(2)]

    def ops():
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather(both, x)
        dist.all_gather_into_tensor(torch.empty(8), x)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.all_to_all_single(torch.empty(4), x)
        dist.scatter(torch.empty(4), both if rank == 0 else None, 0)
        dist.gather(x, both if rank == 0 else None, 0)
        dist.barrier()

    def blocking_p2p():
        for _ in range(3):
            dist.send(x, other) if rank == 0 else dist.recv(x, other)

    def asynchronous_p2p():
        requests = [dist.isend(x, other), dist.irecv(both[0], other)]
        requests += dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, both[1], other)]
        )
        for request in requests:
            request.wait()

    def twin_groups():
        dist.all_reduce(x, group=twins[0])
        for _ in range(2):
            dist.all_reduce(x, group=twins[1])

    def asynchronous():
        dist.all_reduce(x, async_op=True).wait()

    def functional_collectives():
        torch.sum(functional.all_reduce(x, "sum", dist.group.WORLD))

    def nothing():
        pass

    for n, communicate in enumerate(
        (nothing, ops, blocking_p2p, asynchronous_p2p, twin_groups, asynchronous,
         functional_collectives)
    ):
        loss = plain(torch.ones(1, 8)).sum()
        loss.backward()
        communicate()
        optimizer.step()
        tell(step=n, did=communicate.__name__)

    del optimizer, plain  # the next optimizers' parameters are fewer
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for n in range(7, 27):
        optimizer.zero_grad()
        ddp(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        tell(step=n, did="ddp")

    del optimizer, ddp
    blocks = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for block in blocks:
        fully_shard(block)
    fully_shard(blocks)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    for n in range(27, 29):
        optimizer.zero_grad()
        blocks(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        tell(step=n, did="fsdp")
    dist.destroy_process_group()
"""

STEP = {
    "nothing": 0,
    "ops": 1,
    "blocking_p2p": 2,
    "asynchronous_p2p": 3,
    "twin_groups": 4,
    "asynchronous": 5,
    "functional_collectives": 6,
}
LAST_DDP_STEP, LAST_FSDP_STEP = 26, 28


@pytest.fixture(scope="module")
def receiver():
    """Receives what the one job of this module sends."""
    with InMemoryReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def job(launch_once, receiver):
    """Every step is one of the sample, so that the ends of its collectives are asked for."""
    environment = receiver.environment | {
        "ARGUS_BASELINE_RATIO": "1",
        "ARGUS_OVERHEAD_BUDGET": "1",
    }
    return launch_once(
        SCRIPT, under=("torchrun", "--nproc-per-node", "2"), env=environment
    ).finish()


@pytest.fixture(scope="module")
def digest_of(job, receiver):
    """(rank, ordinal) to digest."""
    found = [
        decode_digest(span.attributes, span.start_ns, span.end_ns)
        for span in receiver.spans(name="rank.step")
    ]
    return {(digest.rank, digest.ordinal): digest for digest in found}


def ops_of(digest):
    return [OPS[code] for code in digest.sync.op.tolist()]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_way_of_communicating_is_seen(digest_of, rank):
    """By its name, once each, in order."""
    assert ops_of(digest_of[rank, STEP["nothing"]]) == []
    assert ops_of(digest_of[rank, STEP["ops"]]) == [
        "all_reduce", "broadcast", "reduce", "all_gather", "all_gather", "reduce_scatter",
        "all_to_all", "scatter", "gather", "barrier",
    ]  # fmt: skip
    assert ops_of(digest_of[rank, STEP["blocking_p2p"]]) == [["send"], ["recv"]][rank] * 3
    assert sorted(ops_of(digest_of[rank, STEP["asynchronous_p2p"]])) == ["recv"] * 2 + ["send"] * 2
    assert ops_of(digest_of[rank, STEP["functional_collectives"]]) == ["all_reduce"]
    assert ops_of(digest_of[rank, LAST_DDP_STEP]) == ["all_reduce"]
    assert {"all_gather", "reduce_scatter"} <= set(ops_of(digest_of[rank, LAST_FSDP_STEP]))


def test_no_collective_is_ours(job, digest_of):
    """A second hook on the default group counts what the digests say, on every step."""
    world = int(digest_of[0, LAST_DDP_STEP].sync.group_keys[0])
    for line in job.results():
        sync = digest_of[line["rank"], line["step"]].sync
        on_world = [int(sync.group_keys[group]) == world for group in sync.group.tolist()]
        assert sum(on_world) == len(line["seen"]), line


def test_ranks_agree_on_every_collective(digest_of):
    """Count at each boundary, group keys, operations, bytes; point-to-point apart."""
    for ordinal in (1, 4, 5, 6, 10, LAST_DDP_STEP, LAST_FSDP_STEP):
        first, second = digest_of[0, ordinal].sync, digest_of[1, ordinal].sync
        assert first.group_keys.tolist() == second.group_keys.tolist()
        assert first.start_counts.tolist() == second.start_counts.tolist()
        assert first.op.tolist() == second.op.tolist()
        assert first.group.tolist() == second.group.tolist()


def test_twin_groups_are_told_apart_alike_on_both_ranks(digest_of):
    """One collective in the first, two in the second."""
    first, second = digest_of[0, STEP["twin_groups"]], digest_of[1, STEP["twin_groups"]]

    assert len(set(first.sync.group_keys.tolist())) == 2
    assert first.sync.group_keys.tolist() == second.sync.group_keys.tolist()
    assert first.sync.group.tolist() == second.sync.group.tolist() == [0, 1, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_point_to_point_knows_its_peer_and_counts_by_pair(digest_of, rank):
    """Three from 0 to 1, then two each way."""
    blocking = digest_of[rank, STEP["blocking_p2p"]].sync
    both_ways = digest_of[rank, STEP["asynchronous_p2p"]].sync

    assert set(blocking.peer.tolist()) == {1 - rank}
    assert blocking.channels.tolist() == [[0, 0, 1, 0]]
    assert set(both_ways.peer.tolist()) == {1 - rank}
    assert sorted(both_ways.channels.tolist()) == [[0, 0, 1, 3], [0, 1, 0, 0]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("did", ["ops", "twin_groups"])
def test_synchronous_collectives_have_known_ends(digest_of, rank, did):
    """Those of the wait that follows; so busy is known too."""
    digest = digest_of[rank, STEP[did]]

    assert (digest.sync.duration_us >= 0).all()
    assert digest.busy_s is not None
    assert 0 <= digest.busy_s < digest.step_s


@pytest.mark.parametrize("rank", [0, 1])
def test_busy_is_unknown_only_where_a_wait_is_unseen(digest_of, rank):
    """A functional collective waits in C++; ``Work.wait`` and DDP's tail are seen."""
    assert digest_of[rank, STEP["blocking_p2p"]].busy_s is not None
    assert digest_of[rank, STEP["asynchronous_p2p"]].busy_s is not None
    assert digest_of[rank, STEP["functional_collectives"]].busy_s is None
    assert digest_of[rank, STEP["asynchronous"]].busy_s is not None
    assert digest_of[rank, LAST_DDP_STEP].busy_s is not None


def test_ends_of_ddps_buckets_are_measured_on_chosen_steps(digest_of):
    """They come from the futures' callbacks, which are charged to the budget."""
    captured = [
        digest
        for digest in digest_of.values()
        if 8 < digest.ordinal <= LAST_DDP_STEP and digest.ends_captured
    ]

    assert captured
    assert all((digest.sync.duration_us >= 0).all() for digest in captured)
    for digest in captured:
        last_end_us = int((digest.sync.arrival_us + digest.sync.duration_us).max())
        assert last_end_us <= digest.step_s * 1e6 + 1


def test_a_kept_step_has_a_detail_span_for_every_collective(digest_of, receiver):
    """In the step's trace, below the rank's step."""
    per_step = defaultdict(int)
    parents = {
        span.span_id: (span.resource["dl.rank"], span.attributes["argus.step.ordinal"])
        for span in receiver.spans(name="rank.step")
    }
    for span in receiver.spans(scope=scopes.DETAIL):
        per_step[parents[span.parent_span_id]] += 1

    assert dict(per_step) == {
        key: digest.sync.op.size for key, digest in digest_of.items() if digest.sync.op.size
    }


def test_fsdp_has_phases_of_its_own(digest_of):
    """Forward from hooks on the outermost sharded module."""
    digest = digest_of[0, LAST_FSDP_STEP]
    names = [digest.phases.names[index] for index in digest.phases.name.tolist()]

    assert names.count("forward") == 1
    assert names[-1] == "optimizer.step"
