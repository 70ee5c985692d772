"""What detectors of whole runs take from the API: devices and events by step and rank."""

import numpy as np
import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.api import (
    Event,
    device_texts,
    device_values,
    event_seconds,
    join_by_onset,
    join_numbers,
    ratio_to_peers,
    settled_steps,
    usual_step_s,
)
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.detect.run import run_of
from argus_otel.testing.cases import build_run


def run(**more):
    """Four ranks, 20 steps."""
    case = {"ranks": 4, "steps": 20, "topology": {"dp": [0, 1, 2, 3]}, **more}
    return run_of(build_run(case))


def event(ordinal, rank, seconds, kind="checkpoint"):
    """Something that took a while."""
    return Event(
        ordinal=ordinal, rank=rank, kind=kind, name="save", start_s=0.0, duration_s=seconds,
        detail=None,
    )  # fmt: skip


def test_what_a_device_did_not_say_is_unknown_and_not_zero():
    """It reports in every fifth step."""
    seen = run(devices=[{"rank": [1, 2], "steps": [0, 20], "every": 5, "clock_ratio": 0.9}])

    clock = device_values(seen, "clock_ratio")

    assert clock.shape == (20, 4)
    assert np.count_nonzero(~np.isnan(clock)) == 8
    assert clock[5, 1] == pytest.approx(0.9)


def test_readings_of_unknown_steps_and_ranks_are_passed_over():
    """A device may speak of a step whose row was lost."""
    seen = run(
        devices=[
            {"rank": 9, "ordinal": 3, "throttle_reasons": "thermal"},
            {"rank": 1, "ordinal": 99, "throttle_reasons": "thermal"},
            {"rank": 1, "ordinal": 3, "throttle_reasons": "power"},
            {"rank": 2, "ordinal": 3, "throttle_reasons": ""},
        ]
    )

    assert device_texts(seen, "throttle_reasons") == [(3, 1, "power")]


def test_events_of_one_step_and_rank_add_up():
    """Two saves in a step, and one whose step is not known."""
    took = event_seconds(run(), [event(4, 2, 0.5), event(4, 2, 0.25), event(77, 2, 9.0)])

    assert took[4, 2] == pytest.approx(0.75)
    assert took.sum() == pytest.approx(0.75)


def test_ranks_that_fall_ill_together_are_joined():
    """Within five steps of the first of them."""
    assert join_by_onset({7: 30, 2: 33, 5: 50, 1: 36}) == [[7, 2], [1], [5]]


def test_numbers_are_named_in_runs():
    """For a reader at night."""
    assert join_numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_a_ratio_is_to_the_fastest_quarter_of_peers():
    """One of four, here."""
    values = np.tile([1.0, 2.0, 2.0, 4.0], (20, 1))

    assert ratio_to_peers(run(), values)[0].tolist() == [1.0, 2.0, 2.0, 4.0]


def test_steps_that_compile_are_not_settled():
    """Nor are the first ten."""
    seen = run(
        events=[{"kind": "compilation", "name": "f", "rank": 0, "ordinal": 12, "start_s": 0, "duration_s": 1}]
    )  # fmt: skip

    assert np.flatnonzero(settled_steps(seen)).tolist() == [10, 11, *range(13, 20)]
    assert usual_step_s(seen) == pytest.approx(0.06, rel=0.2)


def test_a_short_quiet_run_is_not_called_well():
    """Fewer than twenty settled steps: silence is no verdict."""
    detectors = load_detectors(bundled_path("detectors") / "jit_compile")
    tables = [build_run({"ranks": 4, "steps": steps}) for steps in (25, 60)]

    assert [diagnose(t, detectors).all_abstained for t in tables] == [True, False]
