"""A healthy run raises no finding, whatever its size."""

import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.testing.cases import build_run

DETECTORS = load_detectors(bundled_path("detectors"))


@pytest.mark.parametrize("ranks", [2, 4, 8, 32, 128])
def test_two_hundred_healthy_windows_raise_no_finding(ranks):
    """5 % jitter from step to step; the unluckiest of 128 ranks is still nobody's problem."""
    run = build_run(
        {
            "ranks": ranks,
            "steps": 10 + 19 + 200,
            "seed": ranks,
            "base": {"jitter": 0.05, "common_jitter": 0.05},
            "topology": {"dp": list(range(ranks))},
        }
    )

    verdict = diagnose(run, DETECTORS)

    assert verdict.judged["compute_straggler"] == 200
    assert verdict.diagnosis.findings == ()
    # Such a run has steps only; what looks at collectives, passes or devices says so.
    assert {said.code for said in verdict.diagnosis.abstentions} <= {"missing_data"}
