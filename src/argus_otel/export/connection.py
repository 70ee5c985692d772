"""One kept-alive connection to a target, on which no request outlives its deadline.

A time-out of a socket holds for one operation: an endpoint that sends a byte now and then can
hold a thread for hours. Here one deadline spans connecting, the TLS handshake, sending, and every
read of the answer. Only the resolver (``getaddrinfo``) keeps to its own time-outs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import socket
import ssl
import sys
import time
from dataclasses import dataclass
from http.client import HTTPException
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, Final

import urllib3
from opentelemetry.instrumentation.utils import suppress_instrumentation
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    HTTPError,
    NameResolutionError,
    NewConnectionError,
)
from urllib3.exceptions import (
    TimeoutError as UrllibTimeoutError,
)

if sys.version_info >= (3, 12):
    from typing import override
else:
    from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping

    from argus_otel.export.targets import Target

MAX_ANSWER_BYTES: Final = 64 * 1024
"""An answer is a few bytes of protobuf; more is read by nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the endpoint said."""

    status: int
    headers: Mapping[str, str]
    """Names are looked up without regard to case."""
    body: bytes
    """The first ``MAX_ANSWER_BYTES``."""


class UnreachableError(Exception):
    """No answer: refused, reset, timed out, not trusted. ``cause`` is one of four short words."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause = cause
        super().__init__(detail)


class TargetConnection:
    """Posts to one target, over one connection that is kept alive between posts.

    Args:
        target: Where to; its files were checked when it was made.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._deadline = _Deadline()
        self._sockets: list[socket.socket] = []
        options: dict[str, Any] = {"num_pools": 1, "maxsize": 1, "retries": False}
        self._manager: urllib3.PoolManager
        if target.proxy_url is None:
            self._manager = urllib3.PoolManager(ssl_context=target.ssl_context(), **options)
        else:
            proxy = urllib3.util.parse_url(target.proxy_url)
            headers = urllib3.util.make_headers(proxy_basic_auth=proxy.auth) if proxy.auth else None
            self._manager = urllib3.ProxyManager(
                target.proxy_url,
                proxy_headers=headers,
                ssl_context=target.ssl_context(),
                **options,
            )
        url = urllib3.util.parse_url(target.url)
        self._pool = self._manager.connection_from_host(url.host, url.port, url.scheme)
        self._abandoned: list[object] = []
        kind = _TlsConnection if self._pool.scheme == "https" else _PlainConnection
        self._pool.ConnectionCls = functools.partial(  # type: ignore[assignment]
            kind, deadline=self._deadline, sockets=self._sockets
        )

    def post(self, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Answer:
        """Send one request and read its answer.

        Redirects are answers like any other: nothing is sent to a host that was not configured.

        Args:
            body: As it goes over the wire.
            headers: All of them, authentication included.
            timeout_s: Bound on the whole exchange.

        Raises:
            UnreachableError: There is no answer, for whatever reason.
        """
        self._deadline.start(timeout_s)
        try:
            # Whoever instruments urllib3 would otherwise get a span for each of our posts, and
            # then a post for each of those spans.
            with suppress_instrumentation():
                response = self._manager.urlopen(
                    "POST",
                    self._target.url,
                    body=body,
                    headers=headers,
                    redirect=False,
                    retries=False,
                    preload_content=False,
                    timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
                )
                return _read_answer(response)
        except (HTTPError, HTTPException, OSError, ValueError) as error:
            raise UnreachableError(_cause(error), _detail(error)) from error

    def close(self) -> None:
        """Close the connection; the next post opens a new one."""
        self._manager.clear()

    def abandon(self) -> None:
        """In a forked child: let go of its copy of the descriptor, and take no lock for it.

        Another thread of the parent may have held any lock in the moment of the fork, and nobody
        is here to release it. Whoever calls this keeps the object for good, so that no finaliser
        takes one either.
        """
        for connected in self._sockets:
            with contextlib.suppress(OSError):
                os.close(connected.detach())
        waiting = self._pool.pool
        if waiting is not None:
            # At the interpreter's end urllib3 empties the pool, under this queue's lock.
            self._abandoned = list(waiting.queue)
            LifoQueue.__init__(waiting, waiting.maxsize)


def _read_answer(response: urllib3.BaseHTTPResponse) -> Answer:
    try:
        data = response.read(MAX_ANSWER_BYTES + 1, decode_content=False)
    except (HTTPError, HTTPException, OSError):
        # The status is known, and what was accepted must not be sent again.
        response.close()
        return Answer(status=response.status, headers=response.headers, body=b"")
    if len(data) > MAX_ANSWER_BYTES:
        response.close()  # with the rest unread, the connection cannot be used again
    else:
        response.release_conn()
    return Answer(status=response.status, headers=response.headers, body=data[:MAX_ANSWER_BYTES])


def _cause(error: BaseException) -> str:
    """Which kind of trouble, looking through the wrappers of urllib3."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLError | ssl.CertificateError):
            return "tls"
        if isinstance(seen, NewConnectionError):
            return "unreachable"
        if isinstance(seen, TimeoutError | UrllibTimeoutError):
            return "timed_out"
        seen = seen.__cause__ or seen.__context__ or _wrapped(seen)
    return "connection_lost"


