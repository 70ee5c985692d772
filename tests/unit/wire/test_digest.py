"""The digest on the wire: what a rank knew comes back, within the limits of the stores."""

import base64
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.semconv import names
from argus_otel.wire import digest as digest_module
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.digest import (
    MAX_SYNC_BYTES,
    PhaseColumns,
    StepDigest,
    SyncColumns,
    decode_digest,
    encode_digests,
    fold_sync,
)
from argus_otel.wire.packed import MAX_ATTRIBUTE_CHARACTERS
from argus_otel.wire.varints import pack

START_NS = 1_790_000_000_000_000_000
STEP_NS = 61_000_000

micros = st.integers(-(10**9), 10**9)
durations_us = st.integers(-1, 10**9)


def int64(values):
    return np.array(values, dtype=np.int64)


def phases_of(rows, names_known=PHASES, *, folded=False):
    name, start_us, duration_us = zip(*rows, strict=True) if rows else ((), (), ())
    return PhaseColumns(
        name=int64(name),
        start_us=int64(start_us),
        duration_us=int64(duration_us),
        names=names_known,
        folded=folded,
    )


def sync_of(rows, group_keys=(11, 2**64 - 1), start_counts=(7, 0), channels=()):
    columns = zip(*rows, strict=True) if rows else ((),) * 7
    group, op, payload_bytes, peer, phase, arrival_us, duration_us = map(int64, columns)
    return SyncColumns(
        group_keys=np.array(group_keys, dtype=np.uint64),
        start_counts=int64(start_counts),
        channels=int64(channels).reshape(-1, 4),
        group=group,
        op=op,
        payload_bytes=payload_bytes,
        peer=peer,
        phase=phase,
        arrival_us=arrival_us,
        duration_us=duration_us,
    )


def digest_of(phases=None, sync=None, **known):
    return StepDigest(
        ordinal=128,
        rank=3,
        start_ns=START_NS,
        end_ns=START_NS + STEP_NS,
        between_s=0.002,
        end_rule="optimizer",
        phases=phases_of([]) if phases is None else phases,
        sync=sync_of([]) if sync is None else sync,
        **known,
    )


def there_and_back(digest):
    [attributes] = encode_digests([digest])
    return decode_digest(attributes, digest.start_ns, digest.end_ns)


