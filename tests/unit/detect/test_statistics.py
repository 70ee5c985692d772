"""Medians with gaps, and what luck alone makes of n ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from argus_otel.detect.statistics import (
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    median_over,
    start_of_lasting_change,
)

values = arrays(
    float,
    st.tuples(st.integers(1, 6), st.integers(1, 9)),
    elements=st.floats(-1e6, 1e6) | st.just(np.nan),
)


@given(values, st.sampled_from([0, 1]))
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_medians_agree_with_numpy(data, axis):
    """Missing values are skipped, as numpy's slower function does."""
    np.testing.assert_allclose(median_over(data, axis), np.nanmedian(data, axis=axis))


def test_the_fastest_quarter_is_at_least_one_rank():
    """One of two and of four, two of eight, and missing ones do not count."""
    assert lowest_mean(np.array([3.0, 5.0]), axis=0) == 3.0
    assert lowest_mean(np.arange(8.0), axis=0) == 0.5
    assert lowest_mean(np.array([np.nan, 4.0, 6.0, np.nan]), axis=0) == 4.0
    assert np.isnan(lowest_mean(np.array([np.nan]), axis=0))


def test_luck_grows_with_the_number_of_ranks():
    """The slowest of many is slower by chance; and so is the fastest quarter faster."""
    slowest = [luck_of_slowest(n) for n in (2, 8, 128, 12_960)]
    fastest = [luck_of_fastest_quarter(n) for n in (2, 4, 128)]

    assert slowest == sorted(slowest)
    assert 4.8 < slowest[0] < slowest[-1] < 6.5
    assert fastest == sorted(fastest)


@pytest.mark.parametrize(
    ("over", "start"),
    [("00011111", 3), ("00100111", 5), ("11111111", 0), ("0101111011", 1), ("", 0)],
)
def test_the_onset_is_where_slow_steps_begin_to_prevail(over, start):
    """One odd step before it does not move it, one good step after it does not either."""
    assert start_of_lasting_change(np.array([c == "1" for c in over], dtype=bool)) == start
