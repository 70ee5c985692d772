"""A verdict in the trace of the step it speaks of, once."""

import json

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from argus_otel import service
from argus_otel.publish.spans import HttpDestination, PublishError, finding_spans
from argus_otel.semconv import names
from argus_otel.store.opening import open_store
from argus_otel.wire import ids

SLOW = {
    "ranks": 4,
    "steps": 60,
    "changes": [{"ranks": [2], "steps": [30, 60], "own_times": 1.5}],
}


@pytest.fixture
def judged(tmp_path, write_store):
    """A slow run in a folder, judged."""
    write_store(tmp_path, SLOW)
    return service.judge(open_store(str(tmp_path)), "latest")


def finding_rows(folder):
    """The verdicts on the straggler; other detectors may have something to say as well."""
    store = open_store(str(folder))
    rows = store.spans(store.resolve("latest")).to_pylist()
    rows = [row for row in rows if row["name"] == names.SPAN_ARGUS_FINDING]
    causes = [json.loads(row["attributes"])[names.ARGUS_FINDING_CAUSE] for row in rows]
    return [row for row, cause in zip(rows, causes, strict=True) if cause == "compute_straggler"]


def test_a_verdict_lies_under_the_culprits_step_with_error_status(tmp_path, judged):
    """Whoever opens the step sees it there, red."""
    sent = service.publish(judged, open_store(str(tmp_path)), str(tmp_path), endpoint=None)

    assert sent == len(judged.verdict.diagnosis.findings)
    (row,) = finding_rows(tmp_path)
    attributes = json.loads(row["attributes"])
    trace_id = bytes.fromhex(row["trace_id"])
    assert row["parent_id"] == ids.span_id(trace_id, ids.RANK_STEP, 2).hex()
    assert row["ordinal"] == 30
    assert row["status"] == "error"
    assert row["service"] == "argus-detect"
    assert attributes[names.ARGUS_FINDING_CAUSE] == "compute_straggler"
    assert attributes[names.ARGUS_FINDING_RANKS] == [2]


def test_publishing_twice_writes_once(tmp_path, judged):
    """Detectors run every minute; the trace holds one verdict."""
    for expected in (len(judged.verdict.diagnosis.findings), 0):
        store = open_store(str(tmp_path))
        assert service.publish(judged, store, str(tmp_path), endpoint=None) == expected

    assert len(finding_rows(tmp_path)) == 1


def later(slow_until):
    """The same run 60 steps later, slow until then or to its end."""
    changes = [{"ranks": [2], "steps": [30, slow_until], "own_times": 1.5}]
    return {"ranks": 4, "steps": 120, "changes": changes}


def publish(folder):
    """Judge what the folder holds now and publish it; spans sent."""
    store = open_store(str(folder))
    judged = service.judge(store, "latest")
    return service.publish(judged, store, str(folder), endpoint=None)


def test_a_verdict_that_was_open_is_told_to_have_ended_once(tmp_path, judged, write_store):
    """In the last step that was slow, so that who opens that one sees that it is over."""
    assert publish(tmp_path) > 0
    write_store(tmp_path, later(slow_until=60), from_step=60)

    assert publish(tmp_path) > 0
    assert publish(tmp_path) == 0

    opened, ended = sorted(finding_rows(tmp_path), key=lambda row: row["ordinal"])
    (first, last) = (json.loads(row["attributes"]) for row in (opened, ended))
    assert first[names.ARGUS_FINDING_ID] == last[names.ARGUS_FINDING_ID]
    assert first[names.ARGUS_FINDING_STATE] == "open"
    assert last[names.ARGUS_FINDING_STATE] == "ended"
    assert opened["ordinal"] == 30
    assert 55 <= ended["ordinal"] <= 62
    assert opened["span_id"] != ended["span_id"]
    assert ended["status"] == "error"


def test_a_verdict_that_goes_on_is_not_told_again(tmp_path, judged, write_store):
    """Sixty more slow steps are no news."""
    assert publish(tmp_path) > 0
    before = finding_rows(tmp_path)
    write_store(tmp_path, later(slow_until=120), from_step=60)

    publish(tmp_path)

    assert finding_rows(tmp_path) == before


def test_a_verdict_that_had_ended_before_anybody_looked_is_told_once(tmp_path, write_store):
    """In the step that one is sent to, where it began."""
    write_store(tmp_path, later(slow_until=60))

    assert publish(tmp_path) > 0
    assert publish(tmp_path) == 0

    (row,) = finding_rows(tmp_path)
    assert json.loads(row["attributes"])[names.ARGUS_FINDING_STATE] == "ended"
    assert row["ordinal"] == 30


def test_span_ids_follow_from_the_finding(judged):
    """So that a store which takes duplicates can still tell them."""
    findings, steps = judged.verdict.diagnosis.findings, judged.steps

    first, second = finding_spans(findings, steps), finding_spans(findings, steps)

    assert [span.span_id for span in first] == [span.span_id for span in second]
    assert len({span.span_id for span in first}) == len(first) > 0
    assert all(any(span.span_id) for span in first)


def test_an_endpoint_is_posted_to_as_otlp():
    """A Collector takes it like any other span."""
    seen = []

    def answer(request):
        seen.append(request)
        return httpx.Response(200)

    destination = HttpDestination(
        "http://collector:4318/", {"x-team": "a"}, transport=httpx.MockTransport(answer)
    )
    destination.send(ExportTraceServiceRequest().SerializeToString())

    (request,) = seen
    assert str(request.url) == "http://collector:4318/v1/traces"
    assert request.headers["content-type"] == "application/x-protobuf"
    assert request.headers["x-team"] == "a"


def test_an_endpoint_that_refuses_is_a_clear_error():
    """The verdict stands; only its publication failed."""
    destination = HttpDestination(
        "http://collector:4318", transport=httpx.MockTransport(lambda _: httpx.Response(503))
    )

    with pytest.raises(PublishError, match="not taking the verdict"):
        destination.send(b"")


def test_a_jaeger_store_without_an_endpoint_has_nowhere_to_write(judged, tmp_path):
    """Jaeger's query service takes no spans."""
    store = open_store(str(tmp_path))

    assert service.publish(judged, store, "jaeger+http://jaeger:16686", endpoint=None) is None
