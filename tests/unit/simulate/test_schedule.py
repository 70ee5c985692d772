"""Pipelines run in the published order, and never wait in a circle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.simulate.schedule import Work, dependency_order, source, stage_order


def test_1f1b_of_four_stages_is_the_published_one():
    """The first stage fills the pipeline, the last alternates from the start."""
    first = [(w.backward, w.micro_batch) for w in stage_order(0, 4, 5)]
    last = [(w.backward, w.micro_batch) for w in stage_order(3, 4, 5)]

    forward, backward = False, True
    assert first == [
        (forward, 0), (forward, 1), (forward, 2), (forward, 3), (backward, 0),
        (forward, 4), (backward, 1), (backward, 2), (backward, 3), (backward, 4),
    ]  # fmt: skip
    assert last == [(kind, m) for m in range(5) for kind in (forward, backward)]


def test_interleaved_stages_send_around_the_ring():
    """The last stage's first chunk feeds the first stage's second one."""
    assert source(Work(0, False, 1, 0), 4, 2) == Work(3, False, 0, 0)
    assert source(Work(3, True, 0, 0), 4, 2) == Work(0, True, 1, 0)
    assert source(Work(0, False, 0, 0), 4, 2) is None


@given(
    stages=st.integers(1, 6), rounds=st.integers(1, 4), chunks=st.integers(1, 3)
)  # fmt: skip
def test_every_pass_comes_once_and_after_what_it_needs(stages, rounds, chunks):
    """Whatever the shape."""
    order = dependency_order(stages, stages * rounds, chunks)

    place = {work: index for index, work in enumerate(order)}
    assert len(place) == len(order) == 2 * stages * stages * rounds * chunks
    for work in order:
        needs = source(work, stages, chunks)
        assert needs is None or place[needs] < place[work]
        if work.backward:
            assert place[work._replace(backward=False)] < place[work]


def test_a_pipeline_shorter_than_its_stages_still_runs():
    """Two micro-batches in four stages."""
    assert len(dependency_order(4, 2)) == 16


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_has_all_its_passes(stage):
    """Forward and backward of each."""
    assert len(stage_order(stage, 3, 6, 2)) == 24
