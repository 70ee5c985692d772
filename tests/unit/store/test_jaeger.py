"""The Jaeger reader against a server that answers as Jaeger does, page limits and faults included."""

import base64
import json
from dataclasses import replace
from datetime import datetime
from urllib.parse import parse_qs, urlsplit

import httpx
import numpy as np
import pyarrow.compute as pc
import pytest

from argus_otel._runtime.errors import StoreError
from argus_otel.cli.watching import Watcher
from argus_otel.publish.ledger import Ledger
from argus_otel.service import NO_VERDICT, judge
from argus_otel.store.jaeger import JaegerStore
from argus_otel.store.parquet import ParquetStore
from argus_otel.store.spans import Span
from argus_otel.store.writer import ParquetWriter
from argus_otel.tables.kernels import read_sketch_column
from argus_otel.testing.otlp import NONCE, example_digest
from argus_otel.wire.kernels import MAX_KEYS, REST
from argus_otel.wire.sketch import sketch_durations

START_NS = 1_800_000_000_000_000_000
NOW_NS = START_NS + 3600 * 10**9
NO_TRACES = {"error": {"httpCode": 404, "message": "No traces found"}}


class FakeJaeger:
    """The query API over some spans: newest traces first, at most as many as asked for."""

    def __init__(self, spans: list[Span]):
        self.spans = spans
        self.ids = str
        self.without = ()  # paths that this version lacks
        self.faults = []  # answered before anything else, once each
        self.asked = []
        self.max_traces = 20_000
        self.operations = sorted({span.name for span in spans})

    def __call__(self, request: httpx.Request) -> httpx.Response:
        url = urlsplit(str(request.url))
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.asked.append((url.path, query, request.headers))
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault
        if url.path in self.without:
            return httpx.Response(200, text="<!DOCTYPE html>\n<html>the user interface</html>")
        if url.path.endswith("/services"):
            names = ["checkout", "training"]
            return self._json({"services": names} if "v3" in url.path else {"data": names})
        if url.path.endswith("/operations"):
            names = self.operations if query["service"] == "training" else ["GET /"]
            listed = [{"name": name} for name in names]
            return self._json({"operations": listed} if "v3" in url.path else {"data": listed})
        if url.path == "/api/v3/traces":
            return self._search(query)
        trace_id = url.path.rpartition("/")[2]
        return self._traces({trace_id} & {span.trace_id for span in self.spans})

    def _search(self, query):
        limit = int(query["query.num_traces"])
        if limit >= self.max_traces:
            return self._json({"error": {"httpCode": 500, "message": "search depth"}}, 500)
        low, high = (_ns(query[f"query.start_time_{end}"]) for end in ("min", "max"))
        found = {}
        for span in self.spans:
            if span.name == query["query.operation_name"] and low <= span.start_ns <= high:
                found[span.trace_id] = max(span.start_ns, found.get(span.trace_id, 0))
        return self._traces(sorted(found, key=found.get, reverse=True)[:limit])

    def _traces(self, trace_ids):
        spans = [_otlp(span, self.ids) for span in self.spans if span.trace_id in set(trace_ids)]
        return self._json({"result": {"resourceSpans": spans}} if spans else NO_TRACES)

    @staticmethod
    def _json(document, status=None):
        if status is None:
            status = 404 if document is NO_TRACES else 200
        return httpx.Response(status, text=json.dumps(document))


def _ns(text):
    seconds, _, rest = text.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(seconds + "+00:00").timestamp()) * 10**9 + int(rest)


def _base64(text):
    return base64.b64encode(bytes.fromhex(text)).decode()


def _otlp(span, ids):
    resource = {
        "service.name": span.origin.service,
        "argus.run.id": span.origin.run_id,
        "argus.run.nonce": span.origin.run,
        "argus.attempt": span.origin.attempt,
        "argus.role": span.origin.role,
        "dl.rank": span.origin.rank,
        "dl.world_size": span.origin.world_size,
        "dl.local_rank": span.origin.local_rank,
        "host.name": span.origin.host,
        "process.pid": span.origin.pid,
    }
    one = {
        "traceId": ids(span.trace_id),
        "spanId": ids(span.span_id),
        "parentSpanId": ids(span.parent_id or ""),
        "name": span.name,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _pairs(span.attributes),
        "status": {},
    }
    return {
        "resource": {"attributes": _pairs(resource)},
        "scopeSpans": [{"scope": {"name": span.scope}, "spans": [one]}],
    }


