"""What must hold for any run: units, numbering and company do not decide who is slow."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose
from argus_otel.testing.cases import build_run

DETECTORS = load_detectors(bundled_path("detectors"))
SECONDS = ("step_s", "between_s", "busy_s", "cpu_s", "run_delay_s", "data_wait_s", "gc_s")

few_examples = settings(max_examples=25)
sizes = st.integers(2, 12)
factors = st.sampled_from([1.0, 1.04, 1.12, 1.3, 2.0])
seeds = st.integers(0, 1000)


def case(ranks, factor, seed, *, jitter=0.02):
    """Rank 1 takes ``factor`` times as long from step 20 on."""
    return {
        "ranks": ranks,
        "steps": 45,
        "seed": seed,
        "base": {"jitter": jitter},
        "topology": {"dp": list(range(ranks))},
        "changes": [{"ranks": [1], "steps": [20, 45], "own_times": factor}],
    }


def culprits(tables):
    """Cause and ranks of all findings."""
    findings = diagnose(tables, DETECTORS).diagnosis.findings
    return sorted((finding.cause, finding.ranks) for finding in findings)


@few_examples
@given(sizes, factors, seeds, st.sampled_from([1e-3, 60.0, 1e3]))
def test_findings_do_not_depend_on_the_time_unit(ranks, factor, seed, unit):
    """Seconds, milliseconds or minutes: the same ranks are slow."""
    tables = build_run(case(ranks, factor, seed))
    steps = tables.steps
    for name in SECONDS:
        scaled = pa.array(steps[name].to_numpy() * unit)
        steps = steps.set_column(steps.schema.get_field_index(name), steps.field(name), scaled)

    assert culprits(replace(tables, steps=steps)) == culprits(tables)


@few_examples
@given(sizes, factors, seeds)
def test_findings_follow_the_ranks_when_they_are_renumbered(ranks, factor, seed):
    """Nobody is slow because of a number."""
    tables = build_run(case(ranks, factor, seed))
    new = np.random.default_rng(seed).permutation(ranks)
    rank = pa.array(new[tables.steps["rank"].to_numpy()].astype(np.int32))
    place = tables.steps.schema.get_field_index("rank")
    steps = tables.steps.set_column(place, tables.steps.field("rank"), rank)
    moved = replace(tables, steps=steps.sort_by([("ordinal", "ascending"), ("rank", "ascending")]))

    renumbered = sorted((cause, tuple(sorted(new[list(r)]))) for cause, r in culprits(tables))

    assert culprits(moved) == renumbered


@few_examples
@given(sizes, st.integers(1, 12), factors, seeds)
def test_healthy_ranks_that_join_are_never_blamed(ranks, more, factor, seed):
    """Company may hide a small fault (the bar rises), but makes no new one."""
    alone = {cause for cause, _ in culprits(build_run(case(ranks, factor, seed)))}

    together = culprits(build_run(case(ranks + more, factor, seed)))

    assert all(named == (1,) for _, named in together)
    if factor == 1.0:
        assert together == []
    assert {cause for cause, _ in together} <= alone | {"compute_straggler"}


@few_examples
@given(sizes, st.floats(1.0, 2.0), st.floats(1.0, 1.5), seeds)
def test_a_larger_fault_is_found_where_a_smaller_one_was(ranks, factor, further, seed):
    """If 1.2 times is found, so is 1.5 times."""
    smaller = culprits(build_run(case(ranks, factor, seed)))

    larger = culprits(build_run(case(ranks, factor * further, seed)))

    assert set(smaller) <= set(larger)
