"""The what-if says of ByteDance's two jobs what their authors' own analysis says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from argus_otel.convert.bytedance import convert_bytedance
from argus_otel.detect.ideal import ideal_of, parts_of
from argus_otel.detect.run import run_of

DATA = Path(__file__).parents[2] / "data" / "bytedance"


@cache
def judged(job):
    (conversion,) = convert_bytedance([DATA / f"trace-{job}.parquet"])
    run = run_of(*conversion.blocks)
    ideal = ideal_of(run, run.ordinals_A)
    return ideal, parts_of(run, ideal)


def published(job):
    return {
        name: value
        for part in ("mw", "ms")
        for name, value in json.loads((DATA / f"{part}-{job}.json").read_text()).items()
    }


def row(job, label):
    return next(row for row in judged(job)[1] if label in row.label)


@pytest.mark.parametrize("job", ["AR", "ST"])
def test_the_replayed_and_the_ideal_step_take_as_long_as_published(job):
    """Ours has the host's own time between operations in it, theirs has not: 2 % of a step."""
    ideal, _ = judged(job)
    told = published(job)

    assert ideal.original_s == pytest.approx(told["tori"], rel=0.02)
    assert ideal.ideal_s == pytest.approx(told["tideal"], rel=0.02)
    assert ideal.slowdown == pytest.approx(told["tori"] / told["tideal"], rel=0.005)


@pytest.mark.parametrize("job", ["AR", "ST"])
def test_the_slowest_workers_and_the_last_stage_recover_what_is_published(job):
    """M_W (AR 1.002, ST 0.031) and M_S (AR -0.001, ST 1.219)."""
    told = published(job)

    assert row(job, "slowest").recovered_share == pytest.approx(told["Mw"], abs=0.01)
    assert row(job, "the last").recovered_share == pytest.approx(told["Ms"], abs=0.01)


def test_the_slowed_worker_is_named():
    """Rank 0, of 16 traced ones."""
    assert row("AR", "slowest").ranks == (0,)


@pytest.mark.parametrize("job", ["AR", "ST"])
def test_compute_explains_both_jobs_and_communication_neither(job):
    """As upstream's heat maps show."""
    assert row(job, "compute").recovered_share > 0.9
    assert row(job, "communication").recovered_share < 0.1
