"""Export requests: the resource, the scopes, and as many spans as one body may carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from argus_otel.encode.protobuf import attributes as encode_attributes
from argus_otel.encode.protobuf import message, text, varint
from argus_otel.semconv.names import SCHEMA_URL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from argus_otel.encode.protobuf import AttributeValue

MAX_REQUEST_BYTES: Final = 3_000_000
"""Below the 4 MiB that a gRPC receiver further on refuses (otel notes, §8)."""

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
    schema = message(3, text(SCHEMA_URL))
    frame = message(1, resource), schema
    empty_bytes = sum(map(len, frame)) + _WRAPPING_BYTES
    done: list[bytes] = []  # finished scope_spans fields of the body under way
    body_bytes, spans = empty_bytes, 0
    for name, batches in scopes.items():
        scope = encode_scope(name, scope_version)
        scope_bytes = len(scope) + len(schema) + _WRAPPING_BYTES
        parts: list[bytes] = []
        for batch in batches:
            rest = batch
            while rest.count:
                room = max_bytes - body_bytes - (0 if parts else scope_bytes)
                part, left = _take(rest, room)
                if part is None and spans:  # full: send what there is, begin anew
                    if parts:
                        done.append(message(2, b"".join((scope, *parts, schema))))
                    yield _finish(frame, done), spans
                    done, parts, body_bytes, spans = [], [], empty_bytes, 0
                    continue
                if part is None:  # a single span above the limit
                    part, left = _take_one(rest)
                body_bytes += len(part.data) + (0 if parts else scope_bytes)
                parts.append(part.data)
                spans += part.count
                rest = left
        if parts:
            done.append(message(2, b"".join((scope, *parts, schema))))
    if spans:
        yield _finish(frame, done), spans


def _take(batch: EncodedSpans, room: int) -> tuple[EncodedSpans | None, EncodedSpans]:
    """As many whole spans as fit, and the rest."""
    if len(batch.data) <= room:
        return batch, EncodedSpans(b"", 0)
    end = count = 0
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


def _finish(frame: tuple[bytes, bytes], scope_spans: list[bytes]) -> bytes:
    resource, schema = frame
    inner = b"".join((resource, *scope_spans, schema))
    return b"\x0a" + varint(len(inner)) + inner
