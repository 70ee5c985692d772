"""Kernels as evidence: read for a finding alone, and never the reason for one."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose, diagnose_run
from argus_otel.detect.kernels import compare_kernels
from argus_otel.detect.run import run_of
from argus_otel.tables.kernels import rows_of, sketch_column
from argus_otel.tables.schemas import KERNELS
from argus_otel.testing.cases import build_run
from argus_otel.wire.sketch import sketch_durations

(STRAGGLER,) = load_detectors(bundled_path("detectors") / "compute_straggler")
GEMM = "compute:rank=3,kernel=gemm,factor=1.6"


def simulated(*faults, cluster="ddp-8", steps=40, **more):
    simulate = {"cluster": cluster, "steps": steps, "seed": 1, "faults": list(faults)}
    return build_run({"simulate": simulate, **more})


def without(finding):
    """A finding but for what kernels say."""
    plain = {name: value for name, value in finding.evidence.items() if "kernel" not in name}
    summary = finding.summary.partition(" Its gemm")[0]
    return replace(finding, evidence=plain, summary=summary, next_step="")


def test_a_run_without_kernels_is_judged_as_ever():
    """The same finding, and not a word of kernels."""
    with_them = diagnose(simulated(GEMM), [STRAGGLER]).diagnosis
    plain = diagnose(simulated(GEMM, unknown=["kernels"]), [STRAGGLER]).diagnosis

    (finding,) = plain.findings
    assert not [name for name in finding.evidence if "kernel" in name]
    assert finding.next_step == STRAGGLER.params.do
    assert replace(finding, next_step="") == without(with_them.findings[0])


def test_what_to_do_depends_on_which_kernels_are_slow():
    """One is a matter of software, all are the device, none is the host."""

    def advice(fault):
        (finding,) = diagnose(simulated(fault), [STRAGGLER]).diagnosis.findings
        return finding.next_step

    assert "gemm kernels take 1.5" in advice(GEMM)
    assert "not the device as a whole" in advice(GEMM)
    assert "All its kernels take 1.3" in advice("compute:rank=3,factor=1.4")
    assert "nvidia-smi" in advice("compute:rank=3,factor=1.4")
    assert "the time passes between them" in advice("host_sync:rank=3")


def test_nothing_is_read_unless_something_was_found():
    """Ten million rows stay where they are."""
    asked = []

    def judged(*faults):
        tables = simulated(*faults)
        kernels = tables.kernels

        def rows(table, steps, ranks):
            asked.append((table, steps, ranks))
            within = [steps[0] <= o < steps[1] for o in kernels["ordinal"].to_pylist()]
            mine = [ranks is None or rank in ranks for rank in kernels["rank"].to_pylist()]
            return kernels.filter(pa.array(np.logical_and(within, mine)))

        run = run_of(replace(tables, kernels=KERNELS.empty_table()), rows=rows)
        return diagnose_run(run, [STRAGGLER]).diagnosis.findings

    assert judged() == ()
    assert asked == []

    (finding,) = judged(GEMM)
    assert finding.evidence["kernels_slow"] == ["gemm"]
    probe, (table, steps, ranks) = asked
    assert probe == ("kernels", (39, 40), None)  # whether there are any
    assert table == "kernels"
    assert steps == (20, 40)  # the latest 20 of them
    assert sorted(ranks) == list(range(8))


def test_a_run_without_kernels_is_asked_for_them_once():
    """Of one step: to read the rest of it from Jaeger may take minutes."""
    asked = []

    def rows(*what):
        asked.append(what)
        return KERNELS.empty_table()

    faults = ["compute:rank=3,kernel=gemm,factor=2", "compute:rank=6,factor=1.3,from=25"]
    run = run_of(simulated(*faults, unknown=["kernels"]), rows=rows)

    assert len(diagnose_run(run, [STRAGGLER]).diagnosis.findings) == 2
    assert asked == [("kernels", (39, 40), None)]


def test_a_table_that_cannot_be_read_costs_no_finding():
    """It is said that something is missing, and the rest holds."""

    def rows(*_):
        raise OSError("the disk is gone")

    run = run_of(simulated(GEMM, unknown=["kernels"]), rows=rows)

    (finding,) = diagnose_run(run, [STRAGGLER]).diagnosis.findings

    assert finding.evidence["incomplete"] == "OSError: the disk is gone"


def test_thirty_two_peers_stand_for_all():
    """In a job of thousands."""
    run = run_of(simulated(GEMM, cluster="ddp-64"))

    seen = compare_kernels(run, 3, (10, 39))

    assert (seen.peers, seen.steps) == (32, 20)
    assert seen.names[0] == "gemm"
    assert seen.ratio_N == pytest.approx([1.6, 1.0, 1.0], rel=0.03)
    assert (seen.distance_N[0] > 0.5, bool((seen.distance_N[1:] < 0.05).all())) == (True, True)
    assert float(seen.extra_s_N[0]) == pytest.approx(0.06 * 0.4 * 0.6, rel=0.1)


def kernels_of(durations_by_name, *, launches=1):
    """One step of rank 0 with these kernels, and of rank 1 with each as 10 µs."""
    names = list(durations_by_name)
    parts = []
    for rank, times in ((0, launches), (1, 1)):
        for code, name in enumerate(names):
            ns = np.full(10 * times, durations_by_name[name] * 1000 if rank == 0 else 10_000)
            nothing = np.zeros(ns.size, int)
            sketch = sketch_durations(ns, nothing + code, nothing, nothing - 1, names=names)
            parts.append((rank, name, sketch_column(rows_of([sketch]))))
    size = len(parts)
    columns = {
        "run": ["ca5e"] * size, "attempt": [0] * size, "ordinal": [12] * size,
        "rank": [rank for rank, *_ in parts], "name": [name for _, name, _ in parts],
        "stream": [7] * size, "phase": [None] * size,
    }  # fmt: skip
    arrays = [pa.array(values, KERNELS.field(name).type) for name, values in columns.items()]
    sketches = pa.concat_arrays([sketch for *_, sketch in parts])
    return pa.Table.from_arrays([*arrays, sketches], schema=KERNELS)


def compared(table):
    tables = simulated(cluster="ddp-2", steps=15, unknown=["kernels"])
    return compare_kernels(run_of(tables, rows=lambda *_: table), 0, (12, 12))


def test_kernels_of_communication_are_not_compared():
    """They last as long as others are late."""
    seen = compared(kernels_of({"gemm": 12, "ncclDevKernel_AllReduce_Sum_f32": 900}))

    assert seen.names == ("gemm",)
    assert seen.ratio_N == pytest.approx([1.2], rel=0.01)


def test_kernels_that_took_no_time_by_their_clock_have_a_ratio():
    """A report cannot say infinity."""
    table = kernels_of({"gemm": 12, "tick": 0})
    of_rank_0 = table["sketch"].to_pylist()[:2]
    at = table.schema.get_field_index("sketch")
    peers_took_none = pa.array([*of_rank_0, of_rank_0[1], of_rank_0[1]], pa.binary())

    seen = compared(table.set_column(at, KERNELS.field("sketch"), peers_took_none))

    assert np.isfinite(seen.ratio_N).all()


def test_more_kernels_are_told_from_slower_ones():
    """Twice as many of the same."""
    seen = compared(kernels_of({"gemm": 10}, launches=2))

    assert seen.ratio_N == pytest.approx([1.0], rel=0.01)
    assert seen.launches_ratio_N == pytest.approx([2.0])
    assert seen.extra_s_N == pytest.approx([10 * 10e-6], rel=0.01)


def test_what_was_folded_is_not_compared():
    """The rest of one rank may be other kernels than the rest of another."""
    assert compared(kernels_of({"other kernels": 30})) is None


def test_ranks_whose_kernels_have_other_names_are_not_compared():
    """Another build: nothing can be said."""
    table = kernels_of({"gemm": 12})
    mine = np.array(table["rank"].to_pylist()) == 0
    renamed = pa.array(np.where(mine, "gemm_v2", "gemm").tolist())
    table = table.set_column(table.schema.get_field_index("name"), KERNELS.field("name"), renamed)

    assert compared(table) == "kernels of the same names on a peer"


def test_a_kernel_that_only_the_slow_rank_has_is_named():
    """An autotuner chose another variant there: nothing to compare it with, and not the host."""
    tables = simulated(GEMM)
    mine = np.array(tables.kernels["rank"].to_pylist()) == 3
    names = np.array(tables.kernels["name"].to_pylist(), dtype=object)
    names[mine & (names == "gemm")] = "gemm_v2"
    at = KERNELS.get_field_index("name")
    kernels = tables.kernels.set_column(at, KERNELS.field("name"), pa.array(names.tolist()))

    (finding,) = diagnose(replace(tables, kernels=kernels), [STRAGGLER]).diagnosis.findings

    assert "It runs gemm_v2 kernels, which its 7 peers do not" in finding.summary
    assert "autotuner" in finding.next_step
    assert finding.evidence["kernels_extra_s"] > 0.01


def test_a_damaged_table_is_refused():
    """Whoever asks says that the evidence is incomplete."""
    table = kernels_of({"gemm": 12})
    at = table.schema.get_field_index("sketch")
    broken = pa.array([b"\x09"] * table.num_rows, pa.binary())

    with pytest.raises(ValueError, match="packed sketch"):
        compared(table.set_column(at, KERNELS.field("sketch"), broken))
