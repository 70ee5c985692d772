"""Two jobs of one person, started at the same time on one host, with one endpoint."""

from __future__ import annotations

import pytest

from argus_otel.wire import ids

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

STEPS = 30
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")

# Both wait for each other's first step, so that they train side by side.
SCRIPT = f"""
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range({STEPS}):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 1:
            (FOLDER / "started").touch()
            other = Path(os.environ["OTHER_FOLDER"])
            while not (other / "started").exists():
                time.sleep(0.02)
    dist.destroy_process_group()
"""


def test_two_jobs_at_once_stay_two(launch, receiver, tmp_path):
    """Each with its own run, traces and roots; nothing is lost or credited to the other."""
    folders = [tmp_path / f"job-{n}" for n in range(2)]
    jobs = [
        launch(
            SCRIPT,
            under=TORCHRUN,
            env=receiver.environment | {"OTHER_FOLDER": str(folders[1 - n])},
        )
        for n in range(2)
    ]

    for job in jobs:
        job.finish()

    assert [job.folder for job in jobs] == folders
    runs = {}
    for span in receiver.spans():
        runs.setdefault(span.resource["argus.run.id"], set()).add(nonce_of(span))
    assert len(runs) == 2
    (first,), (second,) = runs.values()
    assert first != second
    for who, nonce in zip(runs, (first, second), strict=True):
        told = sorted(
            (span.attributes["argus.step.ordinal"], span.resource["dl.rank"])
            for span in receiver.spans(name="rank.step")
            if span.resource["argus.run.id"] == who
        )
        assert told == [(step, rank) for step in range(STEPS) for rank in (0, 1)]
        mine = [ids.step_trace_id(bytes.fromhex(nonce), 0, step, 0) for step in range(STEPS)]
        roots = receiver.spans(name="train.step")
        assert mine == [
            span.trace_id
            for span in sorted(roots, key=lambda span: span.attributes["argus.step.ordinal"])
            if span.resource["argus.run.id"] == who
        ]


def nonce_of(span):
    return span.resource["argus.run.nonce"]
