"""One fault is one finding; a broken detector is an abstention; wrong files are told at once."""

from dataclasses import replace

import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel._runtime.errors import ConfigError
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.testing.cases import build_run

BUNDLED = bundled_path("detectors")
SLOW = {
    "ranks": 4,
    "steps": 90,
    "changes": [
        {"ranks": [2], "steps": [20, 45], "own_times": 1.5},
        {"ranks": [2], "steps": [70, 90], "own_times": 1.5},
    ],
}


def test_a_fault_that_returns_is_one_finding_with_its_episodes():
    """Same cause, same place: same id, and the healthy time between is not charged."""
    (finding,) = diagnose(build_run(SLOW), load_detectors(BUNDLED)).diagnosis.findings

    assert finding.ranks == (2,)
    assert (finding.first_step, finding.last_step, finding.state) == (20, 89, "open")
    assert len(finding.evidence["episodes"]) == 2
    assert 40 <= finding.evidence["steps_affected"] <= 48


def test_ids_are_stable_over_runs_of_the_detector_and_of_growing_data():
    """Alerts and spans are keyed by them."""
    detectors = load_detectors(BUNDLED)
    early = diagnose(build_run({**SLOW, "steps": 45}), detectors).diagnosis.findings
    late = diagnose(build_run(SLOW), detectors).diagnosis.findings

    assert [f.id for f in early] == [f.id for f in late]
    assert early[0].evidence["look_at_step"] == late[0].evidence["look_at_step"]


def test_two_ranks_that_fall_ill_at_different_times_are_two_findings():
    """Nothing but time tells them from one fault."""
    changes = [
        {"ranks": [1], "steps": [20, 90], "own_times": 1.5},
        {"ranks": [6], "steps": [50, 90], "own_times": 1.5},
    ]
    run = build_run({"ranks": 8, "steps": 90, "changes": changes})

    findings = diagnose(run, load_detectors(BUNDLED)).diagnosis.findings

    assert sorted(f.ranks for f in findings) == [(1,), (6,)]


def test_a_finding_is_as_sure_as_its_detector_was_right_before():
    """At the same severity; where that is not known, neither is how sure it is."""
    (straggler,) = load_detectors(BUNDLED / "compute_straggler")

    def sure(confidence):
        (found,) = diagnose(
            build_run(SLOW), [replace(straggler, confidence=confidence)]
        ).diagnosis.findings
        return found.severity, found.confidence

    severity, _ = sure({})
    assert sure({severity: 0.97}) == (severity, 0.97)
    assert sure({"info": 0.5}) == (severity, None)


def test_a_detector_that_raises_becomes_an_abstention():
    """Anybody may write one; nobody's mistake ends the others."""

    def broken(window, params):
        raise ZeroDivisionError("by design")

    straggler, pauses = load_detectors(BUNDLED / "compute_straggler", BUNDLED / "gc_pause")
    detectors = [replace(straggler, detect=broken), pauses]

    verdict = diagnose(build_run({"ranks": 4, "steps": 60}), detectors)

    (abstention,) = verdict.diagnosis.abstentions
    assert abstention.code == "detector_error"
    assert "ZeroDivisionError: by design" in abstention.missing
    assert not verdict.all_abstained


def test_a_run_without_steps_is_abstained_from():
    """Rather than called sound."""
    tables = build_run({"ranks": 4, "steps": 20})
    empty = replace(tables, steps=tables.steps.slice(0, 0))

    verdict = diagnose(empty, load_detectors(BUNDLED))

    assert verdict.all_abstained
    assert {a.code for a in verdict.diagnosis.abstentions} == {"no_steps"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("id: x\nspeed: 3", "unknown keys"),
        ("id: x", "without"),
        ("- a list", "not a mapping"),
        ("a: [", "damaged"),
    ],
)
def test_a_wrong_detector_file_names_itself_and_its_fault(tmp_path, text, complaint):
    """Before anything is read from a store."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "detector.yaml").write_text(text)

    with pytest.raises(ConfigError, match=complaint) as caught:
        load_detectors(tmp_path)

    assert "detector.yaml" in str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    """A typing error must not mean fewer detectors."""
    with pytest.raises(ConfigError, match="not a folder"):
        load_detectors(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("steps", "times", "severity"),
    [(130, 1.8, "info"), (38, 1.8, "critical"), (38, 1.3, "info")],
    ids=["long over", "going on", "going on, mild"],
)
def test_a_brief_fault_that_is_over_or_mild_is_only_information(steps, times, severity):
    """Nobody gets up for twenty slow steps that have passed; but for the same twenty just now.

    A mild one has to last first: on a host's shared cores such things come and go.
    """
    changes = [{"ranks": [1], "steps": [18, 38], "own_times": times}]

    verdict = diagnose(
        build_run({"ranks": 4, "steps": steps, "changes": changes}), load_detectors(BUNDLED)
    )

    (finding,) = verdict.diagnosis.findings
    assert (finding.ranks, finding.severity) == ((1,), severity)


def test_the_cost_of_collections_is_a_part_of_the_step():
    """Pauses five times as long as the usual step once cost more than all the time there was."""
    changes = [{"ranks": [2], "steps": [30, 90], "every": 4, "gc_s": 0.3}]

    (finding,) = diagnose(
        build_run({"ranks": 4, "steps": 90, "changes": changes}), load_detectors(BUNDLED)
    ).diagnosis.findings

    assert finding.cause == "gc_pause"
    assert 1.5 < finding.step_slowdown < 3.0
