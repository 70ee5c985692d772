"""The HTTP side of the receiver: connections, statuses, and an end that loses nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Final, Protocol

from argus_otel.store.bodies import BodyError, decompress, read_body
from argus_otel.store.commit import OverloadedError
from argus_otel.wire.varints import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from typing_extensions import override
else:

    def override(method: Callable) -> Callable:
        """``typing.override`` of Python 3.12; goes when 3.11 does."""
        return method


_log = logging.getLogger(__name__)

_PROTOBUF: Final = "application/x-protobuf"
_SOCKET_TIMEOUT_S: Final = 75.0
"""Longer than senders pause, or they would post into a connection that is just being closed."""
_RETRY_AFTER_S: Final = 1
_MAX_CONNECTIONS: Final = 512
_BACKLOG: Final = 128

# google.rpc.Code for the HTTP statuses used here.
_RPC_CODES: Final = {400: 3, 404: 5, 405: 12, 411: 3, 413: 8, 415: 3, 500: 13, 503: 14}

_TOO_MANY: Final = (
    f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {_RETRY_AFTER_S}\r\n"
    "Content-Length: 0\r\nConnection: close\r\n\r\n"
).encode()


class Acceptor(Protocol):
    """Who takes the requests that this module reads off connections."""

    max_body_bytes: int
    max_decoded_bytes: int

    @property
    def paths(self) -> Collection[str]:
        """The paths that take requests."""
        ...

    def accept(self, path: str, body: bytes) -> None:
        """Take one request; see ``Receiver.accept``."""
        ...


class HttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread a connection, up to a limit."""

    allow_reuse_address = True
    daemon_threads = False  # server_close waits for requests in hand
    request_queue_size = _BACKLOG

    def __init__(self, host: str, port: int, receiver: Acceptor) -> None:
        self.receiver = receiver
        self.stopping = False
        self.slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._connections: dict[socket.socket, bool] = {}
        self._connections_lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def set_idle(self, connection: socket.socket, idle: bool) -> None:
        """Note whether a kept-alive connection waits for its next request."""
        with self._connections_lock:
            self._connections[connection] = idle
            if idle and self.stopping:
                _end_reading(connection)

    def end_idle_connections(self) -> None:
        """Stop waiting for the next request of kept-alive connections."""
        with self._connections_lock:
            self.stopping = True
            for connection, idle in self._connections.items():
                if idle:
                    _end_reading(connection)

    def end_reading(self) -> None:
        """Stop waiting for the rest of requests as well: nothing more will be stored."""
        with self._connections_lock:
            for connection in self._connections:
                _end_reading(connection)

    @override
    def shutdown_request(self, request: object) -> None:
        """Close a connection."""
        with self._connections_lock:
            self._connections.pop(request, None)  # type: ignore[call-overload]
        super().shutdown_request(request)  # type: ignore[arg-type]

    @override
    def process_request(self, request: object, client_address: object) -> None:
        """Take a connection, or say at once that there are too many."""
        if not self.slots.acquire(blocking=False):
            assert isinstance(request, socket.socket)  # noqa: S101 - TCPServer makes nothing else
            with contextlib.suppress(OSError):
                request.sendall(_TOO_MANY)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    @override
    def process_request_thread(self, request: object, client_address: object) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self.slots.release()

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        """Note a connection that broke; senders come and go."""
        _log.debug("connection %s from %s broke", request, client_address, exc_info=True)


def _end_reading(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: HttpServer
    protocol_version = "HTTP/1.1"
    server_version = "argus-otel"
    sys_version = ""
    timeout = _SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True

    @override
    def handle_one_request(self) -> None:
        self.server.set_idle(self.connection, True)
        try:
            super().handle_one_request()
        finally:
            self.server.set_idle(self.connection, False)

    @override
    def parse_request(self) -> bool:
        self.server.set_idle(self.connection, False)  # a request has begun; let it finish
        return super().parse_request()

    def do_POST(self) -> None:
        """Receive one export."""
        receiver = self.server.receiver
        path = self.path.partition("?")[0]
        try:
            if path not in receiver.paths:
                raise BodyError(404, f"no such path; there are {', '.join(receiver.paths)}")
            kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind != _PROTOBUF:
                raise BodyError(
                    415,
                    f"Content-Type {kind[:60]!r} is not supported; {_PROTOBUF} is "
                    "(OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf)",
                )
            raw = read_body(
                self.rfile,  # type: ignore[arg-type]
                self.headers.get("Content-Length"),
                self.headers.get("Transfer-Encoding", ""),
                receiver.max_body_bytes,
            )
        except BodyError as error:
            self.close_connection = True  # the rest of the body is still on its way
            # Cut short by our own end is no fault of the sender's: it shall try again.
            self._refuse(503 if self.server.stopping else error.status, str(error))
            return
        try:
            encoding = self.headers.get("Content-Encoding", "")
            receiver.accept(path, decompress(raw, encoding, receiver.max_decoded_bytes))
        except BodyError as error:
            self._refuse(error.status, str(error))
        except OverloadedError:
            self._refuse(503, "too much is waiting for the disk")
        except OSError as error:
            _log.exception("the store cannot be written")
            self._refuse(503, f"the store cannot be written: {error.strerror}")
        except Exception:  # noqa: BLE001 - the sender gets an answer, whatever happened
            _log.exception("a request could not be stored")
            self._refuse(500, "a bug in argus: this request could not be stored")
        else:
            self._answer(200, b"")  # an empty message of any of the three response types

    def do_GET(self) -> None:
        """Tell a browser that there is nothing to see."""
        self._refuse(405, "this is an OTLP receiver; it takes POST")

    @override
    def log_message(self, format: str, *args: object) -> None:
        _log.debug(format, *args)

    def _refuse(self, status: int, message: str) -> None:
        text = message.encode()
        code = _RPC_CODES.get(status, 2)
        # google.rpc.Status: field 1 the code, field 2 the message.
        self._answer(status, b"\x08" + pack([code]) + b"\x12" + pack([len(text)]) + text)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", _PROTOBUF)
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", str(_RETRY_AFTER_S))
        if self.close_connection or self.server.stopping:
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