def plain(value):
    """Arrays as lists, so that whole digests compare and print."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    return value.tolist() if isinstance(value, np.ndarray) else value


phase_rows = st.lists(
    st.tuples(st.integers(0, len(PHASES) + 1), micros, st.integers(0, 10**9)), max_size=64
)
sync_rows = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, len(OPS) - 1),
        st.integers(0, 2**40),
        st.integers(-1, 20_000),
        st.integers(-1, len(PHASES) - 1),
        micros,
        durations_us,
    ),
    max_size=60,
)
channels = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 99), st.integers(0, 99), st.integers(0, 10**6)),
    max_size=8,
)
seconds = st.none() | st.floats(0, 1e6)
counts = st.none() | st.integers(0, 2**50)


@given(phase_rows, sync_rows, channels)
def test_phases_and_collectives_come_back_as_they_were(phases, sync, pairs):
    """In order, with point-to-point peers, unknown phases and unknown durations."""
    digest = digest_of(
        phases_of(phases, (*PHASES, "loss", "my phase")), sync_of(sync, channels=pairs)
    )

    assert plain(there_and_back(digest)) == plain(digest)


def as_lists(columns):
    """As a training process has them: nothing there is worth an array."""
    return dataclasses.replace(
        columns,
        **{
            field.name: getattr(columns, field.name).tolist()
            for field in dataclasses.fields(columns)
            if isinstance(getattr(columns, field.name), np.ndarray)
        },
    )


@given(phase_rows, sync_rows, channels, st.booleans())
def test_columns_in_lists_are_written_like_arrays(phases, sync, pairs, folded):
    """Byte for byte, folded or not."""
    arrays = sync_of(sync, channels=pairs)
    if folded and sync:
        arrays = fold_sync(arrays)
    digest = digest_of(phases_of(phases, (*PHASES, "loss", "my phase")), arrays)
    in_lists = digest_of(as_lists(digest.phases), as_lists(digest.sync))

    assert encode_digests([in_lists]) == encode_digests([digest])


def test_operations_are_looked_at_anew_in_every_step():
    """Though they are nearly always those of the step before; even in the same list."""
    rows = [(0, 4, 8, -1, 3, 10 * at, -1) for at in range(5)]
    sync = as_lists(sync_of(rows))
    sync.phase = tuple(sync.phase)
    first = encode_digests([digest_of(sync=sync)])

    again = encode_digests([digest_of(sync=sync)])
    sync.payload_bytes[2] = 16
    other = encode_digests([digest_of(sync=sync)])

    rows[2] = (0, 4, 16, -1, 3, 20, -1)
    assert again == first
    assert other == encode_digests([digest_of(sync=sync_of(rows))])


@pytest.mark.parametrize("count", [660, 700, 10_000])
def test_long_vectors_in_lists_are_folded_like_arrays(count):
    """Above the limit, and just below it."""
    digest = digest_of(sync=many_collectives(count))

    assert encode_digests([digest_of(sync=as_lists(digest.sync))]) == encode_digests([digest])


@given(
    st.fixed_dictionaries(
        {
            "iteration": counts,
            "busy_s": seconds,
            "cpu_s": seconds,
            "run_delay_s": seconds,
            "data_wait_s": seconds,
            "gc_s": seconds,
            "gc_count": counts,
            "tokens": seconds,
            "samples": seconds,
            "sum_len2": seconds,
            "memory_bytes": counts,
            "keep": st.sampled_from([None, "event", "slow", "baseline"]),
            "drops": st.integers(0, 10**6),
            "self_cpu_s": seconds,
            "truncated": st.booleans(),
            "ends_captured": st.booleans(),
            "group_info": st.sampled_from([(), ("b|default_pg|0-3",)]),
        }
    )
)
def test_numbers_come_back_and_unknown_stays_unknown(known):
    """None is not 0: an absent attribute is read as unknown."""
    digest = digest_of(**known)

    assert plain(there_and_back(digest)) == plain(digest)


@given(sync_rows.filter(bool))
def test_a_folded_digest_comes_back(rows):
    """Sums over (group, operation, phase), unknown durations left out of them."""
    digest = digest_of(sync=fold_sync(sync_of(rows)))

    assert plain(there_and_back(digest)) == plain(digest)


def test_folding_sums_what_is_known_and_keeps_first_and_last_arrival():
    """Three all_reduce in backward, one of them of unknown duration, and one that nobody timed."""
    reduce, barrier = OPS.index("all_reduce"), OPS.index("barrier")
    backward = PHASES.index("backward")
    rows = [
        (0, reduce, 100, -1, backward, 5_000, 40),
        (0, reduce, 300, -1, backward, 4_000, -1),
        (0, reduce, 200, -1, backward, 9_000, 30),
        (1, barrier, 0, -1, -1, 10_000, -1),
    ]

    folded = fold_sync(sync_of(rows))

    assert folded.op.tolist() == [reduce, barrier]
    assert folded.count.tolist() == [3, 1]
    assert folded.payload_bytes.tolist() == [600, 0]
    assert folded.arrival_us.tolist() == [4_000, 10_000]
    assert folded.last_arrival_us.tolist() == [9_000, 10_000]
    assert folded.duration_us.tolist() == [70, -1]
    assert folded.min_duration_us.tolist() == [30, -1]


def many_collectives(count, distance_us=100):
    """As a tensor- and pipeline-parallel rank issues them: three groups, four operations."""
    place = np.arange(count)
    return sync_of(
        list(
            zip(
                place % 3,
                4 + place % 4,
                1 << (10 + place % 12),
                np.full(count, -1),
                2 + place % 2,
                place * distance_us,
                50 + place % 977,
                strict=True,
            )
        ),
        group_keys=(2**64 - 1, 2**63, 12345),
        start_counts=(10**6, 10**7, 10**5),
    )


@pytest.mark.parametrize("count", [0, 1, 240, 1_300, 10_000])
def test_no_step_outgrows_the_limits_of_the_stores(count):
    """Tempo cuts at 2,048 bytes; above 2 KB of collectives the digest holds sums."""
    sync = many_collectives(count)

    [attributes] = encode_digests([digest_of(sync=sync)])

    texts = [value for value in attributes.values() if isinstance(value, str)]
    packed = [text for name, text in attributes.items() if name.startswith("argus.digest.sync")]
    assert max(map(len, texts)) <= MAX_ATTRIBUTE_CHARACTERS
    assert sum(map(len, packed)) <= MAX_SYNC_BYTES * 4 // 3 + 4
    back = decode_digest(attributes, START_NS, START_NS + STEP_NS)
    assert back.sync.folded == (count > 1_000)
    total = back.sync.count.sum() if back.sync.folded else back.sync.group.size
    assert total == count


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_steps_encoded_together_are_the_same_as_one_at_a_time(sizes):
    """What is kept from one to the next saves time and changes nothing."""
    digests = [digest_of(sync=many_collectives(size)) for size in sizes]

    together = encode_digests(digests)

    assert together == [encode_digests([digest])[0] for digest in digests]


def test_a_vector_that_can_never_fit_is_not_built(monkeypatch):
    """Ten thousand rows would be a list of tens of thousands of numbers, to be thrown away."""
    built = []
    pack_sync = digest_module._pack_sync

    def count(sync):
        built.append(len(sync.group))
        return pack_sync(sync)

    monkeypatch.setattr(digest_module, "_pack_sync", count)
    encode_digests([digest_of(sync=many_collectives(10_000)), digest_of()])

    assert max(built) < 100
    assert len(built) == 2


def test_shapes_of_past_steps_are_not_hoarded():
    """A loop whose steps all differ would fill memory that is the user's."""
    for size in range(100):
        encode_digests([digest_of(sync=many_collectives(size))])

    assert digest_module._signatures.cache_info().currsize <= 16


