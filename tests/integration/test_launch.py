"""Unchanged programs, started in every usual way: who is traced, who is left alone."""

from __future__ import annotations

import sys
import textwrap

import pytest

from argus_otel.testing import InMemoryReceiver
from argus_otel.wire import scopes
from argus_otel.wire.digest import decode_digest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

TORCHRUN = ("torchrun", "--nproc-per-node", "2")
STEPS = 4

# Knows nothing of argus. Prints what tracing must not change, and looks around in its helpers.
DDP = """
    import random, threading
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from opentelemetry import trace

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            if index == 0 and torch.utils.data.get_worker_info():
                names = [thread.name for thread in threading.enumerate()]
                report(worker=self.start, threads=names)
            return torch.full((8,), float(index))

    def main():
        dist.init_process_group("gloo")
        random.seed(0)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracer = trace.get_tracer("user")
        for start in ("spawn", "forkserver", "fork", None):
            data = Numbers()
            data.start = start
            loader = DataLoader(
                data, batch_size=8, num_workers=int(start is not None),
                multiprocessing_context=start,
            )
            for batch in loader:
                with tracer.start_as_current_span("user.iteration"):
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
        report(
            weights=[parameter.tolist() for parameter in model.parameters()],
            random=[random.random(), torch.rand(1).item()],
            threads=sorted(thread.name for thread in threading.enumerate()),
        )
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""

# Steps without anything around them; `LOOP` goes into scripts below.
LOOP = """
    def train(steps, after=lambda step: None):
        import torch
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            after(step)
"""


def digests(receiver, rank=None):
    """Each rank's digests, in the order of its steps."""
    found = [
        decode_digest(span.attributes, span.start_ns, span.end_ns)
        for span in receiver.spans(name="rank.step")
    ]
    return sorted(
        (digest for digest in found if rank in {None, digest.rank}),
        key=lambda digest: (digest.rank, digest.ordinal),
    )


def pids(spans):
    return {span.resource["process.pid"] for span in spans}


@pytest.fixture(scope="module")
def ddp_receiver():
    """Receives what the job sends."""
    with InMemoryReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def job(launch_once, ddp_receiver):
    """Run to its end."""
    environment = ddp_receiver.environment | {
        "OTEL_SERVICE_NAME": "llama",
        "OTEL_RESOURCE_ATTRIBUTES": "team=ml,deployment.environment.name=test",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue%20team",
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        "ARGUS_RUN_ID": "run-7",
    }
    return launch_once(DDP, under=TORCHRUN, env=environment).finish()


@pytest.fixture(scope="module")
def bare(launch_once, ddp_receiver):
    """The same job, switched off; whatever it sends would be found beside the other's."""
    environment = ddp_receiver.environment | {"ARGUS_ENABLED": "0"}
    return launch_once(DDP, under=TORCHRUN, env=environment).finish()


def test_every_step_of_every_rank_arrives(job, ddp_receiver):
    """Though the whole job may take less time than argus's first wake-up."""
    got = [(digest.rank, digest.ordinal) for digest in digests(ddp_receiver)]

    assert got == [(rank, step) for rank in (0, 1) for step in range(STEPS)]


def test_all_ranks_of_a_step_share_a_trace_with_one_root(job, ddp_receiver):
    """Which rank 0 writes."""
    roots = {span.trace_id: span for span in ddp_receiver.spans(name="train.step")}
    ranks = ddp_receiver.spans(name="rank.step")

    assert len(roots) == STEPS
    assert {span.resource["dl.rank"] for span in roots.values()} == {0}
    for span in ranks:
        root = roots[span.trace_id]
        assert root.attributes["argus.step.ordinal"] == span.attributes["argus.step.ordinal"]
        assert span.parent_span_id == root.span_id


def test_both_ranks_count_the_same_collectives_under_the_same_keys(job, ddp_receiver):
    """DDP's buckets, and what its construction and its rebuilding need."""
    first, second = digests(ddp_receiver, 0), digests(ddp_receiver, 1)

    for mine, theirs in zip(first, second, strict=True):
        assert mine.sync.group_keys.tolist() == theirs.sync.group_keys.tolist()
        assert mine.sync.start_counts.tolist() == theirs.sync.start_counts.tolist()
        assert mine.sync.op.tolist() == theirs.sync.op.tolist()


def test_only_the_ranks_send_anything(job, ddp_receiver):
    """Not torchrun's agent, the resource tracker, the forkserver or the workers."""
    ranks = {line["pid"] for line in job.results() if "weights" in line}
    senders = pids([*ddp_receiver.spans(), *ddp_receiver.metrics()])

    assert len(ranks) == 2
    assert senders == ranks


def test_workers_of_a_loader_have_no_thread_of_ours(job):
    """However they were started."""
    seen = {
        (line["rank"], line["worker"]): line["threads"]
        for line in job.results()
        if "worker" in line
    }

    assert set(seen) == {(r, s) for r in (0, 1) for s in ("spawn", "forkserver", "fork")}
    assert [name for names in seen.values() for name in names if "argus" in name] == []


