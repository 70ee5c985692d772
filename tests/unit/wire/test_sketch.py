"""Sketches of durations: what is read from one is near what went in, and merging is exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argus_otel.wire.sketch import (
    ERROR_PER_MILLE,
    MOST_NS,
    decode_sketch,
    distances,
    distances_ns,
    encode_sketch,
    merge_sketches,
    sketch_durations,
)
from argus_otel.wire.varints import pack

NAMES = ("gemm", "relu", "all_reduce")
ERROR = ERROR_PER_MILLE / 1000

durations = st.one_of(
    st.integers(0, MOST_NS), st.integers(0, 60), st.integers(1_000, 100_000), st.just(0)
)
samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(-1, 3), durations), max_size=60
)
one_row = st.lists(durations, min_size=1, max_size=80)


def sketch_of(rows, names=NAMES, **options):
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    name, stream, phase, duration_ns = columns.T
    return sketch_durations(duration_ns, name, stream, phase, names=names, **options)


def sketch_row(duration_ns, **options):
    return sketch_of([(0, 0, -1, int(duration)) for duration in duration_ns], **options)


def content(sketch):
    """All that a sketch says, whatever its dictionaries."""
    rows = {key: {} for key in sketch.labels()}
    assert len(rows) == sketch.name.size
    keys = sketch.labels()
    for row, bucket, *rest in zip(
        sketch.row.tolist(),
        sketch.bucket.tolist(),
        sketch.count.tolist(),
        sketch.place_sum.tolist(),
        strict=True,
    ):
        rows[keys[row]][bucket] = rest
    return rows


def wasserstein(a, b):
    """Of raw samples, exactly: scipy's, where it is installed."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is in the bench group")
    return stats.wasserstein_distance(a, b)


@given(one_row, st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_a_quantile_is_within_the_error_of_a_duration_that_went_in(values, q):
    """Of the very duration that the quantile is, from nothing to an hour."""
    ordered = np.sort(values)
    place = np.clip(np.ceil(np.array(q) * ordered.size), 1, ordered.size).astype(int) - 1
    exact = ordered[place]

    read = sketch_row(values).quantiles_ns(q)[0]

    assert (np.abs(read - exact) <= ERROR * exact * (1 + 1e-12)).all()


@given(samples)
def test_counts_are_exact_and_sums_nearly(rows):
    """A sum is off by a fourteenth of what a quantile is."""
    sketch = sketch_of(rows)
    keys = list(zip(sketch.name.tolist(), sketch.stream.tolist(), sketch.phase.tolist()))

    assert keys == sorted({row[:3] for row in rows})
    for key, count, total in zip(keys, sketch.counts.tolist(), sketch.totals_ns.tolist()):
        of_key = [row[3] for row in rows if row[:3] == key]
        assert count == len(of_key)
        assert total == pytest.approx(sum(of_key), rel=ERROR / 14, abs=1e-9)


@given(st.lists(samples, min_size=1, max_size=5), st.randoms())
def test_merging_is_sketching_the_union_in_any_order_and_grouping(parts, random):
    """Byte for byte."""
    union = encode_sketch(sketch_of([row for part in parts for row in part]))
    sketches = [sketch_of(part) for part in parts]
    random.shuffle(sketches)
    cut = random.randint(0, len(sketches) - 1)
    left, right = sketches[:cut], sketches[cut:]

    nested = merge_sketches([*([merge_sketches(left)] if left else []), merge_sketches(right)])

    assert encode_sketch(merge_sketches(sketches)) == union
    assert encode_sketch(nested) == union


@given(samples, samples)
def test_rows_are_merged_by_name_whatever_the_dictionaries(first, second):
    """Two ranks need not have met their kernels in the same order."""
    turned = [(2 - name, *rest) for name, *rest in second]
    a = sketch_of(first)
    b = sketch_of(turned, NAMES[::-1])

    merged = content(merge_sketches([a, b]))

    assert merged == content(sketch_of(first + second))
    assert encode_sketch(merge_sketches([a, b])) == encode_sketch(merge_sketches([b, a]))


@given(samples, st.sampled_from((1, 10, 20, 200)))
def test_what_is_packed_comes_back(rows, error_per_mille):
    """Of every error, with a dictionary that has grown since."""
    sketch = sketch_of(rows, error_per_mille=error_per_mille)

    read = decode_sketch(encode_sketch(sketch), (*NAMES, "later"))

    assert read.error_per_mille == error_per_mille
    assert content(read) == content(sketch)


@given(one_row, one_row)
def test_a_distance_is_within_its_bound(a, b):
    """Whatever the durations."""
    mine, theirs = sketch_row(a), sketch_row(b)
    read = distances_ns(mine, theirs)[0]

    bound = 15 / 14 * ERROR * (np.mean(a) + np.mean(b)) * (1 + 1e-9) + 1e-6
    assert abs(read - wasserstein(a, b)) <= bound


@settings(deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 300),
    st.floats(0, 0.5),
    st.floats(1, 4),
    st.floats(0.5, 2),
)
def test_a_distance_of_kernels_is_within_two_percent_of_the_median(seed, n, sigma, apart, slower):
    """Log-normal durations with one mode or two, one rank slower or faster."""
    random = np.random.default_rng(seed)

    def draw(factor):
        modes = np.where(random.random(n) < 0.5, 1.0, apart)
        return np.rint(20_000 * factor * modes * np.exp(sigma * random.standard_normal(n)))

    a, b = draw(slower), draw(1.0)
    exact = wasserstein(a, b) / np.median(b)

    read = distances_ns(sketch_row(a), sketch_row(b))[0] / np.median(b)

    assert abs(read - exact) <= 0.02


