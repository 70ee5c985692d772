"""One connection against a server that answers byte for byte as the test says."""

from __future__ import annotations

import contextlib
import gc
import http.client
import select
import socket
import threading
import time

import pytest

from argus_otel.export.connection import TargetConnection, UnreachableError
from argus_otel.export.targets import Target
from argus_otel.testing import InMemoryReceiver

TIMEOUT_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class ScriptedServer:
    """Answers request after request with the given bytes; None for hanging up unasked."""

    def __init__(self, family=socket.AF_INET, host="127.0.0.1"):
        self.answers: list[bytes | None] = []
        self.connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self.connections += 1
                with connected, connected.makefile("rb") as file, contextlib.suppress(OSError):
                    self._converse(connected, file)

    def _converse(self, connected, file):
        while True:
            head = b""
            while (line := file.readline()) not in {b"\r\n", b""}:
                head += line
            if not line:
                return
            self.heads.append(head)
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            answer = self.answers.pop(0)
            if answer and answer.startswith(b"HTTP/1.1 413"):  # said before the body is read
                connected.sendall(answer)
                return
            self.bodies.append(file.read(int(length or 0)))
            for piece in answer.split(b"|"):
                connected.sendall(piece)
                if b"|" in answer:
                    time.sleep(0.02)
            if self.answers[:1] == [None]:
                self.answers.pop(0)
                return

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(TIMEOUT_S)


@pytest.fixture
def server():
    running = ScriptedServer()
    yield running
    running.close()


@pytest.fixture
def connection(server):
    made = TargetConnection(Target(url=f"http://127.0.0.1:{server.port}/v1/traces"), {})
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "status", "body", "stays_open"),
    [
        (OK, 200, b"ok", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
        (b"HTTP/1.1 200 OK\r\nDate: today|\r\nContent-Length: 2\r\n|\r\no|k", 200, b"ok", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", 200, b"ok", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok", True),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
            200,
            b"ok",
            True,
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            200,
            b"ok",
            True,
        ),
        (b"HTTP/1.1 200 OK\r\nX-Of: content-length: 9\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True),
    ],
    ids=["usual", "empty", "in pieces", "close", "204", "100", "chunked", "both", "name in value"],
)  # fmt: skip
def test_every_form_of_an_answer_is_read(server, connection, answer, status, body, stays_open):
    """And the connection is used again exactly where HTTP allows it."""
    server.answers = [answer, OK] if stays_open else [answer, None, OK]

    first, second = connection.post(b"one", TIMEOUT_S), connection.post(b"two", TIMEOUT_S)

    assert (first.status, first.body) == (status, body)
    assert second.body == b"ok"
    assert server.bodies == [b"one", b"two"]
    assert server.connections == (1 if stays_open else 2)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.0 200 OK\r\n\r\nok", b"HTTP/1.1 200 OK\r\nServer: old\r\n\r\nok"]
)
def test_an_answer_without_a_length_ends_with_the_connection(server, connection, answer):
    server.answers = [answer, None, OK]

    assert connection.post(b"one", TIMEOUT_S).body == b"ok"
    assert connection.post(b"two", TIMEOUT_S).body == b"ok"


def test_bytes_after_an_answer_are_not_the_next_answer(server, connection):
    server.answers = [OK + b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", OK]

    assert connection.post(b"one", TIMEOUT_S).status == 200
    assert connection.post(b"two", TIMEOUT_S).status == 200


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n", b"\0\0\x12\4\0\0\0\0\0", b"HTTP/1.1 2OO\r\n\r\n"]
)
def test_what_is_no_http_is_a_lost_connection(server, connection, answer):
    """The second is how a gRPC port answers."""
    server.answers = [answer, None, OK]

    with pytest.raises(UnreachableError) as caught:
        connection.post(b"one", TIMEOUT_S)

    assert caught.value.cause == "connection_lost"
    assert connection.post(b"two", TIMEOUT_S).status == 200


def test_a_header_without_end_is_not_read_to_its_end(server, connection):
    server.answers = [b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1_000_000]

    with pytest.raises(UnreachableError, match="LineTooLong"):
        connection.post(b"one", TIMEOUT_S)


def test_headers_of_an_error_are_found_in_any_case(server, connection):
    server.answers = [b"HTTP/1.1 503 Busy\r\nRETRY-AFTER: 7\r\nContent-Length: 0\r\n\r\n"]

    assert connection.post(b"one", TIMEOUT_S).headers["retry-after"] == "7"


# --- A kept connection that is no more ------------------------------------------------------------


def test_a_connection_closed_since_the_last_post_is_replaced_unseen(server, connection):
    server.answers = [OK, None, OK]
    connection.post(b"one", TIMEOUT_S)
    assert connection._readable.poll(TIMEOUT_S * 1000)  # the end has arrived

    assert connection.post(b"two", TIMEOUT_S).status == 200

    assert server.bodies == [b"one", b"two"]


def test_a_request_that_went_out_in_part_goes_out_again(server, connection):
    """The endpoint closed in the very moment: it cannot have accepted a part of a request."""
    server.answers = [OK, None, OK]
    connection.post(b"one", TIMEOUT_S)
    assert connection._readable.poll(TIMEOUT_S * 1000)
    connection._readable = select.poll()  # as if it had not arrived yet
    large = b"x" * 20_000_000

    assert connection.post(large, TIMEOUT_S).status == 200

    assert [len(body) for body in server.bodies] == [3, len(large)]


