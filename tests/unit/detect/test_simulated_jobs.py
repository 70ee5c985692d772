"""All detectors together on simulated jobs: silent where all is well, one finding for one fault."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.testing.cases import build_run

DETECTORS = load_detectors(bundled_path("detectors"))

HEALTHY = [
    ("ddp-2", {"evaluation_every": 10}),
    ("ddp-2", {"length_variation": 0.1}),
    ("ddp-8", {"lost_rows": 0.01}),
    ("ddp-8", {"length_variation": 0.3}),
    ("ddp-8", {"restart_s": 20.0}),
    ("pipeline-32", {"restart_s": 20.0, "lost_rows": 0.01}),
    ("ddp-64", {"checkpoint_every": 25, "checkpoint_s": 0.05}),
    ("ddp-64", {"length_variation": 0.03, "tokens": 4096.0}),
    ("ddp-64", {"collection_every": 30, "collection_s": 0.0005}),
    ("fsdp-64", {"clock_offset_s": 0.01, "clock_drift": 1e-6}),
    ("fsdp-64", {"noise": 0.06, "common_noise": 0.04}),
    ("hsdp-64", {"topology_known": False}),
    ("hsdp-64", {"lost_rows": 0.01, "collection_every": 30, "launch_ahead_s": 0.02}),
    ("pipeline-32", {"evaluation_every": 20, "checkpoint_every": 40}),
    ("pipeline-32", {"topology_known": False, "lost_rows": 0.01}),
    ("interleaved-32", {"length_variation": 0.1}),
    ("moe-64", {"length_variation": 0.1}),
    ("moe-64", {"tokens": 0.0, "evaluation_every": 15, "clock_offset_s": 0.5}),
]

ONE_FAULT = [
    ("ddp-8", "jit:rank=3,stall_s=2,from=30", [3]),
    ("fsdp-64", "jit:stall_s=0.5,from=30,every=3", []),
    ("fsdp-64", "checkpoint:rank=7,extra_s=1,every=20", [7]),
    ("ddp-64", "checkpoint:extra_s=0.5,every=10", []),
    ("fsdp-64", "host_sync:from=30", []),
    ("ddp-64", "host_sync:rank=5,from=30", [5]),
    ("ddp-8", "contention:rank=3,from=20", [3]),
    ("fsdp-64", "contention:host=2,from=20", list(range(16, 24))),
    ("ddp-64", "throttle:rank=11,from=30", [11]),
    ("pipeline-32", "throttle:rank=9,from=30", [9]),
    ("fsdp-64", "throttle:host=3,factor=1.3,reason=power", list(range(24, 32))),
    ("ddp-64", "xid:rank=17,from=30", [17]),
    ("pipeline-32", "xid:rank=9,code=48", [9]),
    ("ddp-64", "allocator:rank=17,from=30", [17]),
    ("fsdp-64", "allocator:from=30", []),
    ("ddp-8", "leak:", []),
    ("fsdp-64", "leak:rank=5", [5]),
    ("ddp-8", "silent:rank=3,from=30", [3]),
    ("pipeline-32", "silent:rank=3,from=30", [3]),
    ("ddp-8", "hang:rank=3,from=40", [3]),
    ("moe-64", "hang:rank=9,from=40", [9]),
    ("ddp-8", "mismatch:rank=3,from=40", [3]),
    ("pipeline-32", "mismatch:rank=9,from=40", [9]),
    ("ddp-64", "gc:", list(range(64))),
]
CAUSE = {
    "jit": "jit_compile",
    "checkpoint": "checkpoint_stall",
    "host_sync": "host_sync",
    "contention": "cpu_contention",
    "throttle": "gpu_throttled",
    "xid": "gpu_fault",
    "allocator": "allocator_thrash",
    "leak": "memory_growth",
    "silent": "silent_rank",
    "hang": "hang",
    "mismatch": "collective_mismatch",
    "gc": "gc_pause",
}


def loud(cluster, seed, **options):
    """Cause and ranks of every finding above information."""
    run = build_run({"simulate": {"cluster": cluster, "steps": 80, "seed": seed, **options}})
    findings = diagnose(run, DETECTORS).diagnosis.findings
    return [(f.cause, list(f.ranks)) for f in findings if f.severity != "info"]


@pytest.mark.parametrize(
    ("seed", "cluster", "options"),
    [(41 + k, *job) for k, job in enumerate(HEALTHY)],
    ids=[f"{cluster}-{'-'.join(options)}" for cluster, options in HEALTHY],
)
def test_a_healthy_job_has_nothing_above_information(seed, cluster, options):
    """Evaluation, saves, lost rows, odd clocks and ragged batches are how jobs are."""
    assert loud(cluster, seed, **options) == []


@pytest.mark.parametrize(
    ("seed", "cluster", "fault", "ranks"), [(71 + k, *fault) for k, fault in enumerate(ONE_FAULT)]
)
def test_one_fault_is_one_finding(seed, cluster, fault, ranks):
    """Its cause and its ranks, and no symptom beside it."""
    kind = fault.partition(":")[0]

    assert loud(cluster, seed, faults=[fault]) == [(CAUSE[kind], ranks)]


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.id)
def test_no_detector_fails_on_a_run_without_anything_optional(detector):
    """Old workers and foreign traces send neither memory nor devices, events nor heartbeats."""
    run = build_run({"ranks": 4, "steps": 60, "topology": {"dp": [0, 1, 2, 3]}})

    said = diagnose(run, [detector]).diagnosis

    assert said.findings == ()
    assert "detector_error" not in {abstention.code for abstention in said.abstentions}


def test_where_few_ends_are_known_the_others_are_said_to_wait_where_it_was_seen():
    """As on CPU hosts, where the end of most reductions is nobody's business."""
    fault = "compute:rank=3,factor=1.8,from=20"
    tables = build_run({"simulate": {"cluster": "ddp-8", "steps": 60, "faults": [fault]}})
    rows = tables.collectives
    seen = pc.equal(pc.subtract(rows["ordinal"], pc.multiply(pc.divide(rows["ordinal"], 7), 7)), 0)
    place = rows.schema.get_field_index("duration_s")
    hidden = pc.if_else(seen, rows["duration_s"], None)
    tables = replace(tables, collectives=rows.set_column(place, rows.field(place), hidden))

    (finding,) = diagnose(tables, DETECTORS).diagnosis.findings

    assert finding.ranks == (3,)
    assert finding.evidence["others_waited_s"] > 0.01
    assert finding.evidence["others_waited_in"] == "all_reduce of dp"


@pytest.mark.parametrize("rough", [False, True])
def test_a_rough_start_hides_no_late_pass(rough):
    """Two passes a step: how far they are apart by chance is not read from the warm-up."""
    fault = "micro_batch:stage=1,extra_s=0.03,index=1,from=40"
    tables = build_run({"simulate": {"cluster": "moe-64", "steps": 81, "faults": [fault]}})
    passes = tables.micro_batches
    ordinal, which = passes["ordinal"].to_numpy(), passes["micro_batch"].to_numpy()
    longer = rough * ((ordinal < 10) & (ordinal % 2 == 1) & (which == 1))
    durations = passes["duration_s"].to_numpy() * (1.0 + 9 * longer)
    place = passes.schema.get_field_index("duration_s")
    passes = passes.set_column(place, passes.field(place), pa.array(durations))

    findings = diagnose(replace(tables, micro_batches=passes), DETECTORS).diagnosis.findings

    assert [f.cause for f in findings if f.severity != "info"] == ["pipeline_imbalance"]
