"""What healing a cause would gain decides what is worth a warning."""

from __future__ import annotations

import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.testing.cases import build_run

SLOW = {"ranks": [1], "steps": [20, 90], "own_times": 1.8}
LATE_INPUT = {"ranks": [2], "steps": [20, 90], "data_wait_s": 0.2}


def findings_of(*changes):
    verdict = diagnose(
        build_run({"ranks": 4, "steps": 90, "changes": list(changes)}),
        load_detectors(bundled_path("detectors")),
    )
    return {finding.cause: finding for finding in verdict.diagnosis.findings}


def test_a_slow_rank_that_everybody_waits_for_is_worth_a_warning():
    """Healing it gains nearly all of its excess: 40 ms of every step."""
    finding = findings_of(SLOW)["compute_straggler"]

    assert finding.severity == "critical"
    assert finding.evidence["lost_s_per_step"] == pytest.approx(0.04, rel=0.2)


def test_a_slow_rank_behind_a_later_one_is_information_and_says_behind_whom():
    """The same rank, but another waits 200 ms for its input: nothing is gained by healing it."""
    found = findings_of(SLOW, LATE_INPUT)

    hidden = found["compute_straggler"]
    assert (hidden.ranks, hidden.severity) == ((1,), "info")
    assert hidden.evidence["hidden_behind_rank"] == 2
    assert hidden.evidence["lost_s_per_step"] == pytest.approx(0.0, abs=1e-3)
    assert found["input_stall"].ranks == (2,)
    assert found["input_stall"].severity == "critical"


def test_two_ranks_that_hide_behind_each_other_are_both_worth_a_warning():
    """Healing either alone gains nothing, and healing both a great deal."""
    run = build_run(
        {
            "simulate": {
                "cluster": "moe-64",
                "steps": 60,
                "seed": 8,
                "faults": ["compute:rank=1,factor=5,from=35", "compute:rank=9,factor=5,from=30"],
            }
        }
    )
    findings = diagnose(run, load_detectors(bundled_path("detectors"))).diagnosis.findings

    loud = [finding for finding in findings if finding.severity != "info"]
    assert {rank for f in loud if f.cause == "compute_straggler" for rank in f.ranks} == {1, 9}
