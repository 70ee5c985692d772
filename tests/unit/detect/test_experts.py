"""Tokens of experts: which one is busy, and when it is not the router."""

import numpy as np
import pyarrow as pa
import pytest

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.detect.experts import expert_tokens
from argus_otel.detect.run import run_of
from argus_otel.tables.schemas import EXPERTS
from argus_otel.testing.cases import build_run

(DETECTOR,) = load_detectors(bundled_path("detectors") / "expert_imbalance")


def rows_of_experts(*given):
    """(ordinal, rank, tokens) as the table."""
    rows = [
        {"run": "ca5e", "attempt": 0, "ordinal": ordinal, "rank": rank, "tokens": tokens}
        for ordinal, rank, tokens in given
    ]
    return pa.Table.from_pylist(rows, EXPERTS)


def small_run(table):
    return run_of(build_run({"ranks": 3, "steps": 30}), rows=lambda *_: table)


def test_the_busy_expert_is_named_and_no_node_is_blamed():
    """Position 3 holds experts 12 to 15; the third of them is busy."""
    about = {"cluster": "moe-64", "steps": 50, "seed": 1,
             "faults": ["expert:axis=edp,group=3,factor=1.5,index=2"]}  # fmt: skip

    (finding,) = diagnose(build_run({"simulate": about}), [DETECTOR]).diagnosis.findings

    assert "expert 14 gets 3.0" in finding.summary
    assert "no node is bad" in finding.summary


def test_tokens_are_the_mean_of_the_steps_asked_for():
    """A rank that holds fewer experts, or says nothing, has unknown ones."""
    table = rows_of_experts(
        (3, 0, [10, 20]), (3, 1, [5]), (4, 0, [30, 40]), (5, 0, [99, 99]), (4, 7, [1, 1])
    )
    over = np.isin(np.arange(30), (3, 4))

    tokens = expert_tokens(small_run(table), over)

    assert tokens == pytest.approx(np.array([[20, 30], [5, np.nan], [np.nan, np.nan]]), nan_ok=True)


@pytest.mark.parametrize("rows", [(), ((3, 0, []),)])
def test_a_run_that_counts_no_tokens_has_none(rows):
    """Not even a table, or one with nothing in it."""
    over = np.ones(30, dtype=bool)

    assert expert_tokens(small_run(rows_of_experts(*rows)), over) is None
    assert expert_tokens(small_run(rows_of_experts((3, 0, [1]))), ~over) is None
