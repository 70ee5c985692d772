"""Export requests: the resource, the scopes, and as many spans as one body may carry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.encode.protobuf import attributes as encode_attributes
from argus_otel.encode.protobuf import message, text
from argus_otel.semconv.names import SCHEMA_URL
from argus_otel.wire.varints import varint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from argus_otel.encode.protobuf import AttributeValue

MAX_REQUEST_BYTES: Final = 3_000_000
"""Uncompressed. Below the 4 MiB above which a stock gRPC receiver further on refuses."""

_SCHEMA: Final = message(3, text(SCHEMA_URL))

# Tag and longest length prefix of a message whose size is known only at the end.
_WRAPPING_BYTES: Final = 1 + 5


@dataclass(frozen=True, slots=True)
class EncodedSpans:
    """Concatenated ``spans`` entries of ScopeSpans, and how many there are."""

    data: bytes
    count: int


def encode_resource(attributes: Mapping[str, AttributeValue]) -> bytes:
    """The body of a Resource, for ``encode_trace_requests`` and ``encode_metrics_request``."""
    return encode_attributes(1, attributes)


@lru_cache(maxsize=64)
def encode_scope(name: str, version: str = "") -> bytes:
    """The ``scope`` field of ScopeSpans and ScopeMetrics."""
    return message(1, message(1, text(name)) + (message(2, text(version)) if version else b""))


def encode_trace_requests(
    resource: bytes,
    scopes: Mapping[str, Sequence[EncodedSpans]],
    *,
    max_bytes: int = MAX_REQUEST_BYTES,
    scope_version: str = "",
) -> Iterator[tuple[bytes, int]]:
    """Bodies of ExportTraceServiceRequest, each with the number of its spans.

    Args:
        resource: From ``encode_resource``.
        scopes: Scope name to its spans.
        max_bytes: No body is longer, uncompressed, unless one single span is.
        scope_version: Version of the instrumentation, for all scopes.
    """
    body = _Body(resource, max_bytes)
    for name, batches in scopes.items():
        body.begin_scope(name, scope_version)
        for batch in batches:
            rest = batch
            while rest.count:
                part, left = _take(rest, body.room())
                if part is None and body.spans:  # full: send what there is, begin anew
                    yield body.finish()
                    continue
                if part is None:  # a single span above the limit
                    part, left = _take_one(rest)
                body.add(part)
                rest = left
    if body.spans:
        yield body.finish()


class _Body:
    """One request under way, as pieces that are copied once, at its end."""

    def __init__(self, resource: bytes, max_bytes: int) -> None:
        self._resource = message(1, resource)
        self._max_bytes = max_bytes
        self._scope = b""
        self._clear()

    def _clear(self) -> None:
        self.spans = 0
        self._scopes: list[list[bytes]] = []
        self._in_scope = False
        self._size = len(self._resource) + len(_SCHEMA) + _WRAPPING_BYTES

    def begin_scope(self, name: str, version: str) -> None:
        self._scope = encode_scope(name, version)
        self._in_scope = False

    def room(self) -> int:
        """Bytes left for spans of the current scope."""
        return self._max_bytes - self._size - (0 if self._in_scope else self._scope_bytes())

    def _scope_bytes(self) -> int:
        return len(self._scope) + len(_SCHEMA) + _WRAPPING_BYTES

    def add(self, part: EncodedSpans) -> None:
        if not self._in_scope:
            self._scopes.append([self._scope])
            self._size += self._scope_bytes()
            self._in_scope = True
        self._scopes[-1].append(part.data)
        self._size += len(part.data)
        self.spans += part.count

    def finish(self) -> tuple[bytes, int]:
        """The request and its number of spans; what is added next begins another."""
        pieces = [self._resource]
        for scope in self._scopes:
            scope.append(_SCHEMA)
            pieces += (b"\x12", varint(sum(map(len, scope))), *scope)
        pieces.append(_SCHEMA)
        whole = b"".join((b"\x0a", varint(sum(map(len, pieces))), *pieces))
        spans = self.spans
        self._clear()
        return whole, spans


def _take(batch: EncodedSpans, room: int) -> tuple[EncodedSpans | None, EncodedSpans]:
    """As many whole spans as fit, and the rest."""
    if len(batch.data) <= room:
        return batch, EncodedSpans(b"", 0)
    end = count = 0
    if width := _row_width(batch):
        count = max(room, 0) // width
        end = count * width
    else:
        while (following := _next_entry(batch.data, end)) <= room:
            end = following
            count += 1
    if not count:
        return None, batch
    return _cut(batch, end, count)


def _take_one(batch: EncodedSpans) -> tuple[EncodedSpans, EncodedSpans]:
    return _cut(batch, _next_entry(batch.data, 0), 1)


def _cut(batch: EncodedSpans, end: int, count: int) -> tuple[EncodedSpans, EncodedSpans]:
    first = EncodedSpans(batch.data[:end], count)
    return first, EncodedSpans(batch.data[end:], batch.count - count)


def _row_width(batch: EncodedSpans) -> int:
    """Bytes of each entry where all are equally long, as a template makes them; else 0.

    The first entry ends where the second begins, and so on: equal tags and lengths at every
    multiple of the width mean that an entry begins there.
    """
    width, odd = divmod(len(batch.data), batch.count)
    if odd or _next_entry(batch.data, 0) != width:
        return 0
    rows = np.frombuffer(batch.data, dtype=np.uint8).reshape(batch.count, width)
    prefix = 1 + len(varint(width))  # at least as long as tag and length
    return width if (rows[:, :prefix] == rows[0, :prefix]).all() else 0


def _next_entry(data: bytes, at: int) -> int:
    """Where the entry after the one at ``at`` begins: past tag, length and body."""
    at += 1
    size = shift = 0
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return at + size
        shift += 7