def _wrapped(error: BaseException) -> BaseException | None:
    inner = error.args[-1] if error.args else None
    return inner if isinstance(inner, BaseException) else None


def _detail(error: BaseException) -> str:
    """The message without the repr of a connection object, whose address changes each time."""
    return f"{type(error).__name__}: {str(error).rpartition('>: ')[2]}"[:300]


class _Deadline:
    """The end of the request under way, shared with the connection that carries it."""

    def __init__(self) -> None:
        self._end_s = 0.0

    def start(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, always more than 0, which a socket would take for "do not block"."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            msg = "deadline of the request has passed"
            raise TimeoutError(msg)
        return left_s


class _DeadlineSocket:
    """A connected socket whose sends and reads end with the request's deadline."""

    def __init__(self, connected: socket.socket, deadline: _Deadline) -> None:
        self._connected = connected
        self._deadline = deadline

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._connected, name)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._connected.settimeout(self._deadline.left_s())
            view = view[self._connected.send(view) :]

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        raw = self._connected.makefile("rb", buffering=0)
        return io.BufferedReader(_DeadlineReader(raw, self._connected, self._deadline))


class _DeadlineReader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, connected: socket.socket, deadline: _Deadline) -> None:
        self._raw = raw
        self._connected = connected
        self._deadline = deadline

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int | None:
        self._connected.settimeout(self._deadline.left_s())
        count: int | None = self._raw.readinto(buffer)
        return count

    @override
    def close(self) -> None:
        self._raw.close()
        super().close()


def _connect(connection: HTTPConnection, deadline: _Deadline) -> socket.socket:
    """A socket to the first address that answers, each given its share of the time left."""
    try:
        addresses = socket.getaddrinfo(connection.host, connection.port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = socket.gaierror(*error.args)
        raise NameResolutionError(connection.host, connection, reason) from error
    failure: OSError = OSError("no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        connected = socket.socket(family, kind, protocol)
        try:
            for option in connection.socket_options or ():
                connected.setsockopt(*option)
            connected.settimeout(deadline.left_s() / (len(addresses) - index))
            connected.connect(address)
            # The TLS handshake comes next, under this one time-out.
            connected.settimeout(deadline.left_s())
        except OSError as error:
            connected.close()
            failure = error
        else:
            return connected
    if isinstance(failure, TimeoutError):
        raise failure
    raise NewConnectionError(connection, str(failure)) from failure


class _PlainConnection(HTTPConnection):
    @override
    def __init__(
        self, *args: Any, deadline: _Deadline, sockets: list[socket.socket], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._deadline = deadline
        self._sockets = sockets

    @override
    def _new_conn(self) -> socket.socket:
        connected = _connect(self, self._deadline)
        self._sockets[:] = [connected]
        return connected

    @override
    def connect(self) -> None:
        super().connect()
        if isinstance(self.sock, socket.socket):  # over TLS another object has the descriptor now
            self._sockets[:] = [self.sock]
        connected: Any = _DeadlineSocket(self.sock, self._deadline)
        self.sock = connected


class _TlsConnection(_PlainConnection, HTTPSConnection):
    """The same over TLS: ``super().connect()`` above is then HTTPSConnection's."""
