"""The receiver over real HTTP: what it takes, what it refuses and how, and that it forgets nothing."""

import gzip
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from argus_otel._runtime.errors import ConfigError
from argus_otel.store.parquet import ParquetStore
from argus_otel.store.receiver import Receiver
from argus_otel.store.writer import ParquetWriter
from argus_otel.testing.otlp import digest_request, example_digest, resource_of

WITHIN_S = 60  # a deadline for a loaded machine, not an expectation


class MemorySink:
    """Keeps spans; can be told to fail, or to wait."""

    def __init__(self):
        self.spans = []
        self.groups = 0
        self.closed = False
        self.error = None
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def write(self, spans):
        self.entered.set()
        assert self.open.wait(WITHIN_S)
        if self.error is not None:
            raise self.error
        if any(span.name == "poison" for span in spans):
            raise ValueError("poison")
        self.spans += spans
        self.groups += 1

    def compact(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def sink():
    return MemorySink()


@pytest.fixture
def receiver(sink):
    with Receiver(sink, gather_s=0, max_body_bytes=20_000, max_decoded_bytes=50_000) as running:
        yield running


def body(rank=0, steps=2):
    digests = [example_digest(ordinal, rank) for ordinal in range(steps)]
    return digest_request(digests, resource_of(rank, world_size=4)).SerializeToString()


def test_an_export_is_answered_once_it_is_stored(receiver, sink, post):
    """Rank 0 sends its step and the root above it."""
    answer = post(receiver, body(steps=1))

    assert answer.status_code == 200
    assert answer.content == b""
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert [span.name for span in sink.spans] == ["train.step", "rank.step"]


def test_gzip_is_understood_in_one_member_or_several(receiver, sink, post):
    """Both are what RFC 1952 calls gzip; concatenated protobuf messages merge."""
    several = gzip.compress(body(0, 1)) + gzip.compress(body(1, 1))

    assert post(receiver, gzip.compress(body(steps=1)), Content_Encoding="gzip").is_success
    assert post(receiver, several, Content_Encoding="gzip").is_success

    assert len(sink.spans) == 2 + 3


def test_a_chunked_body_is_understood(receiver, sink, post):
    """Some senders do not know the length beforehand."""
    whole = body(steps=3)

    answer = post(receiver, iter([whole[:100], whole[100:]]))

    assert answer.status_code == 200
    assert len(sink.spans) == 6


@pytest.mark.parametrize("path", ["/v1/metrics", "/v1/logs"])
def test_metrics_and_logs_are_accepted_and_not_stored(receiver, sink, post, path):
    """A sender with all three signals on must not see errors."""
    assert post(receiver, b"", path=path).status_code == 200

    assert receiver.counts[path] == 1
    assert sink.spans == []


def test_json_is_refused_with_a_status_that_says_what_to_set(receiver, post):
    """The body of an error is google.rpc.Status in protobuf, as OTLP wants."""
    answer = post(receiver, b"{}", Content_Type="application/json")

    assert answer.status_code == 415
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert answer.content[:2] == b"\x08\x03"  # code: INVALID_ARGUMENT
    assert b"OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in answer.content


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"\xff\xff\xff", {}, 400),
        (b"not gzip", {"Content_Encoding": "gzip"}, 400),
        (gzip.compress(b"cut short")[:-4], {"Content_Encoding": "gzip"}, 400),
        (b"", {"Content_Encoding": "zstd"}, 415),
        (b"x" * 20_001, {}, 413),
        (gzip.compress(b"\0" * 50_001), {"Content_Encoding": "gzip"}, 413),
        (gzip.compress(b"\0" * 10_000_000), {"Content_Encoding": "gzip"}, 413),
        (iter([b"x" * 15_000, b"x" * 15_000]), {}, 413),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_proper_status(
    receiver, sink, post, content, headers, status
):
    """And the receiver goes on."""
    answer = post(receiver, content, **headers)

    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert post(receiver, body()).status_code == 200


def test_other_paths_and_methods_are_refused(receiver, post):
    """A person who opens the address in a browser is told what it is."""
    assert post(receiver, b"", path="/v1/profiles").status_code == 404

    with socket.create_connection(receiver._server.server_address, timeout=WITHIN_S) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert raw.makefile("rb").readline() == b"HTTP/1.1 405 Method Not Allowed\r\n"


def test_a_post_without_a_length_is_refused(receiver):
    """Nothing says where the body ends."""
    with socket.create_connection(receiver._server.server_address, timeout=WITHIN_S) as raw:
        raw.sendall(
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n\r\n"
        )
        assert raw.makefile("rb").readline() == b"HTTP/1.1 411 Length Required\r\n"


def test_a_full_disk_asks_the_sender_to_come_back(receiver, sink, post):
    """And when there is room again, it goes on."""
    sink.error = OSError(28, "No space left on device")

    answer = post(receiver, body())
    sink.error = None

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert b"No space left" in answer.content
    assert post(receiver, body()).status_code == 200


