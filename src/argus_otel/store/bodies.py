"""Request bodies off the wire, never larger than allowed, compressed or not."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import BinaryIO

_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
_MAX_CHUNK_LINE: Final = 1024


class BodyError(Exception):
    """A body that cannot be used, with the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def read_body(stream: BinaryIO, length: str | None, transfer: str, limit: int) -> bytes:
    """Read a request's body as it was sent.

    Args:
        stream: Positioned after the headers.
        length: The Content-Length header.
        transfer: The Transfer-Encoding header, or "".
        limit: Bytes, the most that is accepted.

    Raises:
        BodyError: 411 without a length, 400 for a bad one or a body cut short, 413 too large.
    """
    if transfer.strip().lower() == "chunked":
        return _read_chunks(stream, limit)
    if length is None:
        raise BodyError(411, "a request needs Content-Length")
    if not (length.isascii() and length.isdigit()):
        raise BodyError(400, "Content-Length is not a number")
    size = int(length)
    if size > limit:
        raise BodyError(413, f"the body has {size} bytes; at most {limit} are accepted")
    return _read_exactly(stream, size)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo the Content-Encoding, without ever holding more than the limit.

    Raises:
        BodyError: 415 for an encoding other than gzip, 400 for damaged gzip, 413 too large.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise BodyError(415, f"Content-Encoding {encoding[:40]!r} is not supported; gzip is")
    out = bytearray()
    rest = body
    while rest:  # gzip allows several members one after the other
        member = zlib.decompressobj(_GZIP_WINDOW)
        try:
            out += member.decompress(rest, limit + 1 - len(out))
        except zlib.error as error:
            raise BodyError(400, f"damaged gzip: {error}") from error
        if len(out) > limit:
            raise BodyError(413, f"the body has more than {limit} bytes once decompressed")
        if not member.eof:
            raise BodyError(400, "gzip is cut short")
        rest = member.unused_data
    return bytes(out)


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    body = stream.read(size)
    if len(body) != size:
        raise BodyError(400, "the body is cut short")
    return body


def _read_chunks(stream: BinaryIO, limit: int) -> bytes:
    out = bytearray()
    while True:
        line = stream.readline(_MAX_CHUNK_LINE)
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError as error:
            raise BodyError(400, "damaged chunked body") from error
        if size < 0 or len(out) + size > limit:
            raise BodyError(413, f"the body has more than {limit} bytes")
        if size == 0:
            while stream.readline(_MAX_CHUNK_LINE).strip():
                pass  # trailers
            return bytes(out)
        out += _read_exactly(stream, size)
        stream.readline(_MAX_CHUNK_LINE)
