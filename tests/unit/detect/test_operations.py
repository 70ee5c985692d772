"""Lanes that are taken over from the last step are those that would be found again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest

from argus_otel.detect import operations
from argus_otel.detect.run import run_of
from argus_otel.testing.cases import build_run

_ARRAYS = ("group_L", "nth_L", "source_L", "target_L", "transfer_AL", "longest_AL", "last_AL")
_MORE = ("members_AL", "wait_AR", "transfer_AR", "known_AR")


@pytest.mark.parametrize("lost", [0.0, 0.001])
def test_a_step_like_the_last_one_gets_the_same_lanes(
    lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows of some steps were lost, so that the next ones differ."""
    tables = build_run({"simulate": {"cluster": "pipeline-32", "steps": 12}})
    rows = tables.collectives
    kept = np.random.default_rng(3).random(rows.num_rows) >= lost
    tables = replace(tables, collectives=rows.filter(kept))
    quick = run_of(tables).operations
    monkeypatch.setattr(operations._Layout, "holds", lambda *_: False)
    slow = run_of(tables).operations
    assert quick.lanes == slow.lanes > 0
    assert (quick.op_L, quick.phase_L) == (slow.op_L, slow.phase_L)
    for name in (*_ARRAYS, *_MORE):
        np.testing.assert_array_equal(getattr(quick, name), getattr(slow, name), err_msg=name)


def test_what_sets_a_job_up_does_not_name_what_it_does_later() -> None:
    """The first step's operations come before its reductions, and are never seen again."""
    tables = build_run({"simulate": {"cluster": "ddp-8", "steps": 6}})
    rows = tables.collectives
    sets_up = pc.and_(pc.equal(rows["ordinal"], 0), pc.equal(rows["seq"], pc.min(rows["seq"])))
    op = pc.if_else(sets_up, "all_gather", rows["op"].cast("string"))
    place = rows.schema.get_field_index("op")
    tables = replace(tables, collectives=rows.set_column(place, "op", op.cast(rows["op"].type)))
    seen = run_of(tables).operations
    usual = run_of(build_run({"simulate": {"cluster": "ddp-8", "steps": 6}})).operations

    gathers = [lane for lane, op in enumerate(seen.op_L) if op == "all_gather"]

    assert gathers
    for lane in gathers:
        assert np.isfinite(seen.transfer_AL[:, lane]).tolist() == [True] + [False] * 5
    assert seen.lanes == usual.lanes + len(gathers)
    for op in set(usual.op_L):
        mine, theirs = (np.isin(run.op_L, [op]) for run in (seen, usual))
        np.testing.assert_allclose(
            np.sort(seen.transfer_AL[1:, mine]), np.sort(usual.transfer_AL[1:, theirs])
        )


def test_receivers_alone_are_no_reason_to_fail() -> None:
    """Nobody who sends was seen, and a later step has an operation more."""
    tables = build_run({"simulate": {"cluster": "pipeline-32", "steps": 6}})
    rows = tables.collectives
    kept = pc.not_equal(rows["op"].cast("string"), "send")
    kept = pc.and_(kept, pc.or_(pc.greater(rows["ordinal"], 2), pc.greater(rows["rank"], 0)))
    seen = run_of(replace(tables, collectives=rows.filter(kept))).operations

    assert "send" in seen.op_L
    assert (seen.source_L >= 0).any()
