"""The five published cases come out as their page says: with its own commands."""

import re
from pathlib import Path

import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.testing.cases import build_run

PAGE = (Path(__file__).parents[2] / "docs/explanation/five-cases.md").read_text("utf-8")
COMMANDS = re.findall(
    r"^argus simulate --cluster (\S+) --fault (\S+) --out case-(\d)$", PAGE, re.MULTILINE
)
EXPECTED = {
    "1": ("compute_straggler", (17,)),
    "2": ("slow_link", tuple(range(7, 512, 32))),
    "3": ("pipeline_imbalance", tuple(range(16, 24))),
    "4": ("jit_compile", tuple(range(8, 16))),
    "5": ("compute_straggler", (47,)),
}


@pytest.mark.parametrize(("cluster", "fault", "case"), COMMANDS)
def test_a_published_case_is_found_with_cause_and_place_and_nothing_else(cluster, fault, case):
    """A hundred steps, the fault from step 40 on."""
    about = {"cluster": cluster, "steps": 100, "seed": 0, "faults": [fault]}
    findings = diagnose(
        build_run({"simulate": about}), load_detectors(bundled_path("detectors"))
    ).diagnosis.findings

    loud = [finding for finding in findings if finding.severity != "info"]
    assert [(finding.cause, finding.ranks) for finding in loud] == [EXPECTED[case]]
    assert abs(loud[0].first_step - 40) <= 1


def test_the_page_has_all_five():
    """A command that is reworded must not fall out of the test."""
    assert [case for _, _, case in COMMANDS] == list("12345")
