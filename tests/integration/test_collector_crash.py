"""What a crash of a Collector costs: the stack's own restart, and the agent's queue on disk."""

from __future__ import annotations

import secrets
import time

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from argus_otel.stack import running_stack

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

WITHIN_S = 120


def post_span(url: str, trace_id: bytes) -> None:
    request = ExportTraceServiceRequest()
    scoped = request.resource_spans.add().scope_spans.add()
    scoped.scope.name = "argus_otel.digest"
    now_ns = time.time_ns()
    scoped.spans.add(
        trace_id=trace_id,
        span_id=secrets.token_bytes(8),
        name="rank.step",
        start_time_unix_nano=now_ns,
        end_time_unix_nano=now_ns + 1_000_000,
    )
    httpx.post(
        f"{url}/v1/traces",
        content=request.SerializeToString(),
        headers={"Content-Type": "application/x-protobuf"},
        trust_env=False,
        timeout=30,
    ).raise_for_status()


def wait_for_trace(jaeger_query_url: str, trace_id: bytes) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    url = f"{jaeger_query_url}/api/v3/traces/{trace_id.hex()}"
    while httpx.get(url, trust_env=False, timeout=30).status_code != httpx.codes.OK:
        assert time.monotonic() < deadline_s, f"not in Jaeger within {WITHIN_S} s"
        time.sleep(0.2)


def test_a_killed_collector_refuses_and_comes_back_on_the_same_port(binaries, tmp_path):
    """What an exporter's failure test needs: the address stays, the process does not."""
    with running_stack(jaeger=False, directory=tmp_path, binaries=binaries) as stack:
        url, first = stack.otlp_http_url, stack.collector.process

        stack.collector.kill()
        with pytest.raises(httpx.ConnectError):
            post_span(url, secrets.token_bytes(16))
        stack.collector.restart()

        post_span(url, secrets.token_bytes(16))
        assert stack.otlp_http_url == url
        assert stack.collector.process != first

    assert not stack.collector.is_alive()


def test_the_agents_queue_survives_its_own_crash_while_the_gateway_is_down(binaries, tmp_path):
    """Accepted from a rank, gateway gone, agent killed without a flush: the digest still arrives."""
    trace_id = secrets.token_bytes(16)
    with (
        running_stack(directory=tmp_path / "gateway", binaries=binaries) as gateway,
        running_stack(
            config="agent",
            jaeger=False,
            env={"ARGUS_COLLECTOR_GATEWAY_OTLP_HTTP": gateway.otlp_http_url},
            directory=tmp_path / "agent",
            binaries=binaries,
        ) as agent,
    ):
        gateway.collector.kill()
        post_span(agent.otlp_http_url, trace_id)
        agent.collector.kill()

        agent.collector.restart()
        gateway.collector.restart()

        wait_for_trace(gateway.jaeger_query_url, trace_id)
