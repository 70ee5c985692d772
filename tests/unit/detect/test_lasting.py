"""What lasts is told from what comes and goes; transfers and lateness are what they say."""

import numpy as np
import pytest

from argus_otel.detect.lateness import lateness
from argus_otel.detect.run import run_of
from argus_otel.detect.statistics import lasting, median_over
from argus_otel.detect.transfers import transfers
from argus_otel.testing.cases import build_run


def steps_that_last(*spans, steps=60, known=None):
    """Indices that ``lasting`` shows, of steps over in these spans."""
    over = np.zeros(steps, dtype=bool)
    for first, before in spans:
        over[first:before] = True
    shown = lasting(over, np.ones(steps, dtype=bool) if known is None else known)
    return np.flatnonzero(shown).tolist()


def test_half_a_window_of_steps_lasts_and_keeps_its_onset():
    """Half of the steps of a window: its median is over."""
    assert steps_that_last((30, 60)) == list(range(30, 60))
    assert steps_that_last((30, 40)) == list(range(30, 40))


def test_fewer_steps_do_not_last():
    """A spell of nine steps is no fault yet."""
    assert steps_that_last((30, 39)) == []


def test_a_single_step_before_is_not_the_onset():
    """One odd step in the window that fires belongs to chance."""
    assert steps_that_last((24, 25), (30, 60))[0] == 30


def test_one_step_in_three_does_not_last():
    """A rate that chance may reach."""
    assert steps_that_last(*((first, first + 1) for first in range(0, 60, 3))) == []


def test_steps_of_which_nothing_is_known_are_passed_over():
    """Every other row lost leaves ten of twenty, all over."""
    known = np.arange(60) % 2 == 0

    shown = steps_that_last((20, 60), known=known)

    assert shown
    assert all(step % 2 == 0 for step in shown)


def test_each_column_is_judged_by_itself():
    """A fault of one group says nothing of the next."""
    over = np.zeros((40, 2), dtype=bool)
    over[20:, 1] = True

    shown = lasting(over, np.ones_like(over))

    assert shown.any(axis=0).tolist() == [False, True]


@pytest.mark.parametrize("factor", [1.25, 4])
def test_a_transfer_is_free_of_waiting(factor):
    """With a straggler in it a group transfers as long as its siblings."""
    simulate = {
        "cluster": "moe-64", "steps": 40, "seed": 1, "faults": [f"compute:rank=3,factor={factor}"],
    }  # fmt: skip

    seen = transfers(run_of(build_run({"simulate": simulate})))

    assert np.nanmax(np.abs(median_over(seen.sibling_AG, axis=0))) < 0.05


def test_lateness_is_the_excess_of_the_late_rank():
    """On FSDP the sum over its collectives is what the rank computes longer: half of 60 ms."""
    simulate = {
        "cluster": "fsdp-64", "steps": 40, "seed": 1, "noise": 0.0,
        "faults": ["compute:rank=5,factor=1.5"],
    }  # fmt: skip
    run = run_of(build_run({"simulate": simulate, "unknown": ["busy_s", "ends"]}))

    seen = lateness(run)

    assert seen is not None
    shards = [g for g, group in enumerate(run.groups) if group.description == "dp"]
    mine = np.isin(seen.group_P, shards)
    late_R = median_over(seen.late_AP[:, mine], axis=0)
    assert int(late_R.argmax()) == 5
    assert late_R[5] - np.median(late_R) == pytest.approx(0.030, rel=0.25)
