"""Medians with gaps, and what luck alone makes of n ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from argus_otel.detect.statistics import (
    lasting,
    lower_middle,
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    median_over,
    pooled_spread,
    spread_between,
    spread_of_faster_half,
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


@pytest.mark.parametrize("length", [1, 2, 3, 7, 10, 11])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_short_axes_of_large_arrays_are_sorted_as_any_other(length, axis):
    """They are sorted for all neighbours at once, and large arrays in parts: both with gaps."""
    random = np.random.default_rng(length)
    data = np.moveaxis(random.normal(size=(length, 300, 130)), 0, axis)
    data[random.random(data.shape) < 0.3] = np.nan
    known = np.count_nonzero(~np.isnan(data), axis=axis, keepdims=True)
    lower = np.take_along_axis(np.sort(data, axis=axis), np.maximum(known - 1, 0) // 2, axis=axis)

    np.testing.assert_allclose(median_over(data, axis), np.nanmedian(data, axis=axis))
    np.testing.assert_array_equal(lower_middle(data, axis), lower.squeeze(axis))
    series = np.moveaxis(data, axis, -1)[5, 5]
    fastest = np.sort(series)[: max((np.count_nonzero(~np.isnan(series)) + 3) // 4, 1)]
    np.testing.assert_allclose(lowest_mean(data, axis=axis)[5, 5], fastest.mean())


def test_lasting_follows_each_series_for_itself():
    """Series that are over in two steps or fewer are passed over; their neighbours are not."""
    over = np.zeros((60, 4), dtype=bool)
    over[30:, 1], over[::25, 2] = True, True

    shown = lasting(over, np.ones_like(over))

    assert shown[:, 1].sum() == 30
    assert not shown[:, [0, 2, 3]].any()


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


def some_levels(groups, n, slow, size, seed=0, spread=0.01):
    """Levels [groups, n] of ranks that differ by ``spread``, the first ``slow`` of group 0 by more."""
    level = np.random.default_rng(seed).normal(0, spread, (groups, n))
    level[0, :slow] += size
    return level


@pytest.mark.parametrize(("groups", "n", "slow"), [(1, 64, 32), (1, 16, 8), (4, 8, 4), (1, 512, 1)])
def test_slow_ranks_do_not_widen_what_healthy_ones_differ_by(groups, n, slow):
    """Not even where they are half of the peers, and far enough off to be told from chance."""
    noise = np.full(groups, 0.002)
    found = [
        spread_between(some_levels(groups, n, slow, 0.15, seed), noise)[0] for seed in range(50)
    ]

    assert 0.008 < np.median(found) < 0.016
    # Of few ranks it is not always sure which are healthy.
    assert np.mean(np.array(found) < 0.02) >= 0.9


@pytest.mark.parametrize(("groups", "n"), [(1, 4), (1, 8), (4, 8), (1, 16), (1, 64), (2, 512)])
def test_where_no_gap_parts_ranks_their_spread_is_that_of_the_faster_half(groups, n):
    """Chance makes no such gap."""
    noise = np.full(groups, 0.002)
    for seed in range(200):
        level = some_levels(groups, n, 0, 0.0, seed)
        usual = np.fmax(noise, spread_of_faster_half(level))
        usual = np.fmax(usual, pooled_spread(level))
        np.testing.assert_array_equal(spread_between(level, noise), usual)


def test_four_ranks_alone_say_too_little_of_what_healthy_ones_differ_by():
    """With three more groups of eight they say enough."""
    wide, narrow = [], []
    for seed in range(50):
        alone = some_levels(1, 8, 4, 0.15, seed)
        beside = np.vstack([alone, some_levels(3, 8, 0, 0.0, seed + 100)])
        wide += [spread_between(alone, np.full(1, 0.002))[0]]
        narrow += [spread_between(beside, np.full(4, 0.002))[0]]
        assert wide[-1] == max(spread_of_faster_half(alone)[0], 0.002)

    assert np.median(narrow) < 0.85 * np.median(wide)
    assert np.max(narrow) < np.max(wide)


def test_ranks_without_data_do_not_change_the_spread():
    level = some_levels(1, 64, 30, 0.15)
    gone = np.concatenate([level, np.full((1, 4), np.nan)], axis=1)
    noise = np.full(1, 0.002)

    with_gone, without = spread_between(gone, noise)[0], spread_between(level, noise)[0]

    assert with_gone == pytest.approx(without, rel=0.01)


def test_a_spread_that_is_measured_on_few_ranks_has_its_own_error_on_top():
    """One standard error: healthy ranks that are a little further apart are healthy, too."""
    healthy = np.linspace(-0.01, 0.01, 16)
    level = np.concatenate([healthy, healthy + 0.2])[None]

    (found,) = spread_between(level, np.array([0.001]))

    assert found == pytest.approx(np.std(healthy, ddof=1) * (1 + 1 / np.sqrt(2 * 15)))
    assert spread_between(level, np.array([0.05]))[0] >= 0.05


def test_who_is_asked_about_does_not_change_what_is_said_of_a_group():
    """The others have their say all the same."""
    level = some_levels(5, 8, 4, 0.15, seed=7)
    noise = np.linspace(0.001, 0.009, 5)
    together = spread_between(level, noise)

    for group in range(5):
        alone = np.where(np.arange(5) == group, noise, np.nan)
        assert spread_between(level, alone)[group] == together[group]
