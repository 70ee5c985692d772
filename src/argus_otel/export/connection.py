"""One kept-alive connection to a target, on which no request outlives its deadline.

A time-out of a socket holds for one operation: an endpoint that sends a byte now and then can
hold a thread for hours. Here one deadline spans connecting, the TLS handshake, sending, and every
read of the answer. Only the resolver (``getaddrinfo``) keeps to its own time-outs.

It writes its requests itself, for the cost of one post a second on every rank, and so that
nobody's instrumentation of an HTTP library makes spans of our posts, and posts of those spans.
"""

from __future__ import annotations

import contextlib
import os
import select
import ssl
from http.client import HTTPException
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

from argus_otel.export.answers import Answer, Stream, read_answer
from argus_otel.export.dialling import (
    Deadline,
    NestedTls,
    Place,
    SocketStream,
    UnreachableError,
    dial,
    open_tunnel,
)
from argus_otel.export.targets import basic_authorization

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from argus_otel.export.targets import Target

__all__ = ["Answer", "TargetConnection", "UnreachableError"]

# Of a path and a query, what RFC 3986 lets stand; "%" too, since they are percent-encoded already.
_AS_IT_IS: Final = "/?:@!$&'()*+,;=-._~%"

# What the body's form on this connection needs is not a user's to choose.
_OURS: Final = frozenset({"content-length", "transfer-encoding"})


class TargetConnection:
    """Posts to one target, over one connection that is kept alive between posts.

    Args:
        target: Where to; its files were checked when it was made.
        headers: All of them, authentication included; ``host`` and ``accept-encoding`` are added
            where they are missing.

    Raises:
        ValueError: A header holds what would break the protocol.
    """

    def __init__(self, target: Target, headers: Mapping[str, str]) -> None:
        self._context = target.ssl_context()
        self._deadline = Deadline()
        self._place = Place.of(target.url)
        self._proxy = None if target.proxy_url is None else Place.of(target.proxy_url)
        authorization = _proxy_authorization(target.proxy_url)
        self._tunnel_headers = _lines(authorization)
        path = _path(target.url)
        if self._proxy is not None and not self._place.is_tls:
            path = f"{target.url.partition('://')[0]}://{self._host_field()}{path}"
            headers = {**authorization, **headers}
        usual = {"host": self._host_field(), "accept-encoding": "identity"}
        given = {name.lower(): value for name, value in headers.items()}
        lines = _lines({k: v for k, v in (usual | given).items() if k not in _OURS})
        self._head = b"POST %s HTTP/1.1\r\n%scontent-length: " % (path.encode("ascii"), lines)
        self._connected: socket.socket | None = None
        self._stream: Stream | None = None
        self._readable = select.poll()

    def post(self, body: bytes, timeout_s: float) -> Answer:
        """Send one request and read its answer.

        Redirects are answers like any other: nothing is sent to a host that was not configured.

        Args:
            body: As it goes over the wire.
            timeout_s: Bound on the whole exchange.

        Raises:
            UnreachableError: There is no answer, for whatever reason.

        Cost:
            About 50 µs of CPU in a row; 200 to 300 µs once a second, with cold caches.
        """
        self._deadline.start(timeout_s)
        try:
            return self._exchange(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))
        except UnreachableError:
            self.close()
            raise
        except (HTTPException, OSError, ValueError) as error:
            self.close()
            detail = f"{type(error).__name__}: {error}"[:300]
            raise UnreachableError(_cause(error), detail) from error

    def close(self) -> None:
        """Close the connection; the next post opens a new one."""
        connected, self._connected, self._stream = self._connected, None, None
        if connected is not None:
            connected.close()

    def abandon(self) -> None:
        """In a forked child: let go of its copy of the descriptor, and take no lock for it.

        Another thread of the parent may have held any lock in the moment of the fork, and nobody
        is here to release it. Whoever calls this keeps the object for good, so that no finaliser
        takes one either.
        """
        if self._connected is not None:
            with contextlib.suppress(OSError):
                os.close(self._connected.detach())

    # --- One exchange -----------------------------------------------------------------------------

    def _exchange(self, request: bytes) -> Answer:
        stream = self._kept()
        is_new = stream is None
        if stream is None:
            stream = self._open()
        whole = _send(stream, request)
        if not whole and not is_new:
            # It was closed since the last post. Part of a request is accepted by nobody, so this
            # is no repetition; and the endpoint may well be there.
            stream = self._open()
            whole = _send(stream, request)
        answer, stays_open = read_answer(stream)
        if not (whole and stays_open):
            self.close()
        return answer

    def _kept(self) -> Stream | None:
        """The connection of the last post, unless its other side has ended it."""
        # An endpoint has nothing to say unasked: what can be read now is the end of the connection.
        return None if self._stream is None or self._readable.poll(0) else self._stream

    def _open(self) -> Stream:
        self.close()
        stream = self._open_to(self._proxy or self._place)
        if self._proxy is not None and self._context is not None:
            open_tunnel(stream, self._place, self._tunnel_headers)
            if self._proxy.is_tls:
                stream = NestedTls(stream, self._context, _server_name(self._place))
            else:
                stream = self._secure(self._context, self._place)
        self._stream = stream
        self._readable = select.poll()
        if self._connected is not None:
            self._readable.register(self._connected, select.POLLIN)
        return stream

    def _open_to(self, place: Place) -> Stream:
        """Connect to the target, or to the proxy in front of it."""
        self._connected = dial(place, self._deadline)
        if not place.is_tls:
            return SocketStream(self._connected, self._deadline)
        # A client certificate for the target is not shown to its proxy.
        context = self._context if place is self._place else None
        return self._secure(context or ssl.create_default_context(), place)

    def _secure(self, context: ssl.SSLContext, place: Place) -> Stream:
        """The same connection with TLS on it, the handshake done."""
        if self._connected is None:  # pragma: no cover
            msg = "not connected"
            raise OSError(msg)
        self._connected.settimeout(self._deadline.left_s())
        # From here on another object has the descriptor, which `abandon` must know.
        secured = context.wrap_socket(
            self._connected, server_hostname=_server_name(place), do_handshake_on_connect=False
        )
        self._connected = secured
        secured.do_handshake()
        return SocketStream(secured, self._deadline)

    def _host_field(self) -> str:
        default_port = 443 if self._place.is_tls else 80
        return self._place.name if self._place.port == default_port else self._place.authority


def _send(stream: Stream, request: bytes) -> bool:
    """Whether all of it was sent; if not, an answer may be there nevertheless, which says why."""
    try:
        stream.send_all(request)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _path(url: str) -> str:
    parts = urlsplit(url)
    path = parts.path or "/"
    return quote(f"{path}?{parts.query}" if parts.query else path, safe=_AS_IT_IS)


def _server_name(place: Place) -> str:
    return place.host.partition("%")[0].rstrip(".")


def _proxy_authorization(proxy_url: str | None) -> dict[str, str]:
    parts = urlsplit(proxy_url or "")
    if parts.username is None:
        return {}
    return {"proxy-authorization": basic_authorization(parts.username, parts.password or "")}


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
        msg = "a header holds a line break"
        raise ValueError(msg)
    return lines.encode("latin-1")


def _cause(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError | ssl.CertificateError):
        return "tls"
    return "timed_out" if isinstance(error, TimeoutError) else "connection_lost"
