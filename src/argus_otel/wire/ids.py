"""Trace and span ids that every rank computes alike, so that nothing has to be sent around.

A step's trace id is a keyed hash of who the run is and which step it is; the ids of the root
and of each rank's step span follow from it. All other ids of a rank in a step are one stream of
bytes, hashed from (trace, rank, what).
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_PERSON_TRACE: Final = b"argus.trace.v1"
_PERSON_SPAN: Final = b"argus.span.v1"
_PERSON_GROUP: Final = b"argus.group.v1"
_PERSON_KEEP: Final = b"argus.keep.v1"

_SPAN_HASH: Final = hashlib.blake2b(digest_size=8, person=_PERSON_SPAN)
_WHAT_RANK_N = struct.Struct("<BIQ").pack
_THREE_NUMBERS = struct.Struct("<3q").pack
_ZERO = bytes(8)
_ATTEMPT_ORDINAL = struct.Struct("<Qq").pack

ROOT: Final = 0
RANK_STEP: Final = 1
TIMELINE: Final = 2
DETAIL: Final = 3
FINDING: Final = 4
HEARTBEAT: Final = 5

TIMELINE_SPANS_PER_RANK: Final = 32
"""Fixed budget of timeline spans for one rank and step."""

MAX_SPANS_PER_TRACE: Final = 8000
"""Above about this many spans Jaeger's page and Tempo's byte limit give out (otel notes, §5-6)."""

_SPANS_PER_RANK: Final = TIMELINE_SPANS_PER_RANK + 1
RANKS_PER_SHARD: Final = (MAX_SPANS_PER_TRACE - 1) // _SPANS_PER_RANK


def shard_of(rank: int) -> int:
    """Which of a step's traces holds this rank: contiguous blocks, the same on every rank."""
    return rank // RANKS_PER_SHARD


def shard_count(world_size: int) -> int:
    """How many traces one step of a job of this size has."""
    return -(-world_size // RANKS_PER_SHARD)


def step_trace_id(nonce: bytes, attempt: int, ordinal: int, shard: int) -> bytes:
    """The 16-byte trace id of one shard of one step; equal on every rank."""
    return _trace_hash(nonce, b"step", attempt, ordinal, shard)


def detail_trace_id(nonce: bytes, attempt: int, ordinal: int, rank: int) -> bytes:
    """The trace id for one rank's detail, where it does not fit the step's own trace."""
    return _trace_hash(nonce, b"rank", attempt, ordinal, rank)


def _trace_hash(nonce: bytes, kind: bytes, *numbers: int) -> bytes:
    state = _keyed(nonce, _PERSON_TRACE, 16).copy()
    state.update(kind + _THREE_NUMBERS(*numbers))
    digest = state.digest()
    return digest if any(digest) else b"\x01" * 16


@lru_cache(maxsize=8)  # a copy costs half of what it takes to set up a keyed hash
def _keyed(nonce: bytes, person: bytes, size: int) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=size, key=nonce, person=person)


def span_id(trace_id: bytes, what: int, rank: int, n: int = 0) -> bytes:
    """The 8-byte id of the one span of its kind: ``ROOT`` (rank 0) or a rank's ``RANK_STEP``.

    Cost:
        Background thread. 0.7 µs.
    """
    state = _SPAN_HASH.copy()
    state.update(trace_id + _WHAT_RANK_N(what, rank, n))
    digest = state.digest()
    return digest if any(digest) else b"\x01" * 8


def span_ids(trace_id: bytes, what: int, rank: int, count: int) -> bytes:
    """Ids of ``count`` spans of one kind on one rank in a trace, 8 bytes each.

    The first ones are the same, however many are asked for. That two of a trace are equal is as
    unlikely as it is with random ids.

    Cost:
        Background thread. 2 µs for 32.
    """
    seed = trace_id + _WHAT_RANK_N(what, rank, 1)
    stream = hashlib.shake_128(_PERSON_SPAN + seed).digest(8 * count)
    if _ZERO in stream:  # perhaps an id, which would mean "none"
        each = [stream[at : at + 8] for at in range(0, len(stream), 8)]
        stream = b"".join([b"\x01" * 8 if one == _ZERO else one for one in each])
    return stream


def group_key(description: str, ranks: Sequence[int], nth: int) -> int:
    """A process group's identity: the same on all members, distinct for equal twins by ``nth``.

    Two ``new_group([0, 1])`` have the same members and description, so the ordinal among equals
    is part of the key.
    """
    body = f"{description}\0{nth}\0{','.join(map(str, ranks))}".encode()
    digest = hashlib.blake2b(body, digest_size=8, person=_PERSON_GROUP).digest()
    return int.from_bytes(digest, "little")


def is_baseline(nonce: bytes, attempt: int, ordinal: int, ratio: float) -> bool:
    """Whether a step belongs to the healthy sample; every rank and shard agrees.

    Args:
        ratio: Share of steps, 0 to 1.
    """
    state = _keyed(nonce, _PERSON_KEEP, 8).copy()
    state.update(_ATTEMPT_ORDINAL(attempt, ordinal))
    return int.from_bytes(state.digest(), "little") < ratio * 2.0**64
