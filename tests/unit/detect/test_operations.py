"""Lanes that are taken over from the last step are those that would be found again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
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