def _pairs(attributes):
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value):
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": value}


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def opened(pauses):
    def open_it(jaeger, headers=None):
        return JaegerStore(
            "http://jaeger:16686",
            headers,
            transport=httpx.MockTransport(jaeger),
            now_ns=lambda: NOW_NS,
            pause=pauses.append,
        )

    return open_it


def starts(job_spans, ranks=range(4)):
    """What ranks say that joined their process group: in the trace of step 0."""
    steps = [span for span in job_spans(steps=[0], ranks=ranks) if span.name == "rank.step"]
    return [
        replace(
            span,
            name="rank.start",
            span_id=f"{span.origin.rank + 1:016x}",
            end_ns=span.start_ns,
            attributes={"dl.rank": span.origin.rank},
        )
        for span in steps
    ]


def test_a_run_without_steps_is_listed_and_judged_as_by_the_embedded_store(
    tmp_path, job_spans, opened
):
    """A job that hangs before its first step is the one that somebody looks for."""
    spans = starts(job_spans)
    with ParquetWriter(tmp_path) as writer:
        writer.write(spans)
    parquet, store = ParquetStore(tmp_path), opened(FakeJaeger(spans))

    (run,) = store.runs()

    assert [run] == parquet.runs()
    assert (run.ranks_seen, run.world_size, run.steps) == (4, 4, 0)
    assert store.read(run).ranks.equals(parquet.read(run).ranks)
    assert judge(store, "latest").exit_code == judge(parquet, "latest").exit_code == NO_VERDICT
    assert store.spans(run).equals(parquet.spans(run))


def test_a_rank_that_came_up_and_made_no_step_counts_as_seen(tmp_path, job_spans, opened):
    """Beside ranks that did, whose trace two searches find."""
    spans = starts(job_spans) + job_spans(ranks=range(3))
    with ParquetWriter(tmp_path) as writer:
        writer.write(spans)
    parquet, store = ParquetStore(tmp_path), opened(FakeJaeger(spans))

    (run,) = store.runs()

    assert [run] == parquet.runs()
    assert (run.ranks_seen, run.steps) == (4, 3)
    assert store.read(run).steps.equals(parquet.read(run).steps)


@pytest.mark.parametrize("ids", [str, _base64])
def test_a_run_reads_the_same_as_from_the_embedded_store(tmp_path, job_spans, opened, ids):
    """Ids in hexadecimal or in base64."""
    spans = job_spans(steps=range(4))
    jaeger = FakeJaeger(spans)
    jaeger.ids = ids
    with ParquetWriter(tmp_path) as writer:
        writer.write(spans)
    parquet = ParquetStore(tmp_path)
    store = opened(jaeger)

    assert store.runs() == parquet.runs()
    tables = store.read(store.resolve("latest"))
    expected = parquet.read(parquet.resolve("latest"))
    for name in ("ranks", "steps", "collectives", "groups", "events"):
        assert getattr(tables, name).equals(getattr(expected, name)), name