def test_nothing_to_encode_is_nothing():
    """An idle second."""
    assert encode_digests([]) == []


def attributes_with(name, values):
    [attributes] = encode_digests([digest_of(sync=many_collectives(20))])
    return {**attributes, name: base64.b64encode(pack(values)).decode()}


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        (names.ARGUS_DIGEST_SYNC, [], "layout version none"),
        (names.ARGUS_DIGEST_SYNC, [2, 0, 0, 0, 0, 0], "layout version 2"),
        (names.ARGUS_DIGEST_SYNC, [1, 2, 0, 0, 0, 0], "kind 2"),
        (names.ARGUS_DIGEST_SYNC, [1, 0, 5], "cut short"),
        (names.ARGUS_DIGEST_SYNC, [1, 0, 2**63], "cut short"),
        (names.ARGUS_DIGEST_SYNC, [1, 0, 0, 0, 0, 0, 9], "goes on after its end"),
        (names.ARGUS_DIGEST_SYNC, [1, 0, 0, 0, 0, 1, 0, 0, 1], "names a signature"),
        (names.ARGUS_DIGEST_SYNC, [1, 0, 0, 0, 0, 1, 2**64 - 1, 0, 1], "names a signature"),
        (names.ARGUS_DIGEST_SYNC, [1, 0, 0, 0, 1, 0, 4, 8, 0, 0, 0], "names a group"),
        (names.ARGUS_DIGEST_SYNC, [1, 0, 0, 1, 3, 0, 1, 5, 0, 0], "names a group"),
        (names.ARGUS_DIGEST_PHASES, [1, 3, 0], "kind 3"),
        (names.ARGUS_DIGEST_PHASES, [1, 0, 1, len(PHASES), 0, 1], "names a phase"),
        (names.ARGUS_DIGEST_PHASES, [1, 0, 1, 2**64 - 1, 0, 1], "names a phase"),
    ],
)
def test_a_damaged_digest_says_what_is_wrong_with_it(name, values, reason):
    """And nothing of it is used."""
    with pytest.raises(ValueError, match=reason):
        decode_digest(attributes_with(name, values), START_NS, START_NS + STEP_NS)


