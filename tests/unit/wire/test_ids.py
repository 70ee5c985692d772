"""Identities: computed alike on every rank, apart from each other, and never 0."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.wire import ids

NONCE = bytes(range(16))
nonces = st.binary(min_size=8, max_size=32)
ordinals = st.integers(0, 2**40)
ranks = st.integers(0, 100_000)


def words_of(span_ids):
    return struct.unpack(f"<{len(span_ids) // 8}Q", span_ids)


@given(nonces, st.integers(0, 100), ordinals, st.integers(0, 60))
def test_every_rank_computes_the_same_trace_id(nonce, attempt, ordinal, shard):
    """Nothing is sent around: the same four facts give the same 16 bytes, never 0."""
    trace_id = ids.step_trace_id(nonce, attempt, ordinal, shard)

    assert trace_id == ids.step_trace_id(nonce, attempt, ordinal, shard)
    assert len(trace_id) == 16
    assert any(trace_id)


def test_runs_attempts_steps_and_shards_have_traces_of_their_own():
    """20 × 5 × 20 × 4 traces, and each rank's detail, all different."""
    nonces_in_use = [n.to_bytes(8, "little") for n in range(20)]
    found = {
        ids.step_trace_id(nonce, attempt, ordinal, shard)
        for nonce in nonces_in_use
        for attempt in range(5)
        for ordinal in range(20)
        for shard in range(4)
    }
    found |= {ids.detail_trace_id(NONCE, 0, 0, rank) for rank in range(100)}

    assert len(found) == 20 * 5 * 20 * 4 + 100


@given(nonces, ordinals, ranks)
def test_ids_of_one_trace_do_not_collide(nonce, ordinal, rank):
    """The root, the rank's step and its neighbour's, 32 timeline and 900 detail spans."""
    trace_id = ids.step_trace_id(nonce, 0, ordinal, 0)
    words = [
        int.from_bytes(ids.span_id(trace_id, ids.ROOT, 0), "little"),
        int.from_bytes(ids.span_id(trace_id, ids.RANK_STEP, rank), "little"),
        int.from_bytes(ids.span_id(trace_id, ids.RANK_STEP, rank + 1), "little"),
        *words_of(ids.span_ids(trace_id, ids.TIMELINE, rank, 32)),
        *words_of(ids.span_ids(trace_id, ids.DETAIL, rank, 900)),
        *words_of(ids.span_ids(trace_id, ids.TIMELINE, rank + 1, 32)),
    ]

    assert 0 not in words
    assert len(set(words)) == len(words)


class _ZeroHash:
    def __init__(self, size):
        self._size = size

    def copy(self):
        return self

    def update(self, body):
        pass

    def digest(self, size=None):
        return b"\0" * (size or self._size)


def test_an_id_that_would_hash_to_zero_is_moved(monkeypatch):
    """OpenTelemetry takes an id of 0 for "no id"."""
    monkeypatch.setattr(ids, "_keyed", lambda nonce, person, size: _ZeroHash(size))
    monkeypatch.setattr(ids, "_SPAN_HASH", _ZeroHash(8))
    monkeypatch.setattr(hashlib, "shake_128", lambda seed: _ZeroHash(len(seed)))

    assert any(ids.step_trace_id(NONCE, 0, 0, 0))
    assert any(ids.span_id(b"\0" * 16, ids.ROOT, 0))
    assert 0 not in words_of(ids.span_ids(b"\0" * 16, ids.TIMELINE, 0, 32))


def test_a_longer_batch_begins_with_the_shorter_one():
    """Which id a span gets does not depend on how many were asked for."""
    trace_id = ids.step_trace_id(NONCE, 0, 5, 0)

    long = ids.span_ids(trace_id, ids.DETAIL, 3, 900)

    assert len(long) == 900 * 8
    assert long[: 32 * 8] == ids.span_ids(trace_id, ids.DETAIL, 3, 32)
    assert ids.span_ids(trace_id, ids.DETAIL, 3, 0) == b""


@given(st.integers(1, 100_000))
def test_shards_are_whole_blocks_within_the_span_budget(world_size):
    """Every rank has a shard, no shard is empty, and a full one stays under 8,000 spans."""
    count = ids.shard_count(world_size)

    assert ids.shard_of(0) == 0
    assert ids.shard_of(world_size - 1) == count - 1
    assert ids.RANKS_PER_SHARD * (ids.TIMELINE_SPANS_PER_RANK + 1) + 1 <= ids.MAX_SPANS_PER_TRACE


@given(st.integers(0, 100_000))
def test_neighbouring_ranks_share_a_shard_or_begin_the_next(rank):
    """Contiguous blocks."""
    assert ids.shard_of(rank + 1) - ids.shard_of(rank) in {0, 1}


def test_twin_groups_are_told_apart():
    """Two ``new_group([0, 1])`` have the same members and description."""
    assert ids.group_key("undefined", [0, 1], 0) != ids.group_key("undefined", [0, 1], 1)


def test_a_group_is_the_same_on_all_members_and_differs_by_order_and_name():
    """The order of ranks decides who is root, so it is part of the identity."""
    key = ids.group_key("dp", (0, 1), 0)

    assert key == ids.group_key("dp", [0, 1], 0)
    assert key != ids.group_key("dp", [1, 0], 0)
    assert key != ids.group_key("tp", [0, 1], 0)
    assert 0 <= key < 2**64


@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.5, 1.0])
def test_the_healthy_sample_has_the_size_that_was_asked_for(ratio):
    """Over 20,000 steps, within four standard deviations."""
    steps = 20_000
    spread = 4 * (ratio * (1 - ratio) / steps) ** 0.5

    kept = sum(ids.is_baseline(NONCE, 0, ordinal, ratio) for ordinal in range(steps))

    assert abs(kept / steps - ratio) <= spread
