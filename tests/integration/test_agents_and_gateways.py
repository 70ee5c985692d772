"""Two agents in front of two gateways, as collector-config ships them: no step comes out torn."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from argus_otel._runtime.bundled import bundled_path
from argus_otel.stack import running_stack
from argus_otel.testing import InMemoryReceiver
from argus_otel.wire import scopes

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

WITHIN_S = 120
STEPS = 16
KEPT = (3, 4, 9, 10)
"""Steps that one rank has marked; two with an even and two with an odd trace id."""
MARKING_RANK = 1


def request_of(rank: int, trace_id: bytes, *, mark: bool) -> bytes:
    """What one rank posts of one step."""
    request = ExportTraceServiceRequest()
    block = request.resource_spans.add()
    block.resource.attributes.append(KeyValue(key="dl.rank", value=AnyValue(int_value=rank)))
    now_ns = time.time_ns()
    for scope, name in ((scopes.DIGEST, "rank.step"), (scopes.TIMELINE, "forward")):
        scoped = block.scope_spans.add()
        scoped.scope.name = scope
        span = scoped.spans.add(
            trace_id=trace_id,
            span_id=secrets.token_bytes(8),
            name=name,
            start_time_unix_nano=now_ns,
            end_time_unix_nano=now_ns + 1_000_000,
        )
        if mark and scope == scopes.TIMELINE:
            span.attributes.append(KeyValue(key="argus.keep", value=AnyValue(string_value="slow")))
    return request.SerializeToString()


def post(agent, body: bytes) -> None:
    httpx.post(
        f"{agent.otlp_http_url}/v1/traces",
        content=body,
        headers={"Content-Type": "application/x-protobuf"},
        trust_env=False,
        timeout=30,
    ).raise_for_status()


def trace_ids() -> list[bytes]:
    """Even and odd ones in turn."""
    return [secrets.token_bytes(15) + bytes([16 * step + step % 2]) for step in range(STEPS)]


def ranks_by_trace(receiver: InMemoryReceiver, name: str) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for span in receiver.spans(name=name):
        found.setdefault(span.trace_id, []).append(span.resource["dl.rank"])
    return {trace_id: sorted(ranks) for trace_id, ranks in found.items()}


def test_all_spans_of_a_step_meet_at_one_of_two_gateways(binaries, tmp_path):
    """One rank's mark keeps the other rank's timeline, though that came through another agent."""
    config = bundled_path("collector-config")
    with ExitStack() as running:
        backends = [running.enter_context(InMemoryReceiver()) for _ in range(2)]
        gateways = [
            running.enter_context(
                running_stack(
                    config="gateway",
                    decision_wait_s=2,
                    jaeger=False,
                    env={"ARGUS_COLLECTOR_BACKEND_OTLP_HTTP": backend.endpoint},
                    directory=tmp_path / f"gateway-{n}",
                    binaries=binaries,
                )
            )
            for n, backend in enumerate(backends)
        ]
        agents = [
            running.enter_context(
                running_stack(
                    config=[config / "agent.yaml", config / "fragments/two-gateways.yaml"],
                    jaeger=False,
                    env={
                        "ARGUS_COLLECTOR_GATEWAY_OTLP_HTTP": gateways[0].otlp_http_url,
                        "ARGUS_COLLECTOR_SECOND_GATEWAY_OTLP_HTTP": gateways[1].otlp_http_url,
                    },
                    directory=tmp_path / f"agent-{n}",
                    binaries=binaries,
                )
            )
            for n in range(2)
        ]
        steps = trace_ids()

        for step, trace_id in enumerate(steps):
            for rank, agent in enumerate(agents):
                mark = step in KEPT and rank == MARKING_RANK
                post(agent, request_of(rank, trace_id, mark=mark))

        for parity, backend in enumerate(backends):
            mine = steps[parity::2]
            kept = {steps[step] for step in KEPT if step % 2 == parity}
            backend.wait_for(
                lambda got, mine=mine, kept=kept: (
                    ranks_by_trace(got, "rank.step") == {key: [0, 1] for key in mine}
                    and ranks_by_trace(got, "forward") == {key: [0, 1] for key in kept}
                ),
                WITHIN_S,
            )
            for span in backend.spans():
                assert span.resource["deployment.environment.name"] == "production"