def test_kernels_read_the_same_as_from_the_embedded_store(tmp_path, job_spans, opened):
    """Of every digest that has some; a rank without a GPU has none."""

    def digest(ordinal, rank):
        durations = np.arange(5_000, 9_000, 50) * (rank + 1)
        name = np.arange(durations.size) % 10  # two more than have a row of their own
        kernels = sketch_durations(
            durations, name, np.full(name.size, 7), np.full(name.size, 2),
            names=[f"kernel_{code}" for code in range(10)],
        )  # fmt: skip
        tokens = (rank, 40 - rank) if rank > 1 else ()
        return example_digest(
            ordinal, rank, kernels=kernels if rank else None, expert_tokens=tokens
        )

    spans = job_spans(steps=range(4), digest=digest)
    with ParquetWriter(tmp_path) as writer:
        writer.write(spans[: len(spans) // 2])
        writer.write(spans[len(spans) // 2 :])
    parquet = ParquetStore(tmp_path)
    store = opened(FakeJaeger(spans))

    kernels = store.rows(store.resolve("latest"), "kernels", (1, 3))

    assert kernels.equals(parquet.rows(parquet.resolve("latest"), "kernels", (1, 3)))
    assert kernels.num_rows == 2 * 3 * (MAX_KEYS + 1)
    rest = kernels.filter(pc.field("name") == REST)
    assert rest["stream"].null_count == rest["phase"].null_count == rest.num_rows
    assert set(kernels["phase"].to_pylist()) == {"forward", None}
    one = store.rows(store.resolve("latest"), "kernels", (2, 3), [3])
    rows = read_sketch_column(one["sketch"])
    assert rows.count.sum() == 80
    experts = store.rows(store.resolve("latest"), "experts", (1, 3))
    assert experts.equals(parquet.rows(parquet.resolve("latest"), "experts", (1, 3)))
    assert experts["tokens"].to_pylist() == [[2, 38], [3, 37]] * 2
    attributes = parquet.spans(parquet.resolve("latest"))["attributes"].to_pylist()
    assert not any("kernel" in text for text in attributes)


def test_blocks_are_the_whole_run(job_spans, opened):
    """What Jaeger's API suits fits in memory."""
    store = opened(FakeJaeger(job_spans()))
    run = store.resolve("latest")

    (block,) = store.blocks(run)

    assert block.steps.equals(store.read(run).steps)


def test_more_steps_than_a_page_holds_are_all_read(job_spans, opened):
    """Four hundred steps, in a week of which they take forty seconds."""
    jaeger = FakeJaeger(job_spans(steps=range(400), ranks=[0, 1], world_size=2))
    store = opened(jaeger)

    run = store.resolve("latest")

    assert run.steps == 400
    assert store.read(run).steps.num_rows == 800
    searches = [query for path, query, _ in jaeger.asked if path == "/api/v3/traces"]
    assert len(searches) < 40
    assert all(query["query.raw_traces"] == "true" for query in searches)


def test_a_server_that_returns_fewer_than_asked_for_loses_nothing(job_spans, opened):
    """Steps that all start in one instant cannot be parted by time: the page grows."""
    spans = job_spans(steps=range(300), ranks=[0])
    for span in spans:
        span.end_ns -= span.start_ns - START_NS
        span.start_ns = START_NS
    store = opened(FakeJaeger(spans))

    assert store.resolve("latest").steps == 300


def test_only_services_that_send_steps_are_searched(job_spans, opened):
    """A shared Jaeger holds other people's applications."""
    jaeger = FakeJaeger(job_spans())

    opened(jaeger).runs()

    searched = {query.get("query.service_name") for _, query, _ in jaeger.asked}
    assert searched == {None, "training"}


@pytest.mark.parametrize(
    "without",
    [
        ("/api/v3/services",),
        ("/api/v3/operations",),
        ("/api/v3/services", "/api/v3/operations", "/api/operations"),
    ],
)
def test_a_missing_call_is_replaced_by_an_older_one_or_done_without(job_spans, opened, without):
    """Jaeger answers a path that it does not know with its user interface."""
    jaeger = FakeJaeger(job_spans())
    jaeger.without = without

    assert [run.run for run in opened(jaeger).runs()] == [NONCE]


def test_a_few_steps_are_asked_for_by_their_computed_ids(job_spans, opened):
    """No search, so no limits; a step that is not there is no error."""
    jaeger = FakeJaeger(job_spans(steps=range(5)))
    store = opened(jaeger)
    run = store.resolve("latest")
    store.read(run)
    jaeger.asked.clear()

    tables = store.read(run, steps=(3, 8))

    assert set(tables.steps["ordinal"].to_pylist()) == {3, 4}
    assert {path.rpartition("/")[0] for path, _, _ in jaeger.asked} == {"/api/v3/traces"}
    assert store.spans(run, steps=(3, 4)).num_rows == 5


def test_what_a_listing_has_fetched_is_not_fetched_again(job_spans, opened):
    """`argus detect` resolves, then reads."""
    jaeger = FakeJaeger(job_spans())
    store = opened(jaeger)
    run = store.resolve("latest")
    asked = len(jaeger.asked)

    first = store.read(run)
    assert len(jaeger.asked) == asked
    second = store.read(run)

    assert len(jaeger.asked) > asked
    assert second.steps.equals(first.steps)


def test_headers_go_with_every_request(job_spans, opened):
    """For whatever stands in front of Jaeger."""
    jaeger = FakeJaeger(job_spans())

    opened(jaeger, {"Authorization": "Bearer token"}).runs()

    assert {headers["authorization"] for _, _, headers in jaeger.asked} == {"Bearer token"}


def test_passing_faults_are_tried_again(job_spans, opened, pauses):
    """A connection that broke, a proxy that was busy."""
    jaeger = FakeJaeger(job_spans())
    jaeger.faults = [httpx.ReadError("reset"), httpx.Response(503), httpx.ConnectError("refused")]

    assert len(opened(jaeger).runs()) == 1
    assert pauses == [0.25, 0.5, 1.0]


def test_a_server_that_stays_away_is_an_error_that_names_it(opened):
    """Exit code 4."""
    jaeger = FakeJaeger([])
    jaeger.faults = [httpx.ConnectError("connection refused") for _ in range(9)]

    with pytest.raises(StoreError, match="http://jaeger:16686 is not answering") as raised:
        opened(jaeger).runs()

    assert raised.value.exit_code == 4


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(401), "--header"),
        (httpx.Response(500, text="boom"), "HTTP 500: boom"),
        (httpx.Response(200, text="{half"), "something else"),
        (httpx.Response(200, text="[]"), "something else"),
        (httpx.Response(200, text='{"error": {"message": "no storage"}}'), "no storage"),
        (httpx.Response(302, headers={"location": "https://login"}), "HTTP 302"),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_says_what_came(opened, answer, said):
    """Never a traceback, and never an empty list of runs."""
    jaeger = FakeJaeger([])
    jaeger.faults = [answer]

    with pytest.raises(StoreError, match=said):
        opened(jaeger).runs()


def test_a_server_that_is_no_jaeger_is_said_to_lack_the_call(job_spans, opened):
    """For example the address of Grafana."""
    jaeger = FakeJaeger(job_spans())
    jaeger.without = ("/api/v3/traces",)

    with pytest.raises(StoreError, match="without the call"):
        opened(jaeger).runs()


def test_a_stream_of_several_documents_is_one_answer(job_spans, opened):
    """Gateways write a chunk of spans as a document of its own."""
    spans = job_spans(steps=[0])
    chunks = [json.dumps({"result": {"resourceSpans": [_otlp(span, str)]}}) for span in spans]
    jaeger = FakeJaeger(spans)
    jaeger._traces = lambda _ids: httpx.Response(200, text="\n".join(chunks))

    assert opened(jaeger).resolve("latest").ranks_seen == 4


def test_a_job_is_watched_whose_newest_steps_do_not_name_their_groups(job_spans, opened):
    """Digests do so on the first step that uses a group, then rarely; a look reads the newest alone."""

    def in_ten_seconds(ordinal, rank):
        return example_digest(ordinal, rank, start_ns=START_NS + ordinal * 10 * 10**9)

    def first(steps):
        return job_spans(steps=range(steps), digest=in_ten_seconds)

    jaeger = FakeJaeger(first(11))
    store = opened(jaeger)
    watcher = Watcher(open_store=lambda: store, run_name="latest", ledger=Ledger(), detectors=())
    watcher.look()
    for steps in (31, 61):
        jaeger.spans = first(steps)
        look = watcher.look()

    seen = look.verdict.frame.whole
    assert look.newest_step == 60
    assert [group.members.tolist() for group in seen.groups] == [[0, 1, 2, 3]]
    assert (seen.operations.members_AL == 4).all()
    assert seen.hosts_R == ("node-0",) * 4
