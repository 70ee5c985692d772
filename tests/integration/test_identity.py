"""Who a run is: new worlds and restarts have traces of their own, never an older one's."""

from __future__ import annotations

import pytest

from argus_otel.wire import ids

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

# A world that ends and begins again, then a failure and a restart by torchrun.
SCRIPT = """
    import torch, torch.distributed as dist

    attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))

    def world(n):
        # A store for each: over one store, gloo finds the addresses of the world before.
        store = dist.FileStore(str(FOLDER / f"world-{attempt}-{n}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        dist.barrier()
        dist.destroy_process_group()

    world(0)
    world(1)
    if attempt == 0:
        sys.exit(3)
"""


def test_each_world_and_each_attempt_has_traces_that_all_its_ranks_share(launch, receiver):
    """Three worlds on each rank would be one if ids came from the scheduler's."""
    job = launch(
        SCRIPT,
        under=("torchrun", "--nproc-per-node", "2", "--max-restarts", "1"),
        env=receiver.environment,
    ).finish()

    worlds = {}
    for span in receiver.spans(name="rank.step"):
        key = (span.resource["argus.run.nonce"], span.resource["argus.attempt"])
        steps = worlds.setdefault(key, {})
        steps.setdefault(span.attributes["argus.step.ordinal"], {})[span.resource["dl.rank"]] = (
            span.trace_id
        )
    # torchrun ends the other rank as soon as one has failed, which may be before its last steps.
    whole = {key: steps for key, steps in worlds.items() if key[1] == 1}
    assert len(whole) == 2, job.stderr[-3000:]
    assert {attempt for _, attempt in worlds} == {0, 1}
    assert len({nonce for nonce, _ in worlds}) == len(worlds)
    for (nonce, attempt), steps in whole.items():
        assert sorted(steps) == [0, 1]
        for ordinal, ranks in steps.items():
            trace_id = ids.step_trace_id(bytes.fromhex(nonce), attempt, ordinal, 0)
            assert ranks == {0: trace_id, 1: trace_id}


def test_a_world_that_one_rank_had_on_its_own_before_sets_nobody_apart(launch, receiver):
    """Two of them on rank 1: to load a checkpoint, say. All ranks of the job's share its traces."""
    script = """
    import torch, torch.distributed as dist

    def own_world(n):
        store = dist.FileStore(str(FOLDER / f"own-{n}"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.destroy_process_group()

    rank = int(os.environ["RANK"])
    for n in range(2 * rank):
        own_world(n)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    """

    launch(script, under=("torchrun", "--nproc-per-node", "2"), env=receiver.environment).finish()

    steps = receiver.spans(name="rank.step")
    traces = {s.resource["dl.rank"]: set() for s in steps}
    for span in steps:
        traces[span.resource["dl.rank"]].add(span.trace_id)
    assert sorted(traces) == [0, 1]
    assert len(traces[0]) == 2
    assert traces[0] == traces[1]
    assert not any(s.resource.get("argus.run.nonce_local") for s in steps)


def test_ranks_without_a_process_group_stand_alone(launch, receiver):
    """Each with traces and roots of its own, and the run's name in common."""
    script = """
    import torch
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    """

    launch(script, under=("torchrun", "--nproc-per-node", "2"), env=receiver.environment).finish()

    steps = receiver.spans(name="rank.step")
    roots = {span.trace_id: span.span_id for span in receiver.spans(name="train.step")}
    assert sorted((s.resource["dl.rank"], s.attributes["argus.step.ordinal"]) for s in steps) == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    assert len({span.trace_id for span in steps}) == 4
    assert all(roots[span.trace_id] == span.parent_span_id for span in steps)
    assert len({span.resource["argus.run.id"] for span in steps}) == 1
