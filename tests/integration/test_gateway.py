"""The gateway's routing on a real Collector and Jaeger: what is kept, what is dropped, what passes."""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, field

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from argus_otel.stack import running_stack

pytestmark = pytest.mark.multiproc

DIGEST, TIMELINE, DETAIL = "argus_otel.digest", "argus_otel.timeline", "argus_otel.detail"
RANKS = 4
STEPS = 20
KEPT = {3: "slow", 11: "event", 17: "baseline"}  # step → what its one mark says
MARKING_RANK = 2
PHASES = ("forward", "backward", "optimizer")
WITHIN_S = 90  # a deadline for a loaded machine, not an expectation


def span(trace_id: bytes, name: str, **attributes: str | int) -> dict:
    return {"trace_id": trace_id, "name": name, "id": secrets.token_bytes(8), "attrs": attributes}


def post(stack, service: str, spans_by_scope: dict[str, list[dict]], **resource: str) -> None:
    """Send one request, as one rank would."""
    request = ExportTraceServiceRequest()
    block = request.resource_spans.add()
    for key, value in {"service.name": service, **resource}.items():
        block.resource.attributes.append(_attribute(key, value))
    now_ns = time.time_ns()
    for scope, spans in spans_by_scope.items():
        scoped = block.scope_spans.add()
        scoped.scope.name = scope
        for given in spans:
            made = scoped.spans.add()
            made.trace_id, made.span_id, made.name = given["trace_id"], given["id"], given["name"]
            made.start_time_unix_nano, made.end_time_unix_nano = now_ns, now_ns + 1_000_000
            made.attributes.extend(_attribute(k, v) for k, v in given["attrs"].items())
    answer = httpx.post(
        f"{stack.otlp_http_url}/v1/traces",
        content=request.SerializeToString(),
        headers={"Content-Type": "application/x-protobuf"},
        trust_env=False,
        timeout=30,
    )
    answer.raise_for_status()


def read(stack, trace_id: bytes) -> list[tuple[str, str, dict]]:
    """Give (scope, span name, attributes) of every stored span of a trace; rank in the attributes."""
    answer = httpx.get(
        f"{stack.jaeger_query_url}/api/v3/traces/{trace_id.hex()}", trust_env=False, timeout=30
    )
    if answer.status_code == httpx.codes.NOT_FOUND:
        return []
    answer.raise_for_status()
    return [
        (
            scoped.get("scope", {}).get("name", ""),
            found["name"],
            _plain(found.get("attributes", ())),
        )
        for block in json.loads(answer.text)["result"]["resourceSpans"]
        for scoped in block["scopeSpans"]
        for found in scoped.get("spans", ())  # absent where Jaeger removed a duplicate
    ]


def wait_for(what: str, condition):
    """Poll until ``condition()`` gives something true, and give that."""
    deadline_s = time.monotonic() + WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {WITHIN_S} s: {what}"
        time.sleep(0.1)
    return found


def _attribute(key: str, value: str | int) -> KeyValue:
    kind = "int_value" if isinstance(value, int) else "string_value"
    return KeyValue(key=key, value=AnyValue(**{kind: value}))


def _plain(attributes) -> dict:
    return {a["key"]: next(iter(a["value"].values())) for a in attributes}


def ranks_of(spans, scope: str, name: str) -> list[int]:
    return sorted(int(attrs["dl.rank"]) for s, n, attrs in spans if (s, n) == (scope, name))


@dataclass
class Job:
    """What was sent."""

    service: str = field(default_factory=lambda: f"job-{secrets.token_hex(4)}")
    steps: list[bytes] = field(
        default_factory=lambda: [secrets.token_bytes(16) for _ in range(STEPS)]
    )
    other_app: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    other_spans: list[dict] = field(default_factory=list)

    def send_step(self, stack, trace_id: bytes, mark: str | None) -> None:
        for rank in range(RANKS):
            self.send_rank(stack, trace_id, rank, mark if rank == MARKING_RANK else None)

    def send_rank(self, stack, trace_id: bytes, rank: int, mark: str | None) -> None:
        timeline = [span(trace_id, name, **{"dl.rank": rank}) for name in PHASES]
        if mark:
            timeline[0]["attrs"]["argus.keep"] = mark
        root = [span(trace_id, "train.step", **{"dl.rank": 0})] if rank == 0 else []
        post(
            stack,
            self.service,
            {
                DIGEST: [*root, span(trace_id, "rank.step", **{"dl.rank": rank})],
                TIMELINE: timeline,
                DETAIL: [span(trace_id, "kernel", **{"dl.rank": rank})],
                "my_training_script": [span(trace_id, "augment", **{"dl.rank": rank})],
            },
            **{"service.instance.id": f"run-rank{rank}", "host.name": "node-a"},
        )


@pytest.fixture(scope="module")
def job(stack) -> Job:
    """Twenty steps of four ranks, three of them marked by one rank; and another application."""
    job = Job()
    for ordinal, trace_id in enumerate(job.steps):
        job.send_step(stack, trace_id, KEPT.get(ordinal))
        if ordinal % 5 == 0:  # in between, over several requests
            spans = [
                span(job.other_app, f"GET /{n}", **{"http.response.status_code": 200, "n": n})
                for n in range(ordinal, ordinal + 5)
            ]
            job.other_spans += spans
            post(stack, "shop", {"opentelemetry.instrumentation.flask": spans})
    # Decisions are made in the order of arrival: when this last one is there, all others are made.
    last = secrets.token_bytes(16)
    job.send_step(stack, last, "slow")
    wait_for("the last step's timeline", lambda: ranks_of(read(stack, last), TIMELINE, "optimizer"))
    return job


