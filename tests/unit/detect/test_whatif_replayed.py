"""Healing a planted fault gains what the job without it would have saved; healing anything else, nothing."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.detect.frame import build_frame
from argus_otel.detect.healing import meets_only_at_the_end, replayed_gain
from argus_otel.detect.ideal import what_if_table
from argus_otel.detect.run import run_of
from argus_otel.detect.whatif import LEAST_GAIN, healing_gain
from argus_otel.tables.findings import Finding, Onset
from argus_otel.testing.cases import build_run

STEPS = 50


@cache
def simulated(cluster, *faults, **options):
    about = {"cluster": cluster, "steps": STEPS, "seed": 3, "faults": list(faults), **options}
    return run_of(build_run({"simulate": about}))


def finding(cause, ranks, *, first=25, pattern="lasting", slowdown=1.5, groups=()):
    return Finding(
        detector=cause,
        cause=cause,
        ranks=tuple(ranks),
        groups=tuple(groups),
        first_step=first,
        last_step=STEPS - 1,
        onset=Onset(step=first, exact=True),
        severity="warning",
        slowdown=slowdown,
        summary="It is slow.",
        next_step="Look.",
        evidence={"pattern": pattern, "step_s": 0.7, "lost_s_per_step": 0.1},
    )


def mean_step_s(run, first):
    at = run.ordinals_A >= first
    return np.median(run.columns["step_s"] + run.columns["between_s"], axis=1)[at].mean()


LENGTHS = "sequence:variation=0.15"


@pytest.mark.parametrize("slow", ["compute:rank=9,factor=1.6", "compute:rank=9,factor=3,from=25"])
def test_even_lengths_do_not_heal_a_slow_rank(slow):
    """Beside it they gain what the job with the slow rank alone saves, and not its slowness too."""
    both, alone = simulated("moe-64", LENGTHS, slow), simulated("moe-64", slow)
    uneven = finding("sequence_imbalance", [], first=10, pattern="all ranks")

    gain = replayed_gain(uneven, build_frame(both))

    saved = 1 - mean_step_s(alone, 10) / mean_step_s(both, 10)
    assert 0.05 < saved < 0.2
    assert gain.share == pytest.approx(saved, abs=0.04)


STAGE_1, STAGE_3, HOST_1 = range(8, 16), range(24, 32), range(8, 16)


@pytest.mark.parametrize(
    ("cluster", "fault", "healed"),
    [
        ("pipeline-32", "compute:rank=9,factor=1.5", finding("compute_straggler", [9])),
        ("interleaved-32", "compute:rank=9,factor=1.5", finding("compute_straggler", [9])),
        ("fsdp-64", "compute:rank=9,factor=1.5", finding("compute_straggler", [9])),
        ("moe-64", "compute:rank=9,factor=1.5", finding("compute_straggler", [9])),
        ("pipeline-32", "throttle:rank=5,factor=1.4", finding("gpu_throttled", [5], slowdown=1.4)),
        ("pipeline-32", "stage:stage=3,factor=1.3", finding("pipeline_imbalance", STAGE_3)),
        (
            "pipeline-32",
            "micro_batch:stage=1,extra_s=0.06,index=3",
            finding("pipeline_imbalance", STAGE_1),
        ),
        ("pipeline-32", "link:host=1,factor=8", finding("slow_link", HOST_1)),
        ("moe-64", "link:host=1,factor=8", finding("slow_link", HOST_1)),
        ("ddp-64", "link:host=1,factor=8", finding("slow_link", HOST_1)),
        ("pipeline-32", "comm:factor=10", finding("comm_regression", [])),
        ("pipeline-32", "input:rank=3,extra_s=0.1", finding("input_stall", [3])),
        (
            "pipeline-32",
            "input:extra_s=0.1",
            finding("input_stall", range(32), pattern="all ranks"),
        ),
        (
            "pipeline-32",
            "gc:pause_s=0.1,every=5",
            finding("gc_pause", range(32), pattern="intermittent"),
        ),
        (
            "fsdp-64",
            "gc:pause_s=0.1,every=5",
            finding("gc_pause", range(64), pattern="intermittent"),
        ),
        (
            "pipeline-32",
            "jit:stall_s=1,every=10,rank=4",
            finding("jit_compile", [4], pattern="intermittent"),
        ),
        ("pipeline-32", "contention:rank=5,delay_s=0.1", finding("cpu_contention", [5])),
        (
            "pipeline-32",
            "allocator:rank=5,retries=4,stall_s=0.02",
            finding("allocator_thrash", [5]),
        ),
        (
            "pipeline-32",
            "host_sync:count=100,gap_s=0.001",
            finding("host_sync", [], pattern="all ranks"),
        ),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_healing_a_planted_fault_gains_what_the_job_without_it_saves(cluster, fault, healed):
    """Against the same job without the fault: within a fifth of what was lost, and 1 % of the step."""
    sick = simulated(cluster, f"{fault},from=25")
    healthy = simulated(cluster)
    lost = 1 - mean_step_s(healthy, 25) / mean_step_s(sick, 25)

    gain = replayed_gain(healed, build_frame(sick))

    assert lost > LEAST_GAIN
    assert gain.share == pytest.approx(lost, rel=0.2, abs=0.01)


CAUSES = {
    "compute_straggler": [2],
    "gpu_throttled": [2],
    "slow_link": HOST_1,
    "pipeline_imbalance": STAGE_1,
    "input_stall": [2],
    "gc_pause": [2],
    "cpu_contention": [2],
    "allocator_thrash": [2],
    "host_sync": [2],
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("cluster", ["pipeline-32", "moe-64", "fsdp-64"])
def test_healing_a_healthy_place_gains_nothing(cluster, cause):
    """No cause is worth a warning where nothing is wrong."""
    gain = replayed_gain(finding(cause, CAUSES[cause]), build_frame(simulated(cluster)))

    assert gain is None or gain.share <= LEAST_GAIN


def test_healing_beside_the_fault_gains_nothing_and_says_who_is_later():
    """Rank 20 holds everybody up; rank 2 is in nobody's way."""
    frame = build_frame(simulated("pipeline-32", "compute:rank=20,factor=1.6,from=25"))

    gain = replayed_gain(finding("compute_straggler", [2]), frame)

    assert gain.share <= 0.005
    assert gain.latest_rank == 20


