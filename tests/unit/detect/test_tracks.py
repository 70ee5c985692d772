"""What is listed under what: symptoms, parts, and slower steps that something accounts for."""

from argus_otel.detect.tracks import suppress
from argus_otel.tables.findings import Finding, Onset


def finding(cause, ranks, *, cost=1.0, steps=(20, 80), severity="warning", lost_s=0.02):
    """A finding of a detector that is called as its cause."""
    return Finding(
        detector=cause, cause=cause, ranks=tuple(ranks), first_step=steps[0], last_step=steps[1],
        onset=Onset(step=steps[0], exact=True), severity=severity, slowdown=1.3,
        cost_gpu_hours=cost, summary="", next_step="",
        evidence={"lost_s_per_step": lost_s, "step_s": 0.1},
    )  # fmt: skip


EXPLAINS = {"gpu_throttled": ["compute_straggler"], "gpu_fault": ["gpu_throttled"]}


def shown(*findings):
    """Cause and ranks of what remains, each with what is listed under it."""
    return [
        (f.cause, f.ranks, [s.cause for s in f.suppressed]) for f in suppress(findings, EXPLAINS)
    ]


def test_a_symptom_goes_under_its_cause_even_if_it_looks_dearer():
    """The what-if prices a straggler a little above the throttling that makes it."""
    said = shown(finding("compute_straggler", [3], cost=1.2), finding("gpu_throttled", [3]))

    assert said == [("gpu_throttled", (3,), ["compute_straggler"])]


def test_a_light_cause_does_not_hide_a_heavy_symptom():
    """Something else must slow that rank as well."""
    said = shown(finding("compute_straggler", [3], cost=5.0), finding("gpu_throttled", [3]))

    assert [cause for cause, _, _ in said] == ["compute_straggler", "gpu_throttled"]


def test_a_symptom_on_other_ranks_stands_beside():
    """Rank 4 is not explained by rank 3's clock."""
    said = shown(finding("compute_straggler", [4]), finding("gpu_throttled", [3]))

    assert len(said) == 2


def test_a_chain_of_causes_is_listed_under_the_first():
    """An error slows the clock, and the clock the rank."""
    said = shown(
        finding("compute_straggler", [3]), finding("gpu_throttled", [3]), finding("gpu_fault", [3])
    )

    assert [cause for cause, _, _ in said] == ["gpu_fault"]
    assert sorted(said[0][2]) == ["compute_straggler", "gpu_throttled"]


def test_a_cause_without_ranks_is_on_all_of_them():
    """A power limit everywhere explains each slow rank."""
    said = shown(finding("compute_straggler", [3]), finding("gpu_throttled", []))

    assert said == [("gpu_throttled", (), ["compute_straggler"])]


def test_a_part_of_a_finding_is_listed_under_it():
    """One detector, all ranks for long, some of them at first."""
    said = shown(
        finding("input_stall", [0, 1, 2, 3], cost=5.0),
        finding("input_stall", [2], steps=(20, 30), severity="info", cost=0.5),
    )

    assert said == [("input_stall", (0, 1, 2, 3), ["input_stall"])]


def test_slower_steps_go_under_what_accounts_for_them():
    """Began no later, lost half of it."""
    said = shown(
        finding("regression_unexplained", [], lost_s=0.03),
        finding("compute_straggler", [3], steps=(24, 80)),
    )

    assert said == [("compute_straggler", (3,), ["regression_unexplained"])]


def test_what_was_there_long_before_is_not_what_made_steps_slower():
    """Uneven lengths cost as much in each step from the first on; then a rank became slow."""
    kept = suppress(
        [
            finding("regression_unexplained", [], steps=(40, 80), lost_s=0.03),
            finding(
                "sequence_imbalance", [], steps=(10, 80), severity="info", lost_s=0.05, cost=9.0
            ),
            finding("compute_straggler", [3], steps=(40, 80), lost_s=0.03),
        ],
        EXPLAINS,
    )

    said = {one.cause: (one.severity, [s.cause for s in one.suppressed]) for one in kept}
    assert said["compute_straggler"] == ("warning", ["regression_unexplained"])
    assert said["sequence_imbalance"] == ("info", [])


def test_two_causes_may_account_together():
    """A third each."""
    said = shown(
        finding("regression_unexplained", [], lost_s=0.06, cost=3.0),
        finding("compute_straggler", [3], steps=(20, 40)),
        finding("input_stall", [5], steps=(20, 80), cost=0.9),
    )

    assert "regression_unexplained" not in [cause for cause, _, _ in said]


def test_slower_steps_stay_where_nothing_accounts_for_them():
    """Too late, or too small."""
    regression = finding("regression_unexplained", [], lost_s=0.05, cost=3.0)

    for other in (
        finding("compute_straggler", [3], steps=(40, 80), lost_s=0.05, cost=3.0),
        finding("compute_straggler", [3], lost_s=0.01),
    ):
        assert "regression_unexplained" in [cause for cause, _, _ in shown(regression, other)]


def test_information_that_accounts_for_slower_steps_becomes_as_severe():
    """5 % each of two kinds are information; a job that became slower is not."""
    (kept,) = suppress(
        [
            finding("regression_unexplained", [], lost_s=0.03),
            finding("compute_straggler", [3], severity="info"),
        ],
        EXPLAINS,
    )

    assert (kept.cause, kept.severity) == ("compute_straggler", "warning")


def test_information_that_explains_a_warning_becomes_one():
    """The reader is not to miss it, whatever it is called."""
    (kept,) = suppress(
        [finding("compute_straggler", [3]), finding("gpu_throttled", [3], severity="info")],
        EXPLAINS,
    )

    assert (kept.cause, kept.severity) == ("gpu_throttled", "warning")


def test_a_rank_that_needs_so_much_longer_accounts_for_slower_steps():
    """Where others' waits are taken for their own time, healing it alone seems to gain too little."""
    straggler = finding("compute_straggler", [3, 7], lost_s=0.01)
    straggler.evidence.update(own_work_s=0.09, reference_own_work_s=0.06)

    said = shown(straggler, finding("regression_unexplained", [], lost_s=0.05, cost=3.0))

    assert said == [("compute_straggler", (3, 7), ["regression_unexplained"])]