def test_a_rank_has_few_threads_of_ours(job):
    """The worker, the one that waits for SIGTERM; from 3.12 on one for the exit."""
    for line in job.results():
        if "weights" in line:
            ours = [name for name in line["threads"] if "argus" in name]
            ours = [name for name in ours if name != "argus-standby" or sys.version_info < (3, 12)]
            assert ours == ["argus-sigterm", "argus-worker"]


def test_spans_of_the_users_own_lie_in_the_step_they_wrap(job, ddp_receiver):
    """Though each ends after the step's boundary, which is inside it."""
    steps = {
        (span.resource["dl.rank"], span.attributes["argus.step.ordinal"]): span
        for span in ddp_receiver.spans(name="rank.step")
    }
    mine = ddp_receiver.spans(name="user.iteration")

    assert len(mine) == 2 * STEPS
    parents = {span.span_id for span in steps.values()}
    assert {span.parent_span_id for span in mine} == parents
    assert {span.scope for span in mine} == {"user"}
    assert len({span.span_id for span in mine}) == 2 * STEPS


def test_opentelemetrys_variables_are_honoured(job, ddp_receiver):
    """Service name, resource attributes, headers."""
    for span in ddp_receiver.spans():
        assert span.resource["service.name"] == "llama"
        assert span.resource["team"] == "ml"
    assert {request.headers["x-tenant"] for request in ddp_receiver.requests} == {"blue team"}


def test_the_resource_says_who_the_rank_is(job, ddp_receiver):
    """Host and identity; the run's name is what was asked for."""
    for span in ddp_receiver.spans(name="rank.step"):
        rank = span.resource["dl.rank"]
        assert span.resource["service.instance.id"] == f"run-7-rank{rank}"
        assert span.resource["dl.world_size"] == 2
        assert span.resource["host.id"]
        assert span.resource["host.name"]
        assert len(bytes.fromhex(span.resource["argus.run.nonce"])) == 8


def test_metrics_arrive_too(job, ddp_receiver):
    """At the interval that OpenTelemetry's variable says, and at the end."""
    names = {metric.name for metric in ddp_receiver.metrics()}

    assert names
    assert {metric.scope for metric in ddp_receiver.metrics()} == {scopes.METRICS}


def test_tracing_changes_no_result(job, bare):
    """Weights and random numbers are those of the same job without argus."""

    def results(job):
        lines = [line for line in job.results() if "weights" in line]
        return [
            (line["rank"], line["weights"], line["random"])
            for line in sorted(lines, key=lambda line: line["rank"])
        ]

    assert results(job) == results(bare)


def test_switched_off_there_is_nothing_of_us(bare, ddp_receiver):
    """No thread, no span; the user's own spans go where the SDK sends them."""
    ranks = {line["pid"] for line in bare.results() if "weights" in line}
    threads = [name for line in bare.results() for name in line["threads"]]

    assert [name for name in threads if "argus" in name] == []
    assert not ranks & pids(s for s in ddp_receiver.spans() if s.scope.startswith("argus"))