def test_every_step_keeps_the_digests_of_all_ranks(stack, job):
    """Marked or not: detectors read every step of every rank."""
    for trace_id in job.steps:
        wait_for(
            "a digest per rank",
            lambda t=trace_id: ranks_of(read(stack, t), DIGEST, "rank.step") == [0, 1, 2, 3],
        )
        assert ranks_of(read(stack, trace_id), DIGEST, "train.step") == [0]


@pytest.mark.parametrize("ordinal", sorted(KEPT))
def test_a_mark_on_one_rank_keeps_the_timelines_of_all_ranks(stack, job, ordinal):
    """One marked span of rank 2; phases and kernels of ranks 0 to 3 are stored."""
    trace_id = job.steps[ordinal]

    wait_for(
        "the last phase of every rank",
        lambda: ranks_of(read(stack, trace_id), TIMELINE, PHASES[-1]) == [0, 1, 2, 3],
    )

    spans = read(stack, trace_id)
    assert [ranks_of(spans, TIMELINE, name) for name in PHASES] == [[0, 1, 2, 3]] * len(PHASES)
    assert ranks_of(spans, DETAIL, "kernel") == [0, 1, 2, 3]


def test_a_step_that_nobody_marked_keeps_no_timeline(stack, job):
    """Seventeen steps: digests and the user's own spans only."""
    for ordinal in set(range(STEPS)) - KEPT.keys():
        scopes = {scope for scope, _, _ in read(stack, job.steps[ordinal])}

        assert scopes == {DIGEST, "my_training_script"}, f"step {ordinal}"


def test_a_users_own_spans_in_a_step_are_never_sampled_away(stack, job):
    """They carry no mark and hang in a step that is not kept."""
    unmarked = job.steps[0]

    wait_for(
        "the user's span of every rank",
        lambda: ranks_of(read(stack, unmarked), "my_training_script", "augment") == [0, 1, 2, 3],
    )


def test_another_applications_trace_passes_whole_and_unchanged(stack, job):
    """Same gateway, four requests, twenty spans: all there, with what they said and nothing more."""
    stored = wait_for(
        "all spans of the other application",
        lambda: (found := read(stack, job.other_app)) and len(found) == 20 and found,
    )

    sent = {
        s["name"]: {key: str(value) for key, value in s["attrs"].items()} for s in job.other_spans
    }
    assert {name: attrs for _, name, attrs in stored} == sent


def test_a_finding_written_later_into_an_unmarked_step_arrives(stack, job):
    """The sampler has long decided against this step; the verdict passes it by."""
    unmarked = job.steps[5]

    post(stack, "argus", {DIGEST: [span(unmarked, "argus.finding", **{"dl.rank": 1})]})

    wait_for("the finding", lambda: ranks_of(read(stack, unmarked), DIGEST, "argus.finding") == [1])


def test_a_rank_that_is_late_for_the_decision_still_joins_a_kept_step(stack, job):
    """The decision cache: rank 9 of a kept step arrives seconds after the others."""
    kept = secrets.token_bytes(16)
    job.send_step(stack, kept, "slow")
    wait_for("the decision", lambda: ranks_of(read(stack, kept), TIMELINE, "forward"))

    job.send_rank(stack, kept, 9, mark=None)

    wait_for("rank 9", lambda: 9 in ranks_of(read(stack, kept), TIMELINE, "forward"))


def test_a_mark_of_an_unknown_kind_keeps_nothing(stack, job):
    """Only the three documented values count; the step after it shows that the decision was made."""
    odd, after = secrets.token_bytes(16), secrets.token_bytes(16)

    job.send_step(stack, odd, "not-slow")
    job.send_step(stack, after, "slow")
    wait_for("the next step", lambda: ranks_of(read(stack, after), TIMELINE, "forward"))

    assert ranks_of(read(stack, odd), TIMELINE, "forward") == []


def test_what_passes_by_is_never_held_by_the_sampler(binaries, tmp_path):
    """Otherwise it would cost memory, and digests of kept steps would be stored twice."""
    with running_stack(decision_wait_s=1, directory=tmp_path, binaries=binaries) as fresh:

        def held() -> float:
            text = httpx.get(fresh.collector_metrics_url, trust_env=False, timeout=30).text
            name = "otelcol_processor_tail_sampling_new_trace_id_received"
            return sum(float(x) for x in re.findall(rf"^{name}\S* (\S+)$", text, re.MULTILINE))

        trace_id = secrets.token_bytes(16)
        post(fresh, "job", {scope: [span(trace_id, "x")] for scope in (DIGEST, "flask", "")})
        wait_for("what passes by", lambda: len(read(fresh, trace_id)) == 3)
        assert held() == 0

        post(fresh, "job", {TIMELINE: [span(trace_id, "forward")]})
        wait_for("what does not", lambda: held() == 1)


def test_span_metrics_count_every_step_before_sampling(stack, job):
    """All steps of all ranks, and one series per service, not one per rank."""
    pattern = re.compile(
        r"^traces_span_metrics_calls_total\{(?P<labels>[^}]*)\} (?P<value>\S+)", re.MULTILINE
    )

    def calls() -> list[tuple[str, float]]:
        text = httpx.get(stack.prometheus_url, trust_env=False, timeout=30).text
        return [
            (m["labels"], float(m["value"]))
            for m in pattern.finditer(text)
            if f'service_name="{job.service}"' in m["labels"]
            and 'span_name="forward"' in m["labels"]
        ]

    series = wait_for(
        "all spans counted", lambda: (c := calls()) and c[0][1] >= (STEPS + 1) * RANKS and c
    )

    assert len(series) == 1
    assert "rank" not in series[0][0]
