"""One step count: shifts that explain everything are undone, the rest is marked, nobody poisoned."""

from dataclasses import replace

import numpy as np
import pytest

from argus_otel.align import align
from argus_otel.store.digests import read_digests
from argus_otel.store.spans import read_request
from argus_otel.store.tables import collectives_table, ranks_table, steps_table
from argus_otel.tables.schemas import EVENTS, GROUPS, STEPS, RunTables
from argus_otel.testing.otlp import digest_request, example_digest, resource_of
from argus_otel.wire.digest import SyncColumns

STEPS_RUN = 12


def tables_of(digests):
    spans = []
    for digest in digests:
        spans += read_request(digest_request([digest], resource_of(digest.rank, world_size=4)))
    received = read_digests(spans).received
    return RunTables(
        ranks=ranks_table({item.origin.rank: item.origin for item in received}.values()),
        steps=steps_table(received),
        collectives=collectives_table(received),
        groups=GROUPS.empty_table(),
        events=EVENTS.empty_table(),
    )


def job(ranks=range(4), steps=range(STEPS_RUN)):
    return [example_digest(step, rank) for rank in ranks for step in steps]


def aligned(tables, **where):
    rows = tables.steps.to_pylist()
    return [
        row["aligned"] for row in rows if all(row[name] == value for name, value in where.items())
    ]


def test_ranks_that_count_alike_are_aligned():
    """The usual case; nothing else changes."""
    tables = tables_of(job())

    result = align(tables)

    assert aligned(result) == [True] * 4 * STEPS_RUN
    assert result.steps.schema == STEPS
    assert result.steps["ordinal"].equals(tables.steps["ordinal"])
    assert result.collectives.equals(tables.collectives)


@pytest.mark.parametrize("shift", [-2, 1, 5])
def test_a_rank_that_counted_more_or_fewer_steps_is_shifted(shift):
    """For example an optimizer that one rank called once for a warm-up."""
    healthy = job(ranks=[0, 2, 3])
    odd = [replace(digest, ordinal=digest.ordinal + 2 + shift) for digest in job(ranks=[1])]
    healthy = [replace(digest, ordinal=digest.ordinal + 2) for digest in healthy]

    result = align(tables_of([*healthy, *odd]))

    assert aligned(result) == [True] * 4 * STEPS_RUN
    for table in (result.steps, result.collectives):
        mine = table.filter(table["rank"].to_numpy() == 1)
        others = table.filter(table["rank"].to_numpy() == 0)
        assert mine["ordinal"].equals(others["ordinal"])
    order = list(
        zip(result.steps["ordinal"].to_pylist(), result.steps["rank"].to_pylist(), strict=True)
    )
    assert order == sorted(order)


def test_two_ranks_that_differ_by_a_constant_meet():
    """With no majority the lowest rank's count holds."""
    odd = [replace(digest, ordinal=digest.ordinal + 1) for digest in job(ranks=[1])]

    result = align(tables_of([*job(ranks=[0]), *odd]))

    assert result.steps["ordinal"].to_pylist() == sorted(2 * list(range(STEPS_RUN)))
    assert aligned(result) == [True] * 2 * STEPS_RUN


def test_a_rank_whose_difference_changes_midway_is_marked_from_there_on():
    """No one shift explains it, so its later steps are not compared with anybody's."""
    odd = [
        replace(digest, ordinal=digest.ordinal + (1 if digest.ordinal >= 6 else 0))
        for digest in job(ranks=[1])
    ]

    result = align(tables_of([*job(ranks=[0, 2, 3]), *odd]))

    assert aligned(result, rank=1)[:6] == [True] * 6
    assert False in aligned(result, rank=1)[6:]
    assert True not in aligned(result, rank=1)[6:]
    for rank in (0, 2, 3):
        assert aligned(result, rank=rank) == [True] * STEPS_RUN


def test_a_rank_with_missing_steps_does_not_poison_the_others():
    """Dropped digests: everybody else is compared with whoever is there."""
    present = [d for d in job() if d.rank != 1 or d.ordinal not in (0, 3, 4, 9)]

    result = align(tables_of(present))

    assert aligned(result) == [True] * (4 * STEPS_RUN - 4)
    assert result.steps.num_rows == 4 * STEPS_RUN - 4


def test_a_step_that_overflowed_is_not_held_against_its_rank():
    """Its first collectives were lost, so its count starts too high."""
    digests = job()
    lossy = next(digest for digest in digests if (digest.rank, digest.ordinal) == (1, 5))
    lossy.truncated = True
    lossy.sync.start_counts = lossy.sync.start_counts + 2

    result = align(tables_of(digests))

    assert aligned(result, rank=1, ordinal=5) == [None]
    assert aligned(result).count(True) == 4 * STEPS_RUN - 1


def test_one_rank_alone_cannot_be_compared():
    """Null, which is not the same as false."""
    assert aligned(align(tables_of(job(ranks=[0])))) == [None] * STEPS_RUN


def test_a_group_that_was_used_once_proves_nothing():
    """Its count is the same at every ordinal."""

    def with_count(digest):
        sync = digest.sync
        return replace(digest, sync=replace_counts(sync, np.ones_like(sync.start_counts)))

    def replace_counts(sync, counts):
        return SyncColumns(
            group_keys=sync.group_keys,
            start_counts=counts,
            group=sync.group,
            op=sync.op,
            payload_bytes=sync.payload_bytes,
            peer=sync.peer,
            phase=sync.phase,
            arrival_us=sync.arrival_us,
            duration_us=sync.duration_us,
        )

    result = align(tables_of([with_count(digest) for digest in job()]))

    assert aligned(result) == [None] * 4 * STEPS_RUN


def test_a_window_of_a_run_is_aligned_like_the_whole():
    """Detectors read slices."""
    tables = tables_of(job())
    window = replace(
        tables, steps=tables.steps.slice(8, 20), collectives=tables.collectives.slice(24, 60)
    )

    assert aligned(align(window)) == [True] * 20


def test_nothing_stays_nothing():
    """An empty store."""
    assert align(tables_of([])).steps.num_rows == 0
