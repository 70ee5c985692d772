"""From an address to a stream that carries requests: TCP, a proxy's tunnel, TLS.

Everything here ends with the request's deadline, except the resolver (``getaddrinfo``), which
keeps to its own time-outs.
"""

from __future__ import annotations

import socket
import ssl
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

from argus_otel.export.answers import read_tunnel_answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from argus_otel.export.answers import Stream

_Result = TypeVar("_Result")


class UnreachableError(Exception):
    """No answer: refused, reset, timed out, not trusted. ``cause`` is one of four short words."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause = cause
        super().__init__(detail)


class Deadline:
    """The end of the request under way, shared with the stream that carries it."""

    def __init__(self) -> None:
        self._end_s = 0.0

    def start(self, timeout_s: float) -> None:
        """Begin a request that may take so long."""
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, always more than 0, which a socket would take for "do not block"."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            msg = "deadline of the request has passed"
            raise TimeoutError(msg)
        return left_s


class Place(NamedTuple):
    """One end of a connection."""

    host: str
    """As the resolver takes it: no brackets, ASCII."""
    port: int
    is_tls: bool

    @classmethod
    def of(cls, url: str) -> Self:
        """The host and port of an http or https URL."""
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        host = (parts.hostname or "").replace("%25", "%")  # a link-local address's zone
        if not host.isascii():
            host = host.encode("idna").decode("ascii")
        return cls(host, parts.port or (443 if is_tls else 80), is_tls)

    @property
    def name(self) -> str:
        """The host as it stands in a Host field and in a certificate's place."""
        host = self.host.partition("%")[0]
        return f"[{host}]" if ":" in host else host

    @property
    def authority(self) -> str:
        """Host and port."""
        return f"{self.name}:{self.port}"


class SocketStream:
    """A connected socket, plain or TLS, whose sends and reads end with the deadline."""

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._connected = connected
        self._deadline = deadline

    def send_all(self, data: bytes) -> None:
        """Send everything, or raise OSError."""
        self._connected.settimeout(self._deadline.left_s())
        sent = self._connected.send(data)
        if sent < len(data):
            view = memoryview(data)[sent:]
            while view:
                self._connected.settimeout(self._deadline.left_s())
                view = view[self._connected.send(view) :]

    def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes; how many came, 0 where the other side has ended."""
        self._connected.settimeout(self._deadline.left_s())
        return self._connected.recv_into(buffer)


class NestedTls:
    """TLS to the target inside the TLS to a proxy, for which ``ssl`` has no socket."""

    def __init__(self, outer: Stream, context: ssl.SSLContext, server_name: str) -> None:
        self._outer = outer
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=server_name)
        self._buffer = memoryview(bytearray(16384))
        self._run(self._tls.do_handshake)

    def send_all(self, data: bytes) -> None:
        """Send everything, or raise OSError."""
        view = memoryview(data)
        while view:
            view = view[self._run(partial(self._tls.write, view)) :]

    def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes; how many came, 0 where the other side has ended."""
        try:
            data = self._run(partial(self._tls.read, len(buffer)))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        buffer[: len(data)] = data
        return len(data)

    def _run(self, operation: Callable[[], _Result]) -> _Result:
        """Do one operation, moving what it has to say and to hear between the layers."""
        while True:
            try:
                result = operation()
            except ssl.SSLWantReadError:
                self._pass_on()
            else:
                self._pass_on()
                return result
            if count := self._outer.receive_into(self._buffer):
                self._received.write(self._buffer[:count])
            else:
                self._received.write_eof()

    def _pass_on(self) -> None:
        if data := self._to_send.read():
            self._outer.send_all(data)


def dial(place: Place, deadline: Deadline) -> socket.socket:
    """A socket to the first address that answers, each given its share of the time left.

    Raises:
        UnreachableError: The name is unknown, or no address takes a connection.
        TimeoutError: The last of them did not answer in time.
    """
    try:
        addresses = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError("unreachable", f"{place.host}: {error}") from error
    failure: OSError = OSError("no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.settimeout(deadline.left_s() / (len(addresses) - index))
            connected.connect(address)
        except OSError as error:
            connected.close()
            failure = error
        else:
            return connected
    if isinstance(failure, TimeoutError):
        raise failure
    raise UnreachableError("unreachable", f"{type(failure).__name__}: {failure}") from failure


def open_tunnel(stream: Stream, place: Place, headers: bytes) -> None:
    """Have the proxy at the other end pass everything on to a place.

    Args:
        headers: Whole lines, for the proxy alone.

    Raises:
        OSError: It refuses.
    """
    authority = place.authority.encode()
    stream.send_all(b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (authority, authority, headers))
    read_tunnel_answer(stream)
