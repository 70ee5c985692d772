"""One clock: offsets found where many common ends allow it, and not claimed where they do not."""

import numpy as np
import pyarrow as pa
import pytest

from argus_otel.align import align
from argus_otel.tables.schemas import COLLECTIVES, EVENTS, GROUPS, RANKS, STEPS, RunTables

START_NS = 1_800_000_000_000_000_000
STEP_NS = 100_000_000
MS = 1_000_000


def job(groups, offsets_ns, *, steps=60, op="all_reduce", noise_ns=0.0, known_ends=True):
    """Steps in which each group ends one operation at one true moment.

    Args:
        groups: Members of each.
        offsets_ns: By rank: how far its clock is ahead.
    """
    rng = np.random.default_rng(5)
    step_rows, rows = [], []
    for ordinal in range(steps):
        for rank, offset_ns in enumerate(offsets_ns):
            start_ns = START_NS + ordinal * STEP_NS + offset_ns + rank * 7_000
            step_rows.append(
                {
                    "run": "r",
                    "attempt": 0,
                    "ordinal": ordinal,
                    "rank": rank,
                    "start_ns": start_ns,
                    "step_s": 0.06,
                    "between_s": 0.0,
                    "phases": [],
                    "boundary_counts": [],
                    "end_rule": "optimizer",
                    "truncated": False,
                    "drops": 0,
                    "trace_id": "t",
                }
            )
            for group, members in enumerate(groups):
                if rank not in members:
                    continue
                end_ns = START_NS + ordinal * STEP_NS + 30 * MS + group * MS + offset_ns
                end_ns += rng.normal(0, noise_ns)
                arrival_s = 0.01 + rank * 0.001
                duration_s = (end_ns - start_ns) * 1e-9 - arrival_s
                rows.append(
                    {
                        "run": "r",
                        "attempt": 0,
                        "ordinal": ordinal,
                        "rank": rank,
                        "group": group,
                        "op": op,
                        "seq": ordinal,
                        "payload_bytes": 8,
                        "arrival_s": arrival_s,
                        "duration_s": duration_s if known_ends else None,
                        "count": 1,
                        "last_arrival_s": arrival_s,
                    }
                )
    return RunTables(
        ranks=RANKS.empty_table(),
        steps=pa.Table.from_pylist(step_rows, schema=STEPS),
        collectives=pa.Table.from_pylist(rows, schema=COLLECTIVES),
        groups=GROUPS.empty_table(),
        events=EVENTS.empty_table(),
    )


def offsets(tables, column="clock_offset_ns"):
    """By rank: one value for all of its steps."""
    rows = align(tables).steps.select(["rank", column]).to_pylist()
    by_rank = {}
    for row in rows:
        by_rank.setdefault(row["rank"], set()).add(row[column])
    return [value for rank in sorted(by_rank) for value in by_rank[rank]]


def test_a_clock_that_is_ahead_is_found_within_its_error():
    """Rank 2 by 5 ms, with 0.3 ms of noise on every end, as measured with gloo."""
    tables = job([range(4)], [0, 0, 5 * MS, 0], noise_ns=0.3 * MS)

    found, errors = offsets(tables), offsets(tables, "clock_error_ns")

    assert all(0 < error < 0.2 * MS for error in errors)
    for rank, true_ns in enumerate([0, 0, 5 * MS, 0]):
        assert abs(found[rank] - true_ns) < 4 * errors[rank]


def test_two_ranks_differ_by_their_true_difference():
    """The common clock lies between them."""
    assert offsets(job([range(2)], [0, 4 * MS])) == pytest.approx([-2 * MS, 2 * MS], abs=1000)


def test_hosts_that_meet_only_over_some_of_their_ranks_are_put_on_one_clock():
    """Tensor parallel within two hosts, data parallel across; host 1 is 8 ms ahead."""
    across = [(0, 4), (1, 5), (2, 6), (3, 7)]
    tables = job([range(4), range(4, 8), *across], [0] * 4 + [8 * MS] * 4)

    found = offsets(tables)

    assert np.ptp(found[:4]) < 0.01 * MS
    assert np.ptp(found[4:]) < 0.01 * MS
    assert found[4] - found[0] == pytest.approx(8 * MS, abs=0.02 * MS)


@pytest.mark.parametrize(
    "tables",
    [
        job([range(4)], [0, 0, 5 * MS, 0], steps=49),
        job([range(4)], [0, 0, 5 * MS, 0], known_ends=False),
        job([range(4)], [0, 0, 5 * MS, 0], op="broadcast"),
        job([[0], [1], [2], [3]], [0, 0, 5 * MS, 0]),
        job([], [0, 0]),
    ],
    ids=["49 ends", "no known ends", "broadcast", "groups of one", "no collectives"],
)
def test_too_little_to_go_by_leaves_the_clock_unknown(tables):
    """Null, never nought."""
    assert set(offsets(tables)) == {None}
    assert set(offsets(tables, "clock_error_ns")) == {None}


def test_a_rank_without_known_ends_does_not_keep_the_others_from_theirs():
    """It stays unknown alone."""
    tables = job([range(3)], [0, 3 * MS, 0, 0])

    assert offsets(tables)[3] is None
    assert None not in offsets(tables)[:3]