def test_a_request_that_was_sent_whole_is_not_sent_again_unasked(server, connection):
    """It may have been accepted: whether it goes out twice is for the sender to decide."""
    server.answers = [OK, b"", None, OK]
    connection.post(b"one", TIMEOUT_S)

    with pytest.raises(UnreachableError) as caught:
        connection.post(b"two", TIMEOUT_S)

    assert caught.value.cause == "connection_lost"
    assert server.bodies == [b"one", b"two"]


def test_an_answer_given_before_the_body_was_read_counts(server, connection):
    """An endpoint may refuse a body by its length alone, and hang up."""
    server.answers = [b"HTTP/1.1 413 Too large\r\nContent-Length: 0\r\n\r\n", OK]

    assert connection.post(b"x" * 20_000_000, TIMEOUT_S).status == 413
    assert connection.post(b"two", TIMEOUT_S).status == 200


# --- The request ----------------------------------------------------------------------------------


def test_the_request_says_whom_it_is_for_and_how_long_it_is(server, connection):
    server.answers = [OK]

    connection.post(b"four", TIMEOUT_S)

    assert server.heads[0].split(b"\r\n") == [
        b"POST /v1/traces HTTP/1.1",
        b"host: 127.0.0.1:%d" % server.port,
        b"accept-encoding: identity",
        b"content-length: 4",
        b"",
    ]


def test_a_users_header_takes_the_place_of_ours_but_for_the_length(server):
    headers = {"Host": "tenant-a", "Content-Length": "9", "Transfer-Encoding": "chunked"}
    url = f"http://127.0.0.1:{server.port}/a b?token=1%202"
    connection = TargetConnection(Target(url=url), headers)
    server.answers = [OK]

    connection.post(b"four", TIMEOUT_S)
    connection.close()

    assert server.heads[0].split(b"\r\n") == [
        b"POST /a%20b?token=1%202 HTTP/1.1",
        b"host: tenant-a",
        b"accept-encoding: identity",
        b"content-length: 4",
        b"",
    ]


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb", "a\rb", "a\0b"])
def test_a_header_with_a_line_break_is_refused(value):
    with pytest.raises(ValueError, match="line break"):
        TargetConnection(Target(url="http://127.0.0.1:1/"), {"api-key": value})


def test_an_ipv6_address_is_reached():
    try:
        server = ScriptedServer(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("no IPv6 here")
    connection = TargetConnection(Target(url=f"http://[::1]:{server.port}/v1/traces"), {})
    server.answers = [OK]

    assert connection.post(b"one", TIMEOUT_S).status == 200

    assert b"host: [::1]:%d\r\n" % server.port in server.heads[0]
    connection.close()
    server.close()


def test_a_proxy_is_told_the_whole_address_and_its_own_password():
    with InMemoryReceiver() as proxy:
        place = proxy.endpoint.removeprefix("http://")
        target = Target(
            url="http://collector.invalid/v1/traces", proxy_url=f"http://ann:p%40ss@{place}"
        )
        connection = TargetConnection(target, {})

        connection.post(b"", TIMEOUT_S)
        connection.close()

        (request,) = proxy.requests
        assert request.path == "http://collector.invalid/v1/traces"
        assert request.headers["host"] == "collector.invalid"
        assert request.headers["proxy-authorization"] == "Basic YW5uOnBAc3M="


def test_a_proxy_that_opens_no_tunnel_is_no_exception_of_the_jobs(server):
    server.answers = [b"HTTP/1.1 407 Who?\r\n\r\n"]
    target = Target(
        url="https://collector.invalid/v1/traces", proxy_url=f"http://127.0.0.1:{server.port}"
    )
    connection = TargetConnection(target, {})

    with pytest.raises(UnreachableError, match="407"):
        connection.post(b"one", TIMEOUT_S)

    assert server.heads[0].startswith(b"CONNECT collector.invalid:443 HTTP/1.1\r\n")


def test_no_instrumentation_of_an_http_library_sees_a_post(server, connection, monkeypatch):
    """It would make a span of each post, and then a post for each of those spans."""

    def seen(*args, **kwargs):
        pytest.fail("an instrumented function was called")

    for name in ("connect", "request", "putrequest", "endheaders", "getresponse"):
        monkeypatch.setattr(http.client.HTTPConnection, name, seen)
    server.answers = [OK]

    assert connection.post(b"one", TIMEOUT_S).status == 200


def test_nothing_is_left_open(server, connection, recwarn):
    """Each way out of a connection closes its descriptor."""
    server.answers = [OK, None, b"nonsense", None, OK]
    connection.post(b"one", TIMEOUT_S)
    assert connection._readable.poll(TIMEOUT_S * 1000)
    with pytest.raises(UnreachableError):
        connection.post(b"two", TIMEOUT_S)
    connection.post(b"three", TIMEOUT_S)
    connection.close()
    gc.collect()

    assert [str(w.message) for w in recwarn if w.category is ResourceWarning] == []
