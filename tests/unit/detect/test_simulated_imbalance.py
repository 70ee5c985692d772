"""Slow links, uneven work and stragglers on simulated jobs: the right cause and place, and no other."""

import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.simulate.cluster import PRESETS
from argus_otel.simulate.faults import parse_fault
from argus_otel.testing.cases import build_run

DETECTORS = load_detectors(bundled_path("detectors"))
STEPS = 60
NOISE = (0.02, 0.04, 0.08)

NAMED = [
    ("ddp-8", "compute:rank=3,factor=1.25,from=30"),
    ("ddp-8", "compute:ranks=0-3,factor=2"),
    ("fsdp-64", "compute:rank=40,factor=1.5"),
    ("hsdp-64", "compute:host=2,factor=1.25,from=30"),
    ("hsdp-64", "link:axis=replica,group=3,factor=1.25,from=30"),
    ("hsdp-64", "link:axis=replica,group=5,factor=4"),
    ("pipeline-32", "compute:rank=9,factor=2"),
    ("pipeline-32", "link:rank=11,factor=1.25,from=30"),
    ("pipeline-32", "link:host=1,factor=4"),
    ("pipeline-32", "stage:stage=3,factor=1.25"),
    ("pipeline-32", "micro_batch:stage=1,extra_s=0.1,index=3,from=30"),
    ("pipeline-32", "sequence:variation=0.4"),
    ("interleaved-32", "link:axis=dp,group=2,factor=2,from=30"),
    ("interleaved-32", "stage:stage=0,factor=1.5,from=30"),
    ("interleaved-32", "micro_batch:stage=2,extra_s=0.1,index=1"),
    ("moe-64", "compute:rank=33,factor=4,from=30"),
    ("moe-64", "link:rank=11,factor=2"),
    ("moe-64", "link:host=5,factor=1.25,from=30"),
    ("moe-64", "link:axis=ep,group=3,factor=4,from=30"),
    ("moe-64", "expert:axis=edp,group=3,factor=1.25,from=30"),
    ("moe-64", "expert:axis=edp,group=9,factor=4"),
    ("moe-64", "stage:stage=1,factor=1.5"),
    ("moe-64", "sequence:variation=0.3"),
    ("audio-512", "link:axis=edp,group=5,factor=2,from=30"),
    ("audio-512", "link:rank=300,factor=1.5,from=30"),
    ("audio-512", "expert:axis=edp,group=7,factor=1.25"),
    ("ddp-8", "comm:factor=1.25,from=30"),
    ("fsdp-64", "comm:factor=4,from=30"),
    ("hsdp-64", "comm:factor=2,from=30"),
    ("interleaved-32", "comm:factor=1.5,from=30"),
]  # fmt: skip

HEALTHY = [
    (name, options)
    for name in ("ddp-8", "hsdp-64", "interleaved-32", "moe-64")
    for options in (*({"noise": noise} for noise in NOISE), {"length_variation": 0.1})
]


def said_of(cluster, seed, **options):
    """Every finding on a simulated job."""
    simulate = {"cluster": cluster, "steps": STEPS, "seed": seed, **options}
    return diagnose(build_run({"simulate": simulate}), DETECTORS).diagnosis.findings


def loud(findings):
    """Cause and ranks of those above information."""
    return {(f.cause, f.ranks) for f in findings if f.severity != "info"}


@pytest.mark.parametrize(
    ("seed", "cluster", "text"), [(101 + k, *fault) for k, fault in enumerate(NAMED)]
)
def test_the_cause_and_its_place_are_named_and_nothing_else(seed, cluster, text):
    """A mild one may be information, where the job loses nothing by it."""
    fault = parse_fault(text, PRESETS[cluster])
    truth = (fault.cause, fault.ranks)

    findings = said_of(cluster, seed, noise=NOISE[seed % 3], faults=[text])

    assert truth in {(f.cause, f.ranks) for f in findings}
    assert loud(findings) <= {truth}


@pytest.mark.parametrize(
    ("seed", "cluster", "options"), [(201 + k, *job) for k, job in enumerate(HEALTHY)]
)
def test_noise_and_ragged_batches_are_nobodys_fault(seed, cluster, options):
    """Up to 8 % from step to step, or lengths that differ by a tenth."""
    assert loud(said_of(cluster, seed, **options)) == set()


@pytest.mark.parametrize("cluster", ["ddp-8", "fsdp-64"])
def test_one_slow_link_of_a_single_ring_is_told_as_slower_communication(cluster):
    """Which link it is, nobody can know from one ring; the finding says so."""
    findings = said_of(cluster, 301, faults=["link:rank=3,factor=2,from=30"])

    assert loud(findings) == {("comm_regression", ())}
    assert findings[0].evidence["may_be_one_link"]


def test_faults_of_three_kinds_are_told_apart():
    """A slow rank, a slow link and a busy expert at once, each in its place."""
    faults = [
        "compute:rank=50,factor=2,from=20",
        "link:rank=11,factor=2,from=25",
        "expert:axis=edp,group=4,factor=2,from=30",
    ]

    findings = said_of("moe-64", 302, faults=faults)

    assert {(f.cause, f.ranks) for f in findings} == {
        ("compute_straggler", (50,)),
        ("slow_link", (11,)),
        ("expert_imbalance", (4, 12, 20, 28)),
    }


@pytest.mark.parametrize("unknown", [["busy_s", "ends"], []])
def test_a_straggler_is_one_finding_whatever_is_known_of_it(unknown):
    """By its own time, or by its arrivals where ends are not known."""
    simulate = {
        "cluster": "fsdp-64", "steps": STEPS, "seed": 303, "faults": ["compute:rank=7,factor=1.5"],
    }  # fmt: skip
    run = build_run({"simulate": simulate, "unknown": unknown})

    findings = diagnose(run, DETECTORS).diagnosis.findings

    assert loud(findings) == {("compute_straggler", (7,))}
    assert len(findings) == 1
