"""Every case of every detector: fires, stays quiet, abstains, as its file says."""

import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.testing.cases import read_cases

DETECTORS = load_detectors(bundled_path("detectors"))
CASES = [
    pytest.param(detector, case, id=f"{detector.id}-{case.name}")
    for detector in DETECTORS
    for case in read_cases(detector.folder)
]


@pytest.mark.parametrize(("detector", "case"), CASES)
def test_a_case_is_judged_as_its_file_says(detector, case):
    """The file's `why` says what a reader should expect."""
    assert case.differences(detector) == [], case.why


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.id)
def test_a_detector_has_cases_that_fire_stay_quiet_and_abstain(detector):
    """Without the three kinds, a detector is not known to work."""
    cases = [case.data for case in read_cases(detector.folder)]

    assert any(case["expect"] for case in cases)
    assert any(not case["expect"] and not case.get("abstain") for case in cases)
    assert any(case.get("abstain") for case in cases)