@given(one_row)
def test_a_row_is_at_no_distance_from_itself(values):
    """Also where it is merged with itself."""
    sketch = sketch_row(values)

    assert distances(sketch, sketch)[0] == 0
    assert distances(sketch, merge_sketches([sketch, sketch]))[0] < 1e-9


def test_a_rank_that_takes_longer_is_that_share_away():
    """1.3 times as long is 0.3, however the kernel varies."""
    healthy = np.full(40, 10_000)

    assert distances(sketch_row(healthy * 1.3), sketch_row(healthy))[0] == pytest.approx(
        0.3, rel=ERROR
    )


def test_a_row_that_peers_lack_has_no_distance():
    """Not an infinite one."""
    mine = sketch_of([(0, 0, 2, 10), (1, 0, 2, 10)])
    theirs = sketch_of([(1, 0, 2, 10)])

    assert np.isnan(distances(mine, theirs)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "counts_as"), [(-5, 0), (0, 0), (1, 1), (MOST_NS + 1, MOST_NS), (2**63 - 1, MOST_NS)]
)
def test_durations_that_cannot_be_are_bounded(value, counts_as):
    """A clock that went backwards, or a kernel that never ended."""
    sketch = sketch_row([value])

    assert sketch.totals_ns[0] == pytest.approx(counts_as, rel=ERROR / 14)
    assert sketch.quantiles_ns(0.5)[0, 0] == pytest.approx(counts_as, rel=ERROR)


@given(samples.filter(bool), st.data())
def test_damaged_bytes_are_refused_or_another_sketch(rows, data):
    """Never another error, nor arrays that do not fit each other."""
    packed = bytearray(encode_sketch(sketch_of(rows)))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = decode_sketch(bytes(packed), NAMES)
    except ValueError:
        return
    assert encode_sketch(read) == encode_sketch(merge_sketches([read]))


@given(samples, st.binary(min_size=1, max_size=8), st.data())
def test_bytes_cut_short_or_added_to_are_refused(rows, more, data):
    """The columns say how long they are."""
    packed = encode_sketch(sketch_of(rows))
    cut = packed[: data.draw(st.integers(0, len(packed) - 1))]

    for damaged in (cut, packed + more):
        with pytest.raises(ValueError, match="packed"):
            decode_sketch(damaged, NAMES)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data):
    """With ``ValueError``, which is all that a reader handles."""
    try:
        decode_sketch(pack((1, ERROR_PER_MILLE)) + data, NAMES)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "values",
    [
        (),
        (2, 20, 0),  # version
        (1, 0, 0),  # error
        (1, 20, 1, 3, 0, 0, 1, 8, 0),  # no such name
        (1, 20, 1, 0, 0, 99, 1, 8, 0),  # no such phase
        (1, 20, 1, 0, 0, 0, 0),  # row without buckets
        (1, 20, 1, 0, 0, 0, 1, 8 * 5000, 0),  # no such bucket
        (1, 20, 1, 0, 0, 0, 2, 8 * 600, 8 * 600, 0, 0),  # nor a second one
        (1, 20, 1, 0, 0, 0, 1, 8, 40),  # one duration, at place 27 of 15
        (1, 20, 2, 0, 0, 0, 0, 0, 0, 1, 1, 8, 8, 0, 0),  # a row twice
        (1, 20, 1, 0, 0, 0, 1, 15, 2**40, 0),  # more than can be
        (1, 20, 2**40),
    ],
)
def test_what_cannot_be_is_refused(values):
    """One number wrong in each."""
    with pytest.raises(ValueError, match="sketch"):
        decode_sketch(pack(values), NAMES)


@pytest.mark.parametrize(
    ("row", "shape"),
    [((3, 0, 0, 1), "name"), ((0, -1, 0, 1), "stream"), ((0, 0, 99, 1), "phase")],
)
def test_codes_outside_of_their_dictionary_are_refused(row, shape):
    """Where they are written, not where they are read."""
    with pytest.raises(ValueError, match=shape):
        sketch_of([row])


def test_other_misuse_is_refused():
    """Different errors, nothing to merge, columns of different lengths, quantiles beyond 1."""
    sketch, finer = sketch_row([5]), sketch_row([5], error_per_mille=10)
    with pytest.raises(ValueError, match="error"):
        merge_sketches([sketch, finer])
    with pytest.raises(ValueError, match="error"):
        distances(sketch, finer)
    with pytest.raises(ValueError, match="none"):
        merge_sketches([])
    with pytest.raises(ValueError, match="shape"):
        sketch_durations([1, 2], [0], [0], [0], names=NAMES)
    with pytest.raises(ValueError, match="between 0 and 1"):
        sketch.quantiles_ns([1.5])


def test_a_sketch_stays_small():
    """A row of one kernel, as often as it ran, is a few bytes."""
    random = np.random.default_rng(0)
    many = np.rint(20_000 * np.exp(0.05 * random.standard_normal(1000)))

    assert len(encode_sketch(sketch_row([20_000]))) <= 12
    assert len(encode_sketch(sketch_row(many))) <= 44