def test_the_module_form_of_torchrun_is_a_launcher_too(launch, receiver):
    """``python -m torch.distributed.run -m``: the agent stays inert."""
    script = (
        LOOP
        + """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    train(2)
    report(parent=os.getppid())
    dist.destroy_process_group()
    """
    )

    job = launch(
        script,
        under=("python", "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        env=receiver.environment,
    ).finish()

    assert [(d.rank, d.ordinal) for d in digests(receiver)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert pids(receiver.spans()) == {line["pid"] for line in job.results()}


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_ranks_that_a_program_starts_itself_are_traced(launch, receiver, start):
    """``mp.spawn``: they sleep until ``init_process_group``, and lose nothing at their end."""
    script = (
        LOOP
        + f"""
    import torch.multiprocessing as mp
    from opentelemetry import trace

    def rank(index):
        import torch.distributed as dist
        store = dist.FileStore(str(FOLDER / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=index, world_size=2)
        train(2)
        with trace.get_tracer("user").start_as_current_span("user.own"):
            pass
        report(index=index)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.start_processes(rank, nprocs=2, start_method="{start}")
    """
    )

    job = launch(script, env=receiver.environment).finish()

    assert [(d.rank, d.ordinal) for d in digests(receiver)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    own = receiver.spans(name="user.own")
    ours = [span for span in receiver.spans() if span not in own]
    assert pids(ours) == {line["pid"] for line in job.results()}
    assert len({span.trace_id for span in receiver.spans(name="rank.step")}) == 2
    # The third step's, which has no end: one trace, and below each rank's own span.
    assert len({span.trace_id for span in own}) == 1
    assert len({span.parent_span_id for span in own}) == 2


def test_a_program_of_one_process_needs_no_process_group(launch, receiver):
    """Its traces are its own, with a root."""
    script = (
        LOOP
        + """
    train(3)
    """
    )

    launch(script, env=receiver.environment).finish()

    assert [digest.ordinal for digest in digests(receiver)] == [0, 1, 2]
    assert len(receiver.spans(name="train.step")) == 3


def test_torch_is_not_imported_for_the_user(launch, receiver):
    """A program that never does runs as light as before, and sends nothing."""
    script = """
    import threading
    heavy = [name for name in ("torch", "pyarrow", "duckdb", "typer", "rich") if name in sys.modules]
    report(heavy=heavy, threads=[thread.name for thread in threading.enumerate()])
    """

    job = launch(script, env=receiver.environment).finish()

    assert [(line["heavy"], line["threads"]) for line in job.results()] == [([], ["MainThread"])]
    assert receiver.requests == []


def test_with_opentelemetry_off_there_is_nothing(launch, receiver):
    """OTEL_SDK_DISABLED is for all of it."""
    script = (
        LOOP
        + """
    import threading
    train(2)
    report(threads=[thread.name for thread in threading.enumerate()])
    """
    )

    environment = receiver.environment | {"OTEL_SDK_DISABLED": "true"}
    job = launch(script, env=environment).finish()

    assert [line["threads"] for line in job.results()] == [["MainThread"]]
    assert receiver.requests == []


def test_disable_in_the_middle_of_a_run_is_for_good(launch, receiver):
    """What was recorded is sent; hooks, threads and the signal handler are gone."""
    script = (
        LOOP
        + """
    import signal, threading
    import argus_otel
    train(3)
    argus_otel.disable()
    for thread in threading.enumerate():
        if thread.name.startswith("argus"):
            thread.join()
    train(3)
    report(default=signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    """
    )

    job = launch(script, env=receiver.environment).finish()

    assert [digest.ordinal for digest in digests(receiver)] == [0, 1, 2]
    assert [line["default"] for line in job.results()] == [True]


@pytest.fixture
def other_distro(tmp_path):
    """Another OpenTelemetry distribution, installed: what opentelemetry-distro is, in ten lines."""
    (tmp_path / "other_distro.py").write_text(
        textwrap.dedent(
            """
            import os
            from opentelemetry.instrumentation.distro import BaseDistro
            from opentelemetry.sdk._configuration import _OTelSDKConfigurator

            class Distro(BaseDistro):
                def _configure(self, **kwargs):
                    os.environ.setdefault("OTEL_TRACES_EXPORTER", "otlp_proto_http")

            class Configurator(_OTelSDKConfigurator):
                pass
            """
        )
    )
    installed = tmp_path / "other_distro-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: other-distro\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[opentelemetry_distro]\nother = other_distro:Distro\n"
        "[opentelemetry_configurator]\nother = other_distro:Configurator\n"
    )
    return {
        "PYTHONPATH": str(tmp_path),
        "OTEL_PYTHON_DISTRO": "other",
        "OTEL_PYTHON_CONFIGURATOR": "other",
    }


def test_beside_another_distro_our_spans_arrive_all_the_same(launch, receiver, other_distro):
    """Only the instrumentor runs; the user's spans are the other's to send, into our traces."""
    script = (
        LOOP
        + """
    from opentelemetry import trace
    tracer = trace.get_tracer("user")
    def mark(step):
        with tracer.start_as_current_span("user.log"):
            pass
    train(3, after=mark)
    """
    )

    launch(script, env=receiver.environment | other_distro).finish()

    assert [digest.ordinal for digest in digests(receiver)] == [0, 1, 2]
    ours = {span.trace_id for span in receiver.spans(name="rank.step")}
    assert len({s.trace_id for s in receiver.spans(name="user.log")} & ours) == 2


def test_a_misspelt_setting_is_told_once_and_the_job_runs(launch, receiver):
    """With the name that was probably meant."""
    script = (
        LOOP
        + """
    train(1)
    """
    )

    environment = receiver.environment | {
        "ARGUS_BASELIN_RATIO": "1",
        "ARGUS_RING_EVENTS": "many",
    }
    job = launch(script, env=environment).finish()

    assert job.stderr.count("Did you mean ARGUS_BASELINE_RATIO?") == 1
    assert job.stderr.count("ARGUS_RING_EVENTS (environment) is 'many'") == 1
    assert len(digests(receiver)) == 1


def test_strict_settings_stop_the_job_before_the_script_runs(launch, receiver):
    """Already in the launcher, before any rank starts."""
    script = """
    report(ran=True)
    """

    environment = receiver.environment | {"ARGUS_BASELIN_RATIO": "1", "ARGUS_STRICT": "1"}
    job = launch(script, under=TORCHRUN, env=environment)

    assert job.wait() == 2
    assert job.results() == []
    assert "not starting, because ARGUS_STRICT=1" in job.stderr