def test_too_much_waiting_for_the_disk_asks_senders_to_come_back(sink, post):
    """Memory stays bounded when the disk hangs."""
    with (
        Receiver(sink, gather_s=0, max_pending_bytes=1) as receiver,
        ThreadPoolExecutor() as senders,
    ):
        sink.open.clear()
        writing = senders.submit(post, receiver, body())
        assert sink.entered.wait(WITHIN_S)
        # One is being written; of the next two one waits for it, and there is room for one only.
        others = [senders.submit(post, receiver, body()) for _ in range(2)]
        done = next(future for future in _as_done(others))
        sink.open.set()

        assert done.result().status_code == 503
        assert done.result().headers["retry-after"] == "1"
        statuses = sorted(future.result().status_code for future in [writing, *others])
        assert statuses == [200, 200, 503]


def _as_done(futures):
    from concurrent.futures import as_completed

    return as_completed(futures, timeout=WITHIN_S)


def test_many_senders_at_once_lose_nothing_and_share_writes(sink, post):
    """While one group is written the next gathers."""
    with Receiver(sink, gather_s=0) as receiver, ThreadPoolExecutor(16) as senders:
        answers = list(senders.map(lambda rank: post(receiver, body(rank, 1)), range(64)))

    assert {answer.status_code for answer in answers} == {200}
    assert sorted(s.rank for s in sink.spans if s.name == "rank.step") == list(range(64))


def test_one_request_that_cannot_be_stored_does_not_take_others_with_it(sink, post):
    """A bug of ours in one batch; the batch beside it in the same group is stored."""
    poison = digest_request([example_digest(0, 0)], resource_of(0, world_size=4))
    poison.resource_spans[0].scope_spans[0].spans[0].name = "poison"
    with Receiver(sink, gather_s=0) as receiver, ThreadPoolExecutor() as senders:
        sink.open.clear()
        first = senders.submit(post, receiver, body(0, 1))
        assert sink.entered.wait(WITHIN_S)
        bad = senders.submit(post, receiver, poison.SerializeToString())
        good = senders.submit(post, receiver, body(1, 1))
        sink.open.set()

        assert first.result().status_code == 200
        assert bad.result().status_code == 500
        assert good.result().status_code == 200


def test_stopping_stores_what_has_arrived_and_ends_kept_alive_connections(sink, post):
    """A sender's idle connection must not hold the end up."""
    receiver = Receiver(sink, gather_s=0).start()
    post(receiver, body())  # leaves its connection open

    receiver.stop()

    assert sink.closed
    assert len(sink.spans) == 4


def test_stopping_does_not_wait_for_a_sender_that_stalls_in_the_middle(sink):
    """It is told to try again: 400 would make it throw the batch away."""
    receiver = Receiver(sink, gather_s=0).start()
    with socket.create_connection(receiver._server.server_address, timeout=WITHIN_S) as raw:
        raw.sendall(
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
            b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n"
        )
        answer = raw.makefile("rb")
        assert b"100 Continue" in answer.readline()  # now it waits for the body

        receiver.stop()

        assert answer.readline() == b"\r\n"
        assert answer.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"


def test_more_connections_than_it_serves_are_turned_away_at_once(receiver, post):
    """With the same word as when the disk is busy, so that senders come back."""
    receiver._server.slots = threading.BoundedSemaphore(1)
    with socket.create_connection(receiver._server.server_address, timeout=WITHIN_S):
        answer = post(receiver, body())

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


def test_the_stock_exporter_of_the_sdk_is_understood(receiver, sink):
    """What a user's own tracer sends."""
    exporter = OTLPSpanExporter(
        endpoint=f"{receiver.endpoint}/v1/traces", compression=Compression.Gzip
    )
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with (
        pytest.raises(KeyError),
        provider.get_tracer("my.app").start_as_current_span(
            "tokenize", attributes={"size": 3, "kinds": ["a", "b"]}
        ),
    ):
        raise KeyError("vocabulary")
    provider.shutdown()

    (span,) = sink.spans
    assert (span.scope, span.name, span.status) == ("my.app", "tokenize", "error")
    assert span.attributes == {"size": 3, "kinds": ["a", "b"]}
    assert [event["name"] for event in span.events] == ["exception"]


def test_a_port_in_use_is_an_error_that_says_what_to_do(receiver, sink):
    """Another `argus serve`, or a Collector, on 4318."""
    port = receiver._server.server_address[1]

    with pytest.raises(ConfigError, match="--port"):
        Receiver(sink, port=port)


def test_only_this_machine_reaches_it_unless_told_otherwise(receiver):
    """There is no authentication."""
    assert receiver.endpoint.startswith("http://127.0.0.1:")


def test_what_is_answered_can_be_read_at_once(tmp_path, post):
    """From the folder, while the receiver is running."""
    with Receiver(ParquetWriter(tmp_path), gather_s=0) as receiver:
        for rank in range(4):
            assert post(receiver, body(rank, 5)).status_code == 200
            store = ParquetStore(tmp_path)

            tables = store.read(store.resolve("latest"))

            assert tables.steps.num_rows == 5 * (rank + 1)
