"""Kernel durations go with the digest: the largest by themselves, the rest as one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.semconv import names
from argus_otel.testing.otlp import example_digest
from argus_otel.wire.codes import PHASES
from argus_otel.wire.digest import decode_digest, encode_digest
from argus_otel.wire.kernels import (
    MAX_CHARACTERS,
    MAX_KEYS,
    MAX_NAME,
    REST,
    fold_kernels,
    pack_kernels,
    read_kernels,
)
from argus_otel.wire.sketch import (
    Rows,
    decode_sketch,
    merge_sketches,
    pack_rows,
    read_rows,
    sketch_durations,
    sketch_of_rows,
)
from argus_otel.wire.varints import decode_uvarints, encode_uvarints, pack

FORWARD = PHASES.index("forward")


def step_of_kernels(kernels, launches=100, spread=0.01, seed=0):
    """A step in which kernel k takes about (k + 1) * 10 µs."""
    random = np.random.default_rng(seed)
    name = np.repeat(np.arange(kernels), launches)
    duration_ns = 10_000 * (name + 1) * np.exp(random.normal(0, spread, name.size))
    return sketch_durations(
        duration_ns.astype(np.int64),
        name,
        np.full(name.size, 7),
        np.full(name.size, FORWARD),
        names=[f"kernel_{k}" for k in range(kernels)],
    )


def same(a, b):
    columns = ("name", "stream", "phase", "row", "bucket", "count", "place_sum")
    return a.labels() == b.labels() and all(
        getattr(a, column).tolist() == getattr(b, column).tolist() for column in columns
    )


def test_the_largest_kernels_are_kept_and_the_rest_is_one():
    """Nothing is lost but which of the small ones it was."""
    step = step_of_kernels(20)

    folded = fold_kernels(step)

    assert folded.labels() == [
        *((f"kernel_{k}", 7, "forward") for k in range(20 - MAX_KEYS, 20)),
        (REST, 0, None),
    ]
    assert folded.counts.tolist() == [100] * MAX_KEYS + [100 * (20 - MAX_KEYS)]
    assert folded.totals_ns.sum() == pytest.approx(step.totals_ns.sum())
    assert same(fold_kernels(folded), folded)


def test_kernels_come_back_from_a_digest():
    """As they went in, with the phases that the digest has."""
    step = step_of_kernels(5)
    digest = example_digest(3, 1, kernels=step)

    attributes = encode_digest(digest)
    back = decode_digest(attributes, digest.start_ns, digest.end_ns)

    assert back.kernels is not None
    assert same(back.kernels, step)
    assert attributes[names.ARGUS_KERNEL_NAMES] == list(step.names)


def test_kernels_can_be_left_where_they_are():
    """Who reads thousands of steps wants those of none."""
    digest = example_digest(3, 1, kernels=step_of_kernels(2))
    attributes = {**encode_digest(digest), names.ARGUS_DIGEST_KERNELS: "damaged"}

    assert decode_digest(attributes, 0, 1, with_kernels=False).kernels is None


def test_tokens_of_experts_come_back_from_a_digest():
    """As a list of whole numbers, which people can read in Jaeger."""
    digest = example_digest(3, 1, expert_tokens=(2048, 0, 1985))

    attributes = encode_digest(digest)

    assert list(attributes[names.ARGUS_WORK_EXPERT_TOKENS]) == [2048, 0, 1985]
    assert decode_digest(attributes, 0, 1).expert_tokens == (2048, 0, 1985)
    for damaged in (3, "many", "123", [None]):
        with pytest.raises(ValueError, match=r"expert_tokens is not a list of whole numbers"):
            decode_digest({**attributes, names.ARGUS_WORK_EXPERT_TOKENS: damaged}, 0, 1)


def test_a_digest_without_kernels_has_no_attribute_of_them():
    """A job without a GPU sends what it always sent; older digests are read as before."""
    digest = example_digest(3, 1)

    attributes = encode_digest(digest)

    assert not [name for name in attributes if "kernel" in name or "expert" in name]
    assert decode_digest(attributes, digest.start_ns, digest.end_ns).kernels is None


def test_a_real_step_fits_and_no_attribute_is_cut():
    """3,000 kernels of 60 names: the limit is for the packed sketch and its names together."""
    step = step_of_kernels(60, launches=50, spread=0.3)

    attributes = pack_kernels(step, PHASES)

    texts = [value for value in attributes.values() if isinstance(value, str)]
    dictionary = attributes[names.ARGUS_KERNEL_NAMES]
    assert max(map(len, texts)) <= 2000
    assert sum(map(len, texts)) + sum(map(len, dictionary)) <= MAX_CHARACTERS
    assert len(dictionary) == MAX_KEYS + 1
    assert read_kernels(attributes, dictionary, PHASES).counts.sum() == 3000


def test_what_is_too_long_keeps_fewer_kernels():
    """Durations over many sizes take more bytes; all are still counted."""
    step = step_of_kernels(20, launches=400, spread=1.5)

    attributes = pack_kernels(step, PHASES)

    dictionary = attributes[names.ARGUS_KERNEL_NAMES]
    sizes = [len(value) for value in attributes.values() if isinstance(value, str)]
    assert 2 < len(dictionary) <= MAX_KEYS
    assert sum(sizes) + sum(map(len, dictionary)) <= MAX_CHARACTERS
    assert read_kernels(attributes, dictionary, PHASES).counts.sum() == 8000


def test_a_step_without_kernels_packs_to_nothing():
    """An empty sketch is not worth an attribute."""
    assert pack_kernels(sketch_durations([], [], [], [], names=[]), PHASES) == {}


def test_names_that_are_equal_when_shortened_are_one_kernel():
    """Demangled names of templates differ at their end, if at all."""
    long = "x" * MAX_NAME
    step = sketch_durations(
        [5000, 6000], [0, 1], [0, 0], [-1, -1], names=[long + "<float>", long + "<half>"]
    )

    folded = fold_kernels(step)

    assert folded.labels() == [(long, 0, None)]
    assert folded.counts.tolist() == [2]


def test_phases_that_the_digest_does_not_name_become_unknown():
    """A code on the wire means what the digest's own dictionary says."""
    step = sketch_durations([5000], [0], [0], [1], names=["gemm"], phases=["forward", "rollout"])

    attributes = pack_kernels(step, PHASES)

    assert read_kernels(attributes, ["gemm"], PHASES).labels() == [("gemm", 0, None)]


