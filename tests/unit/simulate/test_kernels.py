"""Kernels of a simulated step: as long as its phases, and slow where a fault says so."""

from dataclasses import replace

import numpy as np
import pytest

from argus_otel.simulate.cluster import PRESETS
from argus_otel.simulate.faults import parse_fault
from argus_otel.simulate.kernels import COMMUNICATION
from argus_otel.simulate.model import Model
from argus_otel.simulate.tables import RunName, TableMaker
from argus_otel.tables.kernels import read_sketch_column
from argus_otel.tables.schemas import KERNELS
from argus_otel.wire.kernels import MAX_KEYS
from argus_otel.wire.sketch import Sketch

STEPS = 6


def run(cluster, *faults, seed=3):
    """The model's steps, and the tables of a model that is its twin."""
    planted = [parse_fault(fault, cluster) for fault in faults]
    model = Model(cluster, planted, seed)
    tables = TableMaker(Model(cluster, planted, seed), RunName.of("k", seed)).whole(STEPS)
    return list(model.steps(STEPS)), tables


def seconds(tables):
    """(ordinal, rank, name, phase) → seconds of its kernels."""
    rows = read_sketch_column(tables.kernels["sketch"])
    nothing = np.zeros(rows.filled.size, dtype=int)
    sketch = Sketch(
        names=("k",), name=nothing, stream=np.arange(nothing.size), phase=nothing - 1,
        row=np.repeat(np.arange(nothing.size), rows.filled), bucket=rows.bucket,
        count=rows.count, place_sum=rows.place_sum,
    )  # fmt: skip
    keys = zip(
        *(tables.kernels[name].to_pylist() for name in ("ordinal", "rank", "name", "phase")),
        strict=True,
    )
    return dict(zip(keys, (sketch.totals_ns * 1e-9).tolist(), strict=True))


@pytest.mark.parametrize("name", ["ddp-8", "fsdp-64", "pipeline-32", "interleaved-32", "moe-64"])
def test_kernels_of_a_phase_add_up_to_its_compute(name):
    """Whatever a class takes: nobody is busy without kernels, nor has more of them than time."""
    steps, tables = run(PRESETS[name], "compute:rank=3,kernel=attention,factor=2")
    took = seconds(tables)

    for step in steps:
        for place, phase in enumerate(("forward", "backward", "optimizer.step")):
            for rank in (0, 3):
                classes = [
                    value for key, value in took.items()
                    if key[:2] == (step.ordinal, rank) and key[3] == phase
                ]  # fmt: skip
                assert sum(classes) == pytest.approx(step.compute_PR[place, rank], rel=0.005)


def test_the_passes_of_a_rank_are_its_kernels():
    """Where nothing stalls, what a pass takes is what its kernels take."""
    steps, tables = run(PRESETS["pipeline-32"])
    took = seconds(tables)

    for step in steps:
        kernels_s = sum(v for k, v in took.items() if k[:2] == (step.ordinal, 5) and k[3] in
                        ("forward", "backward"))  # fmt: skip
        assert kernels_s == pytest.approx(np.nansum(step.pass_RM2[5]), rel=0.005)


def test_a_fault_of_one_class_leaves_the_others_as_they_were():
    """1.8 times the gemm kernels, and the step is longer by their share."""
    cluster = replace(PRESETS["ddp-8"], noise=0.0)
    _, healthy = run(cluster)
    _, faulty = run(cluster, "compute:rank=2,kernel=gemm,factor=1.8,from=1")
    before, after = seconds(healthy), seconds(faulty)

    ratios = {key: after[key] / before[key] for key in before if key[2] != COMMUNICATION}

    for (ordinal, rank, name, phase), ratio in ratios.items():
        slow = ordinal >= 1 and rank == 2 and name == "gemm"
        assert ratio == pytest.approx(1.8 if slow else 1.0, rel=0.01), (rank, name, phase)


def test_waiting_in_a_collective_is_in_its_kernel():
    """As NCCL's kernels, they run from arrival to end."""
    steps, tables = run(PRESETS["ddp-8"], "compute:rank=2,factor=2")
    took = seconds(tables)

    for step in steps:
        for rank in range(8):
            waited = np.nansum(step.end_RK[rank] - step.arrival_RK[rank])
            assert took[step.ordinal, rank, COMMUNICATION, None] == pytest.approx(waited, rel=0.01)


def test_no_more_kernels_than_a_digest_keeps_and_none_without_a_gpu():
    """Or the simulated run would know what the wire folds."""
    _, tables = run(PRESETS["moe-64"])
    assert tables.kernels.num_rows == MAX_KEYS * tables.steps.num_rows

    _, tables = run(PRESETS["cpu-4"])
    assert tables.kernels.num_rows == 0


def test_a_busy_expert_gets_all_that_is_more():
    """Position 3 of 8 gets 1.5 times its tokens, the last of its four experts all of the rest."""
    _, tables = run(PRESETS["moe-64"], "expert:axis=edp,group=3,factor=1.5,index=3")

    assert tables.experts.num_rows == tables.steps.num_rows
    usual = 2 * 2 * 4096 / 4  # two micro-batches, two experts a token, four experts a rank
    for row in tables.experts.to_pylist():
        more = 2 * usual if row["rank"] in (3, 11, 19, 27) else 0
        assert row["tokens"] == pytest.approx([usual, usual, usual, usual + more], rel=0.15)


def test_ranks_that_do_not_report_have_no_kernels():
    """What is lost is lost whole."""
    _, tables = run(replace(PRESETS["ddp-8"], lost_rows=0.5))

    sent = {*zip(*(tables.steps[n].to_pylist() for n in ("ordinal", "rank")), strict=True)}
    seen = {*zip(*(tables.kernels[n].to_pylist() for n in ("ordinal", "rank")), strict=True)}
    assert seen == sent
    assert 0 < len(sent) < 8 * STEPS


def test_kernels_do_not_change_what_else_a_seed_gives(monkeypatch):
    """Their noise is their own, also where they are made of some steps before the next are."""

    def blocks():
        maker = TableMaker(Model(PRESETS["moe-64"], (), 3), RunName.of("k", 3))
        return list(maker.blocks(STEPS, block=1))

    given = blocks()
    monkeypatch.setattr(TableMaker, "_kernel_rows", lambda *_: KERNELS.empty_table())
    plain = blocks()

    for one, other in zip(given, plain, strict=True):
        assert one.kernels.num_rows > other.kernels.num_rows == 0
        for name in ("steps", "collectives", "micro_batches", "experts"):
            assert getattr(one, name).equals(getattr(other, name)), name
