"""The answer to a post: read within bounds, and cheaply where it is the usual one.

A rank posts about once a second for weeks, and nearly every answer is a short "200" that arrives
in one piece. That one is told by a look at its bytes; ``http.client`` reads all others (chunked,
``100 Continue``, HTTP/1.0, errors with headers), for 60 µs, and several times that once a second.
"""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, Final, Protocol

if sys.version_info >= (3, 12):
    from typing import override
else:
    from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ANSWER_BYTES: Final = 64 * 1024
"""An answer is a few bytes of protobuf; more is read by nobody."""

_FIRST_READ_BYTES: Final = 4096
_ONE_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,4})[ \t]*\r\n")


class Stream(Protocol):
    """A connection whose sends and reads end with the request's deadline."""

    def send_all(self, data: bytes) -> None:
        """Send everything, or raise OSError."""

    def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes; how many came, 0 where the other side has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the endpoint said."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case. Left empty where the answer is the usual one."""
    body: bytes
    """The first ``MAX_ANSWER_BYTES``; empty where it broke off."""


def read_answer(stream: Stream) -> tuple[Answer, bool]:
    """The answer, and whether the connection can carry another request.

    Raises:
        OSError: There was none in time, or the connection broke before its headers were complete.
        HTTPException: It is no HTTP (``http.client``).
    """
    buffer = bytearray(_FIRST_READ_BYTES)
    first = bytes(memoryview(buffer)[: stream.receive_into(memoryview(buffer))])
    body = _usual_body(first)
    if body is not None:
        return Answer(status=200, headers={}, body=body), True
    response = HTTPResponse(_Source(stream, first), method="POST")  # type: ignore[arg-type]
    try:
        response.begin()
        return _read_body(response)
    finally:
        response.close()


def read_tunnel_answer(stream: Stream) -> None:
    """Read a proxy's answer to CONNECT.

    Raises:
        OSError: It did not open the tunnel; or as for ``read_answer``.
        HTTPException: It is no HTTP.
    """
    response = HTTPResponse(_Source(stream, b""), method="CONNECT")  # type: ignore[arg-type]
    try:
        response.begin()
    finally:
        response.close()
    if not 200 <= response.status < 300:
        msg = f"the proxy opens no tunnel: HTTP {response.status} {response.reason}"
        raise OSError(msg)


def _usual_body(data: bytes) -> bytes | None:
    """The body of a "200" that is complete and leaves the connection open; None for any other."""
    head, blank, body = data.partition(b"\r\n\r\n")
    if not blank or not head.startswith(b"HTTP/1.1 200"):
        return None
    fields = head.lower() + b"\r\n"
    # Looser than the fields' syntax, on the safe side.
    if b"close" in fields or b"transfer-encoding" in fields:
        return None
    if fields.count(b"content-length") != 1 or (length := _ONE_LENGTH.search(fields)) is None:
        return None
    return body if len(body) == int(length[1]) else None


def _read_body(response: HTTPResponse) -> tuple[Answer, bool]:
    to_the_end = response.length is None and not response.chunked
    try:
        data = response.read(MAX_ANSWER_BYTES + 1)
    except (HTTPException, OSError):
        # The status is known, and what was accepted must not be sent again.
        data = b""
    complete = response.isclosed()
    if len(data) <= MAX_ANSWER_BYTES and not complete and not to_the_end:
        data = b""  # it broke off
    headers = {name.lower(): value for name, value in response.headers.items()}
    answer = Answer(status=response.status, headers=headers, body=data[:MAX_ANSWER_BYTES])
    return answer, complete and len(data) <= MAX_ANSWER_BYTES and not response.will_close


class _Source:
    """What HTTPResponse asks of a socket: a file to read from."""

    def __init__(self, stream: Stream, first: bytes) -> None:
        self._stream = stream
        self._first = first

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._stream, self._first))


class _Reader(io.RawIOBase):
    """The bytes that were read already, then those still to come."""

    def __init__(self, stream: Stream, first: bytes) -> None:
        self._stream = stream
        self._first = memoryview(first)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int | None:
        if self._first:
            count = min(len(buffer), len(self._first))
            buffer[:count] = self._first[:count]
            self._first = self._first[count:]
            return count
        return self._stream.receive_into(buffer)
