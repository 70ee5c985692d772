"""A rise to a new level is told from chance, from spikes and from drift, with few steps or many."""

import numpy as np

from argus_otel.detect.shifts import level_shift


def _noise(series, *, steps=60, sigma=0.03, memory=0.0, seed=1):
    random = np.random.default_rng(seed)
    noise = random.normal(0, sigma, (steps, series))
    for step in range(1, steps):
        noise[step] += memory * noise[step - 1]
    return noise


def test_of_five_thousand_restless_series_none_is_said_to_have_risen():
    shift = level_shift(_noise(5000))

    assert not (shift.z_G >= shift.beyond_chance()).any()


def test_noise_that_hangs_together_is_not_taken_for_a_level():
    shift = level_shift(_noise(2000, memory=0.6))

    assert np.mean(shift.z_G >= shift.beyond_chance()) < 0.005


def test_a_tenth_is_found_after_twenty_steps_and_its_start_is_known():
    log = _noise(300)
    log[40:] += np.log(1.1)
    shift = level_shift(log)

    assert np.mean(shift.z_G >= shift.beyond_chance()) > 0.97
    assert np.median(np.abs(shift.start_G - 40)) <= 1
    assert abs(float(np.median(shift.size_G)) - np.log(1.1)) < 0.01


def test_half_as_long_again_is_found_after_three_steps():
    log = _noise(300)[:43]
    log[40:] += np.log(1.5)
    shift = level_shift(log)

    assert np.mean(shift.z_G >= shift.beyond_chance()) > 0.95


def test_two_long_steps_at_the_end_are_no_level():
    log = _noise(100)
    log[-2:] += 1.0
    shift = level_shift(log)

    assert not (shift.z_G >= shift.beyond_chance()).any()


def test_what_is_over_again_is_not_the_latest_level():
    log = _noise(100)
    log[20:40] += 0.5
    shift = level_shift(log)

    assert not (shift.z_G >= shift.beyond_chance()).any()


def test_series_of_which_too_little_is_known_have_no_size():
    log = _noise(3)
    log[:, 0] = np.nan
    log[5:, 1] = np.nan
    shift = level_shift(log)

    assert np.isnan(shift.size_G).tolist() == [True, True, False]
    assert shift.z_G[:2].tolist() == [0.0, 0.0]


def test_no_steps_and_no_series_are_no_error():
    assert level_shift(np.empty((0, 3))).z_G.tolist() == [0.0, 0.0, 0.0]
    assert level_shift(np.empty((60, 0))).z_G.size == 0
