"""Trace and span ids that every rank computes alike, so that nothing has to be sent around.

A step's trace id is a keyed hash of who the run is and which step it is; the ids of the root
and of each rank's step span follow from it. Everything else in a step counts up from a base
that is hashed from (trace, rank, what), so two ranks never collide and a batch of ids is one
vectorised pass.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_PERSON_TRACE: Final = b"argus.trace.v1"
_PERSON_SPAN: Final = b"argus.span.v1"
_PERSON_GROUP: Final = b"argus.group.v1"
_PERSON_KEEP: Final = b"argus.keep.v1"

_SPAN_HASH: Final = hashlib.blake2b(digest_size=8, person=_PERSON_SPAN)
_WHAT_RANK_N = struct.Struct("<BIQ").pack
_THREE_NUMBERS = struct.Struct("<3q").pack

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

# Finaliser constants of splitmix64 (Steele, Lea, Flood 2014): a bijection on 64-bit words, so
# distinct counters under one base give distinct ids.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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
    state = _keyed(nonce).copy()
    state.update(kind + _THREE_NUMBERS(*numbers))
    digest = state.digest()
    return digest if any(digest) else b"\x01" * 16


@lru_cache(maxsize=8)  # a copy costs half of what it takes to set up a keyed hash
def _keyed(nonce: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16, key=nonce, person=_PERSON_TRACE)


def span_id(trace_id: bytes, what: int, rank: int, n: int = 0) -> bytes:
    """The 8-byte id of the one span of its kind: ``ROOT`` (rank 0) or a rank's ``RANK_STEP``.

    Cost:
        Background thread. 0.7 µs.
    """
    state = _SPAN_HASH.copy()
    state.update(trace_id + _WHAT_RANK_N(what, rank, n))
    digest = state.digest()
    return digest if any(digest) else b"\x01" * 8


def span_ids(trace_ids: Sequence[bytes], what: int, rank: int, count: int) -> NDArray[np.uint64]:
    """Ids of ``count`` spans of one kind on one rank in each of some traces.

    Never 0, and distinct among themselves within a trace.

    Returns:
        Shape [T, count] for T traces; written little-endian as they stand in memory.

    Cost:
        Background thread. 12 µs, and 1 µs for each trace with 32 spans: several at a time.
    """
    bases = b"".join([span_id(trace_id, what, rank, 1) for trace_id in trace_ids])
    base_T = np.frombuffer(bases, dtype="<u8")
    word: NDArray[np.uint64] = base_T[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    word ^= word >> np.uint64(31)
    word[word == 0] = 1
    return word


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
    body = attempt.to_bytes(8, "little") + ordinal.to_bytes(8, "little", signed=True)
    digest = hashlib.blake2b(body, digest_size=8, key=nonce, person=_PERSON_KEEP).digest()
    return int.from_bytes(digest, "little") < ratio * 2.0**64