@pytest.mark.parametrize("text", ["not base64!", "", "AQ==", "Ag==", "ARQBBQAAAQ=="])
def test_a_damaged_value_says_which_attribute_it_is(text):
    """The store counts it, and goes on."""
    attributes = encode_digest(example_digest(0, 0, kernels=step_of_kernels(2)))

    with pytest.raises(ValueError, match="argus.digest.kernels is damaged"):
        decode_digest({**attributes, names.ARGUS_DIGEST_KERNELS: text}, 0, 1)


# -- rows of a table -----------------------------------------------------------------------------

numbers = st.one_of(st.integers(0, 200), st.integers(0, 2**62 - 1))


@given(st.lists(numbers))
def test_packing_an_array_gives_the_bytes_of_packing_one_by_one(values):
    """Two writers of one layout."""
    data, ends = encode_uvarints(np.array(values, dtype=np.int64))

    assert data.tobytes() == pack(values)
    assert decode_uvarints(data.tobytes()).tolist() == values
    assert ends.tolist() == np.cumsum([len(pack([value])) for value in values]).tolist()


rows_of_durations = st.lists(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=30), min_size=1, max_size=8
)


def packed(rows):
    """Each list of durations as a row, packed; and their sketches."""
    sketches = [
        sketch_durations(row, *np.zeros((2, len(row)), int), np.full(len(row), -1), names=["k"])
        for row in rows
    ]
    data, offsets = pack_rows(
        Rows(
            filled=np.array([sketch.row.size for sketch in sketches]),
            bucket=np.concatenate([sketch.bucket for sketch in sketches]),
            count=np.concatenate([sketch.count for sketch in sketches]),
            place_sum=np.concatenate([sketch.place_sum for sketch in sketches]),
        )
    )
    return data.tobytes(), offsets, sketches


@given(rows_of_durations)
def test_a_row_of_a_table_is_a_sketch_by_itself(durations):
    """So that whoever reads the table needs no other layout."""
    data, offsets, sketches = packed(durations)

    for row, sketch in enumerate(sketches):
        one = decode_sketch(data[offsets[row] : offsets[row + 1]], ["k"])
        assert same(one, sketch)


@given(rows_of_durations)
def test_rows_read_at_once_add_up_to_their_merged_sketch(durations):
    """Over ranks and steps, exactly."""
    data, offsets, sketches = packed(durations)
    nothing = np.zeros(len(durations), dtype=int)

    read = sketch_of_rows(read_rows(data, offsets), nothing, nothing, nothing - 1, names=["k"])

    assert same(read, merge_sketches(sketches))


def test_no_rows_are_no_rows():
    """A window without kernels."""
    assert read_rows(b"", np.zeros(1, dtype=np.int64)).filled.size == 0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1, 20, 1, 0, 0], "cut short"),
        ([2, 20, 1, 0, 0, 0, 1, 5, 0], "layout version"),
        ([1, 20, 2, 0, 0, 0, 1, 5, 0], "layout version"),
        ([1, 20, 1, 0, 0, 0, 0], "without buckets"),
        ([1, 20, 1, 0, 0, 0, 3, 5, 0], "cut short"),
        ([1, 20, 1, 0, 0, 0, 1, 7, 0], "counts"),
        ([1, 20, 1, 0, 0, 0, 1, 8 * 4000, 0], "bucket that is not there"),
        ([1, 20, 1, 0, 0, 0, 1, 8, 99], "outside of their bucket"),
        ([1, 0, 1, 0, 0, 0, 1, 8, 0], "error is"),
    ],
)
def test_a_damaged_row_is_refused(numbers, message):
    """A file may come from anywhere."""
    data = pack(numbers)

    with pytest.raises(ValueError, match=message):
        read_rows(data, np.array([0, len(data)]))


def test_rows_without_bytes_are_refused():
    """A column of empty values."""
    with pytest.raises(ValueError, match="cut short"):
        read_rows(b"", np.zeros(3, dtype=np.int64))


def test_rows_of_two_errors_are_refused():
    """Their buckets do not match."""
    rows = [pack([1, error, 1, 0, 0, 0, 1, 8, 0]) for error in (20, 50)]

    with pytest.raises(ValueError, match="different errors"):
        read_rows(b"".join(rows), np.array([0, len(rows[0]), len(rows[0]) + len(rows[1])]))
