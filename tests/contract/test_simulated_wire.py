"""A simulated run that goes over the wire comes back as its own tables."""

from dataclasses import replace

import pytest

from argus_otel.simulate.cluster import PRESETS
from argus_otel.simulate.digests import digests_of
from argus_otel.simulate.faults import parse_fault
from argus_otel.simulate.model import Model
from argus_otel.simulate.tables import RunName, TableMaker
from argus_otel.store.digests import Received
from argus_otel.store.spans import Origin
from argus_otel.store.tables import (
    collectives_table,
    experts_table,
    kernels_table,
    steps_table,
)
from argus_otel.wire.digest import decode_digest, encode_digests

CLUSTERS = {
    "ddp": replace(PRESETS["ddp-8"], collection_every=3, clock_offset_s=0.1, clock_drift=1e-5),
    "fsdp": replace(PRESETS["fsdp-64"], dp=4, tokens=512.0, length_variation=0.2),
    "hsdp": replace(PRESETS["hsdp-64"], dp=16),
    "pipeline": replace(PRESETS["pipeline-32"], dp=2),
    "interleaved": replace(PRESETS["interleaved-32"], dp=1),
    "experts": replace(PRESETS["moe-64"], dp=8, ep=4, lost_rows=0.1),
    "tensor": replace(PRESETS["video-4096"], dp=2, tp=4),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_tables_equal_those_of_a_store_that_the_digests_were_sent_to(cluster):
    """Every column that a digest carries, to the microsecond; the score rests on this."""
    faults = [parse_fault("compute:rank=1,kernel=gemm,factor=1.7,from=2", cluster)]
    tables = TableMaker(Model(cluster, faults, 5), RunName.of("wire", 5)).whole(5)
    sent = list(digests_of(tables))
    origin = Origin(
        run=tables.ranks["run"][0].as_py(), run_id="wire", attempt=0, role="trainer", rank=0,
        world_size=cluster.ranks, host="h", local_rank=0, pid=1, service="s", nonce_local=False,
    )  # fmt: skip
    received = [
        Received(
            origin=origin,
            trace_id=trace_id,
            digest=decode_digest(attributes, digest.start_ns, digest.end_ns),
        )
        for digest, attributes, trace_id in zip(
            sent, encode_digests(sent), tables.steps["trace_id"].to_pylist(), strict=True
        )
    ]

    stored_steps, stored_operations = steps_table(received), collectives_table(received)

    assert tables.kernels.num_rows == 8 * tables.steps.num_rows
    assert kernels_table(received).equals(tables.kernels)
    assert experts_table(received).equals(tables.experts)
    assert bool(tables.experts.num_rows) == (cluster.ep > 1)
    for name in stored_operations.column_names:
        assert stored_operations[name].equals(tables.collectives[name]), name
    for name in stored_steps.column_names:
        if name == "step_s":  # a difference of two whole nanoseconds, here in floating point
            assert stored_steps[name].to_pylist() == pytest.approx(tables.steps[name].to_pylist())
        elif name == "boundary_counts":  # in the order of first use there
            assert by_group(stored_steps) == by_group(tables.steps)
        else:
            assert stored_steps[name].to_pylist() == tables.steps[name].to_pylist(), name


def by_group(steps):
    return [
        sorted((count["group"], count["count"]) for count in counts)
        for counts in steps["boundary_counts"].to_pylist()
    ]
