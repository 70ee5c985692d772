"""What argus says of the real traces, against what is known of them."""

import json

import pytest
from rich.console import Console

from argus_otel.convert.bytedance import convert_bytedance
from argus_otel.convert.flight_recorder import convert_flight_recorder
from argus_otel.convert.kineto import convert_kineto
from argus_otel.report.html import render_html
from argus_otel.report.json import render_json
from argus_otel.report.text import print_view
from argus_otel.service import judge, view_of
from argus_otel.store.bulk import write_run
from argus_otel.store.parquet import ParquetStore


@pytest.fixture(scope="session")
def verdicts(data, tmp_path_factory):
    """Run id → cause → ranks, of what is more than information."""
    folder = tmp_path_factory.mktemp("judged")
    conversions = convert_bytedance([data / "bytedance"])
    for name in ("lock_gil", "gpu_error"):
        archive = data / f"nvrx/flight_recorder_{name}.tar.gz"
        conversions += convert_flight_recorder([archive], run_id=name)
    for conversion in conversions:
        write_run(folder, conversion.summary, conversion.blocks)
    store = ParquetStore(folder)
    found = {}
    for run in store.runs():
        findings = judge(store, run.run).verdict.diagnosis.findings
        found[run.run_id] = {f.cause: f.ranks for f in findings if f.severity != "info"}
    return found


def test_the_slow_worker_is_named(verdicts):
    """ByteDance made one worker of 64 GPUs slow; their what-if puts all of the loss on it."""
    assert verdicts["AR"] == {"compute_straggler": (0,)}


def test_the_stage_that_holds_too_much_is_named(verdicts):
    """And nobody on it is called slow."""
    assert verdicts["ST"] == {"pipeline_imbalance": (6, 7)}


def test_the_ranks_with_the_planted_fault_are_named(verdicts):
    """As NVIDIA's log of the injection says."""
    assert verdicts["lock_gil"] == {"hang": (9, 14)}
    assert verdicts["gpu_error"] == {"hang": (12, 14)}


def test_of_one_profiled_step_it_is_told_who_keeps_the_others_waiting(data, tmp_path, capsys):
    """DLRM on eight ranks: a figure, and nobody is blamed for its compute."""
    (conversion,) = convert_kineto([data / "param/dlrm_kineto.tar.gz"])
    write_run(tmp_path, conversion.summary, conversion.blocks)

    view = view_of(judge(ParquetStore(tmp_path), "latest"))
    print_view(Console(width=200), view)

    last = view.last_to_arrive
    assert (last.rank, last.collectives, last.of) == (7, 5, 8)
    assert last.waited_s == pytest.approx(0.00924, rel=0.01)
    assert view.diagnosis.findings == ()
    said = capsys.readouterr().out
    told = "Rank 7 comes last in 5 of 8 collectives; the first to arrive waits 9.24 ms"
    assert told in said
    assert told in render_html(view)
    assert json.loads(render_json(view))["last_to_arrive"]["rank"] == 7


def test_of_two_ranks_seen_of_many_none_is_said_to_be_last(data, tmp_path, capsys):
    """Any of the other 126 may have come later."""
    (conversion,) = convert_kineto(sorted((data / "hta").glob("sampled_rank-*.json.gz")))
    write_run(tmp_path, conversion.summary, conversion.blocks)

    view = view_of(judge(ParquetStore(tmp_path), "latest"))
    print_view(Console(width=200), view)

    assert view.no_verdict
    assert view.last_to_arrive is None
    assert "last" not in capsys.readouterr().out
    assert "last_to_arrive" not in json.loads(render_json(view))
