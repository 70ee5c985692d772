"""One run, sent to the embedded store and through a Collector to a real Jaeger, reads the same."""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from argus_otel.semconv import names
from argus_otel.service import NO_VERDICT, judge
from argus_otel.stack import GoMissingError, build_stack, running_stack
from argus_otel.store.opening import open_store
from argus_otel.store.receiver import Receiver
from argus_otel.store.writer import ParquetWriter
from argus_otel.testing.otlp import (
    add_scope,
    add_span,
    digest_request,
    example_digest,
    resource_of,
    trace_of,
)
from argus_otel.wire import scopes
from argus_otel.wire.digest import fold_sync
from argus_otel.wire.sketch import sketch_durations

# Building the Collector and Jaeger takes minutes, once; whichever test comes first pays for it.
pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(1800)]

RANKS = 4
STEPS = 120  # more than Jaeger is asked for at once
PAUSE_STEP = 5
KERNELS = sketch_durations(
    np.arange(20_000, 30_000, 100), np.arange(100) % 11, np.full(100, 7), np.full(100, 2),
    names=[f"void gemm<{code}, 128>(float const*)" for code in range(11)],
)  # fmt: skip
WITHIN_S = 120  # a deadline for a loaded machine, not an expectation


@pytest.fixture(scope="module")
def binaries():
    try:
        return build_stack()
    except GoMissingError as error:
        pytest.skip(f"no Collector and Jaeger: {error.where} is {error.got}")


@pytest.fixture
def stack(binaries, tmp_path_factory):
    with running_stack(
        config="gateway",
        decision_wait_s=1,
        directory=tmp_path_factory.mktemp("stack"),
        binaries=binaries,
    ) as running:
        yield running


def requests():
    """A job a minute ago: plain steps, folded ones, a damaged digest, a pause, two services."""
    start_ns = time.time_ns() - 60 * 10**9
    for rank in range(RANKS):
        service = "training" if rank else "training-master"
        resource = resource_of(rank, world_size=RANKS, service=service, **{"hw.id": f"GPU-{rank}"})
        digests = [example_digest(step, rank, start_ns=start_ns) for step in range(STEPS)]
        for digest in digests[PAUSE_STEP : PAUSE_STEP + 3]:
            digest.kernels, digest.expert_tokens = KERNELS, (2048, 0, rank)
        for digest in digests[10:20]:
            digest.sync = fold_sync(digest.sync)
            digest.gc_s, digest.gc_count, digest.keep, digest.truncated = 0.01, 1, "slow", True
        request = digest_request(digests, resource)
        if rank == 1:
            damaged = request.resource_spans[0].scope_spans[0].spans[30]
            for pair in damaged.attributes:
                if pair.key == names.ARGUS_DIGEST_SYNC:
                    pair.value.string_value = "damaged"
        if rank == 2:
            scope = add_scope(request, resource, scopes.TIMELINE)
            begin_ns = start_ns + PAUSE_STEP * 100_000_000 + 7_000_000
            attributes = {names.ARGUS_KEEP: "event", names.ARGUS_GC_GENERATION: 2}
            trace_id = trace_of(PAUSE_STEP, rank, resource)
            times = (begin_ns, begin_ns + 60_000_000)
            add_span(scope, "gc", trace_id, b"\1" * 8, times, attributes=attributes)
        yield request.SerializeToString()


def post(client: httpx.Client, endpoint: str, body: bytes) -> None:
    headers = {"Content-Type": "application/x-protobuf"}
    client.post(f"{endpoint}/v1/traces", content=body, headers=headers).raise_for_status()


def read_when_complete(store):
    """Poll until everything has gone through the Collector."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        if store.runs():
            run = store.resolve("latest")
            tables = store.read(run)
            if tables.steps.num_rows == RANKS * STEPS - 1 and tables.events.num_rows:
                return run, tables
        assert time.monotonic() < deadline, "the store did not show the whole run in time"


def test_the_embedded_store_and_jaeger_give_the_same_tables(stack, tmp_path):
    """Detectors must not see another run because it was kept elsewhere."""
    with (
        Receiver(ParquetWriter(tmp_path), gather_s=0) as receiver,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        for body in requests():
            post(client, receiver.endpoint, body)
            post(client, stack.otlp_http_url, body)
    embedded = open_store(str(tmp_path))
    jaeger = open_store(f"jaeger+{stack.jaeger_query_url}")

    jaeger_run, from_jaeger = read_when_complete(jaeger)
    embedded_run, from_parquet = read_when_complete(embedded)

    assert jaeger_run.run == embedded_run.run
    assert jaeger_run.steps == embedded_run.steps
    assert from_jaeger.damaged_digests == from_parquet.damaged_digests == 1
    for name in ("steps", "collectives", "ranks", "groups", "events"):
        assert getattr(from_jaeger, name).equals(getattr(from_parquet, name)), name
    for name in ("kernels", "experts"):
        rows = jaeger.rows(jaeger_run, name, (PAUSE_STEP, PAUSE_STEP + 2), [0, 3])
        wanted = embedded.rows(embedded_run, name, (PAUSE_STEP, PAUSE_STEP + 2), [0, 3])
        assert rows.equals(wanted)
        assert rows.num_rows == 4 * (9 if name == "kernels" else 1)
    window = (PAUSE_STEP, PAUSE_STEP + 1)
    seen = jaeger.spans(jaeger_run, window)
    assert seen.equals(embedded.spans(embedded_run, window))
    assert seen.num_rows == RANKS + 2  # the root, and the pause


def test_a_run_without_steps_is_in_jaeger_as_in_the_embedded_store(stack, tmp_path):
    """Only that its ranks came up is known."""
    now_ns = time.time_ns()
    embedded, jaeger = tmp_path / "store", open_store(f"jaeger+{stack.jaeger_query_url}")
    with (
        Receiver(ParquetWriter(embedded), gather_s=0) as receiver,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        for rank in range(RANKS):
            resource = resource_of(rank, world_size=RANKS)
            request = ExportTraceServiceRequest()
            scope = add_scope(request, resource, scopes.DIGEST)
            trace_id, span_id = trace_of(0, rank, resource), bytes([rank + 1]) * 8
            attributes = {names.DL_RANK: rank}
            times = (now_ns, now_ns + 1000)  # Jaeger makes an empty one a nanosecond long
            add_span(scope, "rank.start", trace_id, span_id, times, attributes=attributes)
            for endpoint in (receiver.endpoint, stack.otlp_http_url):
                post(client, endpoint, request.SerializeToString())
    deadline = time.monotonic() + WITHIN_S
    while not (runs := jaeger.runs()) or runs[0].ranks_seen < RANKS:
        assert time.monotonic() < deadline, "Jaeger did not show the run in time"

    assert runs == open_store(str(embedded)).runs()
    assert judge(jaeger, "latest").exit_code == NO_VERDICT


def test_a_collector_may_stand_in_front_of_the_embedded_store(binaries, tmp_path):
    """As its backend, with its own compression, batches and retries."""
    with (
        Receiver(ParquetWriter(tmp_path)) as receiver,
        running_stack(
            config="gateway",
            decision_wait_s=1,
            jaeger=False,
            env={"ARGUS_COLLECTOR_BACKEND_OTLP_HTTP": receiver.endpoint},
            binaries=binaries,
        ) as collector,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        for body in requests():
            post(client, collector.otlp_http_url, body)

        run, tables = read_when_complete(open_store(str(tmp_path)))

    assert run.ranks_seen == RANKS
    assert tables.events["kind"].to_pylist() == ["gc"]