@pytest.mark.parametrize(
    "change",
    [
        {names.ARGUS_DIGEST_SYNC: "not base64!"},
        {names.ARGUS_DIGEST_SYNC: "gA=="},
        {names.ARGUS_DIGEST_SYNC: "ä"},
        {names.ARGUS_DIGEST_SYNC: 5},
        {names.DL_RANK: "three"},
        {names.DL_RANK: ("3",)},
        {names.ARGUS_STEP_ORDINAL: float("inf")},
        {names.ARGUS_STEP_BUSY: ("0.1",)},
        {names.ARGUS_GROUPS: 1},
        {names.ARGUS_STEP_ORDINAL: None},
        {names.ARGUS_DIGEST_PHASES: None},
    ],
)
def test_an_attribute_of_the_wrong_kind_is_a_value_error(change):
    """One exception to catch, whatever a store returns."""
    [attributes] = encode_digests([digest_of(sync=many_collectives(20))])

    with pytest.raises(ValueError, match=r"\S"):
        decode_digest({**attributes, **change}, START_NS, START_NS + STEP_NS)


@given(st.data())
def test_a_flipped_byte_is_read_as_something_or_refused(data):
    """Never another exception than ValueError."""
    [attributes] = encode_digests([digest_of(sync=many_collectives(30))])
    name = data.draw(st.sampled_from([names.ARGUS_DIGEST_SYNC, names.ARGUS_DIGEST_PHASES]))
    text = attributes[name]
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from("Aa0/+=\0é")) + text[at + 1 :]

    try:
        decode_digest({**attributes, name: damaged}, START_NS, START_NS + STEP_NS)
    except ValueError as error:
        assert str(error)


def test_a_lost_part_of_a_long_vector_is_noticed():
    """A store that dropped an attribute must not shorten a step."""
    [attributes] = encode_digests([digest_of(sync=many_collectives(380))])
    last = max(name for name in attributes if name.startswith("argus.digest.sync."))
    del attributes[last]

    with pytest.raises(ValueError, match=r"cut short|inside a number|damaged"):
        decode_digest(attributes, START_NS, START_NS + STEP_NS)


def test_what_a_newer_writer_added_to_the_lists_is_unknown_not_an_error():
    """Operation 99 is "other", phase 98 is unknown: both lists only grow."""
    newer = [1, 0, 1, 11, 7, 0, 1, 0, 99, 64, 0, 99, 1, 0, 10, 0]

    back = decode_digest(attributes_with(names.ARGUS_DIGEST_SYNC, newer), START_NS, START_NS)

    assert back.sync.op.tolist() == [OPS.index("other")]
    assert back.sync.phase.tolist() == [-1]
    assert back.sync.arrival_us.tolist() == [5]
    assert back.sync.duration_us.tolist() == [-1]


def test_numbers_that_a_store_returns_as_text_are_read():
    """OTLP's JSON writes 64-bit integers as strings."""
    [attributes] = encode_digests([digest_of(iteration=12_000)])
    as_text = {
        name: str(value) if isinstance(value, int) else value for name, value in attributes.items()
    }

    back = decode_digest(as_text, START_NS, START_NS + STEP_NS)

    assert (back.ordinal, back.rank, back.iteration) == (128, 3, 12_000)


def test_step_duration_is_in_seconds():
    """From nanoseconds."""
    assert digest_of().step_s == pytest.approx(0.061)


def test_a_number_that_cannot_be_packed_is_cut():
    """It must not cost the steps it is encoded with."""
    sync = sync_of([(0, 1, 8, -1, -1, 5, 5)], channels=[(0, -1, 3, -7)])

    (attributes,) = encode_digests([digest_of(sync=sync)])

    assert decode_digest(attributes, START_NS, START_NS).sync.channels.tolist() == [[0, 0, 3, 0]]