def test_a_link_is_healed_by_the_groups_that_are_named():
    """The group's siblings transfer at the usual speed."""
    run = simulated("moe-64", "link:axis=edp,group=1,factor=30,from=25")
    frame = build_frame(run)
    key = next(
        group.key
        for k, group in enumerate(run.groups)
        if group.description == "edp" and run.operations.group_L.tolist().count(k)
        and np.nanmax(run.operations.transfer_AL[40, run.operations.group_L == k]) > 0.1
    )  # fmt: skip

    named = replayed_gain(finding("slow_link", [], groups=[str(key)]), frame)
    other = replayed_gain(
        finding("slow_link", [], groups=[str(next(g.key for g in run.groups if g.key != key))]),
        frame,
    )

    assert named.share > 0.2
    assert other is None or other.share <= LEAST_GAIN


def test_what_cannot_be_healed_is_left_to_its_detector():
    """A hang costs more than a step."""
    frame = build_frame(simulated("pipeline-32"))

    assert healing_gain(finding("hang", [2]), frame) is None


@pytest.mark.parametrize(
    ("cluster", "plain"),
    [("ddp-8", True), ("ddp-64", True), ("fsdp-64", False), ("pipeline-32", False),
     ("moe-64", False)],
)  # fmt: skip
def test_plain_data_parallelism_needs_no_replay(cluster, plain):
    """Its ranks meet at the end of the step only."""
    assert meets_only_at_the_end(simulated(cluster)) is plain


def test_the_arbiter_says_what_a_slow_rank_of_a_pipeline_really_costs():
    """The bubbles that it makes in other stages are its own: more than its own extra compute a step."""
    verdict = diagnose(
        build_run(
            {
                "simulate": {
                    "cluster": "pipeline-32",
                    "steps": 60,
                    "seed": 3,
                    "faults": ["compute:rank=9,factor=1.5,from=25"],
                }
            }
        ),
        [d for d in load_detectors(bundled_path("detectors")) if d.id == "compute_straggler"],
    )
    lost = 1 - mean_step_s(simulated("pipeline-32"), 25) / mean_step_s(
        simulated("pipeline-32", "compute:rank=9,factor=1.5,from=25"), 25
    )

    (found,) = verdict.diagnosis.findings

    assert found.ranks == (9,)
    assert found.severity in ("warning", "critical")
    share = found.evidence["lost_s_per_step"] / found.evidence["step_s"]
    assert share == pytest.approx(lost, rel=0.2)


def test_the_table_shows_where_the_time_goes():
    """A heavy last stage: healing it recovers most, the other stages nothing."""
    rows = what_if_table(simulated("pipeline-32", "stage:stage=3,factor=1.5,from=0"))
    shares = {row.label: row.recovered_share for row in rows}

    assert rows[0].label.startswith("slowest 3 % of workers")
    assert list(shares)[1:] == [
        "stage 0",
        "stage 1",
        "stage 2",
        "stage 3 (the last)",
        "all communication at its median",
        "all compute at its mean",
    ]
    assert rows[0].ranks[0] in STAGE_3
    assert shares["stage 3 (the last)"] > 0.8
    assert max(shares[f"stage {stage}"] for stage in range(3)) < 0.1
    assert shares["all compute at its mean"] > 0.9


@pytest.mark.parametrize("cluster", ["ddp-8", "pipeline-32", "moe-64", "fsdp-64"])
def test_the_table_of_a_healthy_run_shows_nothing_to_gain(cluster):
    """No worker and no stage is worth 3 % of the step."""
    rows = what_if_table(simulated(cluster))

    assert max(row.step_share for row in rows[:-2]) <= LEAST_GAIN


def test_a_run_that_cannot_be_replayed_has_no_table():
    """One rank, nobody to wait for."""
    assert what_if_table(run_of(build_run({"ranks": 1, "steps": 20, "collectives": {}}))) == []
