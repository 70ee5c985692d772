"""A real OTLP/HTTP endpoint on a free local port, with faults that a test can order.

It speaks HTTP/1.1 with keep-alive over a real socket, because most of what can go wrong with a
sender (dead connections, time-outs, TLS) does not happen to a mock.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from argus_otel.testing.received import (
    ReceivedMetric,
    ReceivedSpan,
    read_metrics_request,
    read_trace_request,
)

if sys.version_info >= (3, 12):
    from typing import override
else:
    from typing_extensions import override

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

_TRACES: Final = "/v1/traces"
_METRICS: Final = "/v1/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """One HTTP request, whatever the answer was."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    wire_bytes: int
    """Size of the body as it came, compressed or not."""
    body: bytes
    """Uncompressed."""
    status: int
    """What was answered; 0 where no answer was given."""
    client_port: int
    """Equal for two requests that came over one connection."""
    records: int
    """Spans or metrics taken in; 0 unless the answer was a success."""


@dataclass(slots=True, kw_only=True)
class _Fault:
    times: float  # answers left; infinity for "until recover()"
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    act: str = "respond"  # respond, hang, close, dribble


class InMemoryReceiver:
    """OTLP/HTTP server on 127.0.0.1 that keeps what it gets; use it as a context manager.

    Args:
        port: Port to listen on; 0 takes a free one. ``stop`` and ``start`` keep the port.
        tls: Server context for https; None for plain http.
        max_body_bytes: Uncompressed size above which a body is refused with 413, as a Collector
            does above ``max_request_body_size``. None takes everything.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        max_body_bytes: int | None = None,
    ) -> None:
        self._port = port
        self._tls = tls
        self._max_body_bytes = max_body_bytes
        self._changed = threading.Condition()
        self._requests: list[ReceivedRequest] = []
        self._spans: list[ReceivedSpan] = []
        self._metrics: list[ReceivedMetric] = []
        self._faults: list[_Fault] = []
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._released = threading.Event()
        self.start()

    # --- Life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Listen (again, on the same port as before)."""
        if self._server is not None:
            return
        self._released.clear()
        self._server = _Server(("127.0.0.1", self._port), self._handle, self._tls)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="otlp-receiver", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and cut every open connection; what was received stays readable."""
        if self._server is None or self._thread is None:
            return
        self._released.set()
        self._server.shutdown()
        self._server.cut_connections()
        self._server.server_close()
        self._thread.join(timeout=5)
        self._server = self._thread = None

    def __enter__(self) -> Self:
        """Listen."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self.stop()

    @property
    def endpoint(self) -> str:
        """Base address, for ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point a child process here."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "NO_PROXY": "127.0.0.1",
        }

    # --- What arrived -----------------------------------------------------------------------

    @property
    def requests(self) -> list[ReceivedRequest]:
        """Every request so far, refused ones too, in order of arrival."""
        with self._changed:
            return list(self._requests)

    def spans(self, *, name: str | None = None, scope: str | None = None) -> list[ReceivedSpan]:
        """Accepted spans in order of arrival, of one name or scope if given."""
        with self._changed:
            return [
                span
                for span in self._spans
                if name in {None, span.name} and scope in {None, span.scope}
            ]

    def metrics(self, *, name: str | None = None) -> list[ReceivedMetric]:
        """Accepted metrics in order of arrival, of one name if given."""
        with self._changed:
            return [metric for metric in self._metrics if name in {None, metric.name}]

    def clear(self) -> None:
        """Forget what arrived."""
        with self._changed:
            self._requests.clear()
            self._spans.clear()
            self._metrics.clear()

    def wait_for(
        self, predicate: Callable[[InMemoryReceiver], object], timeout_s: float = 10.0
    ) -> None:
        """Return as soon as ``predicate(receiver)`` holds; it is asked after each request.

        Raises:
            TimeoutError: It did not hold in time; the message says what had arrived.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not predicate(self):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    msg = f"not so after {timeout_s} s; {self._summary()}"
                    raise TimeoutError(msg)
                self._changed.wait(left_s)

    def _summary(self) -> str:
        counts: dict[str, int] = {}
        for span in self._spans:
            counts[span.name] = counts.get(span.name, 0) + 1
        statuses = [request.status for request in self._requests]
        return (
            f"{len(statuses)} requests (last answers {statuses[-5:]}), spans {counts}, "
            f"{len(self._metrics)} metrics"
        )

    # --- Faults -------------------------------------------------------------------------------

    def respond(
        self,
        status: int,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        times: float = 1,
    ) -> None:
        """Answer the next ``times`` requests like this; a 2xx still takes the records in."""
        self._order(_Fault(times=times, status=status, headers=headers or {}, body=body))

    def hang(self, *, times: float = 1) -> None:
        """Read the next requests and never answer, until ``recover`` or ``stop``."""
        self._order(_Fault(times=times, act="hang"))

    def dribble(self, *, times: float = 1) -> None:
        """Answer the next requests one header byte at a time without end."""
        self._order(_Fault(times=times, act="dribble"))

    def close_connection(self, *, times: float = 1) -> None:
        """Read the next requests, then cut the connection without an answer."""
        self._order(_Fault(times=times, act="close"))

    def recover(self) -> None:
        """Forget all ordered faults and let hanging requests go (unanswered)."""
        with self._changed:
            self._faults.clear()
        self._released.set()
        self._released = threading.Event()

    def _order(self, fault: _Fault) -> None:
        with self._changed:
            self._faults.append(fault)

    def _next_fault(self) -> _Fault | None:
        with self._changed:
            if not self._faults:
                return None
            fault = self._faults[0]
            fault.times -= 1
            if fault.times <= 0:
                self._faults.pop(0)
            return fault

    # --- One request (on the server's threads) -------------------------------------------------

    def _handle(self, handler: _Handler) -> None:
        released = self._released
        wire = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        body = _decompress(wire, handler.headers.get("content-encoding", "identity"))
        fault = self._next_fault() or _Fault(times=0, status=self._usual_status(handler, body))
        spans: list[ReceivedSpan] = []
        metrics: list[ReceivedMetric] = []
        if 200 <= fault.status < 300:
            if handler.path.endswith(_TRACES):
                spans = read_trace_request(body)
            elif handler.path.endswith(_METRICS):
                metrics = read_metrics_request(body)
        request = ReceivedRequest(
            path=handler.path,
            headers={key.lower(): value for key, value in handler.headers.items()},
            wire_bytes=len(wire),
            body=body,
            status=fault.status,
            client_port=handler.client_address[1],
            records=len(spans) + len(metrics),
        )
        with self._changed:
            self._requests.append(request)
            self._spans += spans
            self._metrics += metrics
            self._changed.notify_all()
        if fault.act == "respond":
            handler.answer(fault.status, fault.headers, fault.body)
        elif fault.act == "hang":
            released.wait()
            handler.close_connection = True
        elif fault.act == "dribble":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Dribble: ")
            while not released.wait(0.02):
                handler.wfile.write(b"a")
            handler.close_connection = True
        else:
            handler.close_connection = True

    def _usual_status(self, handler: _Handler, body: bytes) -> int:
        if not handler.path.endswith((_TRACES, _METRICS)):
            return 404
        if self._max_body_bytes is not None and len(body) > self._max_body_bytes:
            return 413
        return 200


def _decompress(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    if encoding == "deflate":
        return zlib.decompress(body)
    return body


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handle: Callable[[_Handler], None],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.handle = handle
        self._tls = tls
        self._connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    @override
    def finish_request(self, request: Any, client_address: Any) -> None:
        """Wrap in TLS here, on the connection's thread: a bad handshake must not stop others."""
        if self._tls is not None:
            request.settimeout(10)
            request = self._tls.wrap_socket(request, server_side=True)
            request.settimeout(None)
        self._connections.add(request)
        try:
            super().finish_request(request, client_address)
        finally:
            self._connections.discard(request)
            with contextlib.suppress(OSError):
                request.close()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or refused the certificate, is what many tests are about."""

    def cut_connections(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.server.handle(self)

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response_only(status)
        usual = {
            "date": self.date_time_string(),
            "content-type": "application/x-protobuf",
            "content-length": str(len(body)),
        }
        for name, value in (usual | {key.lower(): said for key, said in headers.items()}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Tests read ``requests`` instead of a log."""
