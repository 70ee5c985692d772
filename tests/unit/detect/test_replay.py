"""A replayed step takes as long as the measured one, and waits for what the measured one waited for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from argus_otel.detect.lines import OTHER
from argus_otel.detect.moments import MomentsBuilder
from argus_otel.detect.replay import build_graph, critical_time, periods, replay, step_times
from argus_otel.detect.run import run_of
from argus_otel.testing.cases import build_run


@cache
def simulated(cluster, *faults, steps=24, unknown=(), **options):
    about = {"cluster": cluster, "steps": steps, "seed": 3, "faults": list(faults), **options}
    return run_of(build_run({"simulate": about, "unknown": list(unknown)}))


def settled(run):
    return run.ordinals_A[run.ordinals_A >= 12]


@pytest.mark.parametrize(
    "cluster", ["ddp-8", "pipeline-32", "interleaved-32", "moe-64", "fsdp-64", "hsdp-64"]
)
def test_the_replay_of_what_was_measured_takes_as_long_as_was_measured(cluster):
    """Within 2 % in every step, whatever the parallelism."""
    run = simulated(cluster)
    graph = build_graph(run, settled(run))

    assert graph is not None
    assert graph.measured_S.size == 12
    np.testing.assert_allclose(periods(graph), graph.measured_S, rtol=0.02)


@pytest.mark.parametrize(
    "fault",
    [
        "compute:rank=9,factor=1.7,from=0",
        "stage:stage=2,factor=1.4,from=0",
        "link:host=1,factor=6,from=0",
        "input:rank=3,extra_s=0.1,from=0",
        "gc:pause_s=0.1,every=3",
    ],
)
def test_a_sick_job_is_replayed_as_faithfully(fault):
    """The graph is read off the sick run's own times."""
    run = simulated("pipeline-32", fault)
    graph = build_graph(run, settled(run))

    np.testing.assert_allclose(periods(graph), graph.measured_S, rtol=0.02)


@pytest.mark.parametrize(
    "options",
    [{"lost_rows": 0.02}, {"topology_known": False}, {"clock_offset_s": 0.05}, {"noise": 0.1}],
    ids=lambda options: next(iter(options)),
)
def test_lost_rows_unknown_places_and_wrong_clocks_change_little(options):
    """No rank's clock is compared with another's, and what is missing is what is usual."""
    run = simulated("pipeline-32", **options)
    graph = build_graph(run, settled(run))

    assert graph is not None
    assert abs(np.median(periods(graph) / graph.measured_S) - 1) < 0.02


def test_a_receive_is_waited_for_by_the_pass_that_needs_it():
    """A later start of the first stage moves the last stage's end by as much."""
    run = simulated("pipeline-32")
    graph = build_graph(run, settled(run))
    first = next(kind for kind in graph.kinds if 0 in kind.ranks_G)
    last = next(kind for kind in graph.kinds if 31 in kind.ranks_G)
    later = graph.weight_NS.copy()
    later[first.nodes_GJ[:, 0]] += 0.5

    moved = replay(graph, later) - replay(graph)

    assert moved[last.nodes_GJ[:, -1]] == pytest.approx(0.5, abs=0.03)


def test_a_collective_begins_with_its_last_member():
    """One rank that is later by a second holds every other rank up by that."""
    run = simulated("fsdp-64")
    graph = build_graph(run, settled(run))
    (kind,) = graph.kinds
    later = graph.weight_NS.copy()
    later[kind.nodes_GJ[5, 0]] += 1.0

    moved = replay(graph, later)[graph.ends_R] - replay(graph)[graph.ends_R]

    assert moved.min() > 0.95


def test_passes_are_as_long_as_they_were_reported():
    """What their compute is, operations inside or not."""
    run = simulated("moe-64")
    graph = build_graph(run, settled(run))

    for kind in graph.kinds:
        for label in np.unique(kind.label_J[kind.label_J != OTHER]).tolist():
            took = graph.weight_NS[kind.nodes_GJ[:, kind.label_J == label]].sum(axis=1)
            told = run.passes.duration_ARM2.reshape(*run.present_AR.shape, -1)
            np.testing.assert_allclose(
                took.T, told[graph.steps_S][:, kind.ranks_G, label], rtol=0.01, atol=1e-4
            )


def test_the_longest_path_adds_up_to_the_step():
    """Own times and transfers along it leave nothing over."""
    run = simulated("interleaved-32")
    graph = build_graph(run, settled(run))

    own_SR, transfer_SL = critical_time(graph, graph.weight_NS)

    np.testing.assert_allclose(own_SR.sum(axis=1) + transfer_SL.sum(axis=1), step_times(graph))


def test_nothing_is_replayed_where_ends_are_not_known():
    """Waiting could not be told from work."""
    run = simulated("pipeline-32", unknown=("ends",))

    assert build_graph(run, settled(run)) is None


def test_a_run_without_collectives_is_not_replayed():
    """Nobody waits for anybody."""
    run = run_of(build_run({"ranks": 4, "steps": 30, "collectives": {}}))

    assert build_graph(run, settled(run)) is None


def test_a_run_too_large_is_kept_in_every_second_step_and_so_on():
    """What is left is spread over the whole run."""
    builder = MomentsBuilder(most_kept=100)
    rank, lane = np.repeat(np.arange(5), 4), np.tile(np.arange(4), 5)
    times = np.zeros(20, dtype=np.float32)
    for ordinal in range(33):
        builder.add(ordinal, rank, lane, times, times)

    moments = builder.build()

    assert moments.ordinals().tolist() == [0, 8, 16, 24, 32]
    assert len(moments.layouts) == 1


def test_operations_without_steps_cannot_be_replayed_and_say_so():
    """A flight recorder's dump: collectives of a step that nobody has a row of."""
    tables = build_run({"simulate": {"cluster": "ddp-8", "steps": 12}})
    run = run_of(replace(tables, steps=tables.steps.slice(0, 0)))

    assert build_graph(run, np.arange(12)) is None
