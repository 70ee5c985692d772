"""Digests off their spans: decoded, checked, each once; what cannot be read is counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from argus_otel.semconv import names
from argus_otel.store.spans import MAX_INT32, MAX_INT64
from argus_otel.wire import scopes
from argus_otel.wire.digest import StepDigest, decode_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from argus_otel.store.spans import Origin, Span

_log = logging.getLogger(__name__)

_MAX_ORDINAL: Final = 2**53
"""A step a microsecond for 285 years; and what JSON readers still hold exactly."""


class DamagedDigestError(ValueError):
    """A digest that cannot be read."""


@dataclass(slots=True, kw_only=True)
class Received:
    """A readable digest, and where it came from."""

    origin: Origin
    trace_id: str
    digest: StepDigest


@dataclass(slots=True, kw_only=True)
class Digests:
    """The digests among some spans: sorted by ordinal, then rank."""

    received: list[Received] = field(default_factory=list)
    damaged: int = 0


def is_digest(span: Span) -> bool:
    """Whether a span is one rank's account of one step."""
    return span.name == names.SPAN_RANK_STEP and span.scope == scopes.DIGEST


def read_digest(span: Span, *, with_kernels: bool = True) -> Received:
    """Decode a ``rank.step`` span; see ``decode_digest``.

    Raises:
        DamagedDigestError: It cannot be read, or does not fit the tables.
    """
    try:
        digest = decode_digest(
            span.attributes, span.start_ns, span.end_ns, with_kernels=with_kernels
        )
        _check(digest)
    except (ValueError, TypeError, OverflowError, IndexError) as error:
        msg = f"digest of service {span.origin.service!r}, rank {span.rank}: {error}"
        raise DamagedDigestError(msg) from error
    return Received(origin=span.origin, trace_id=span.trace_id, digest=digest)


def read_digests(spans: Iterable[Span], *, with_kernels: bool = False) -> Digests:
    """Decode the digests among spans of one run; of a retried batch the first copy counts.

    Without kernels, which only a finding needs: damage in them alone is then not seen.
    """
    found: dict[tuple[int, int], Received] = {}
    damaged: set[tuple[str, str]] = set()
    for span in filter(is_digest, spans):
        try:
            received = read_digest(span, with_kernels=with_kernels)
        except DamagedDigestError as error:
            if not damaged:  # a reader of the wrong version would say it for each of thousands
                _log.warning("%s (said once; all are counted)", error)
            damaged.add((span.trace_id, span.span_id))
        else:
            found.setdefault((received.digest.ordinal, received.digest.rank), received)
    return Digests(received=[found[key] for key in sorted(found)], damaged=len(damaged))


def _check(digest: StepDigest) -> None:
    """Refuse what would not fit the tables, so that one bad span never costs a whole batch."""
    sync = digest.sync
    whole_numbers = (
        digest.iteration or 0,
        digest.memory_bytes or 0,
        digest.drops,
        *digest.expert_tokens,
    )
    if not 0 <= digest.rank <= MAX_INT32 or not 0 <= digest.ordinal <= _MAX_ORDINAL:
        msg = f"no such step and rank: {digest.ordinal}, {digest.rank}"
    elif digest.end_ns < digest.start_ns:
        msg = "the step ends before it starts"
    elif sync.group.size and int(sync.group.max()) >= sync.group_keys.size:
        msg = "a collective names a group that the digest does not list"
    elif len(sync.channels) and int(sync.channels[:, 0].max()) >= sync.group_keys.size:
        msg = "a point-to-point channel names a group that the digest does not list"
    elif sync.peer.size and int(sync.peer.max()) > MAX_INT32:
        msg = "a point-to-point operation names an impossible rank"
    elif max(map(abs, whole_numbers)) > MAX_INT64 or not 0 <= (digest.gc_count or 0) <= MAX_INT32:
        msg = "a count is out of range"
    else:
        return
    raise ValueError(msg)
