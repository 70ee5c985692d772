"""Digests as tables: every number where the schema says, unknown as null, nothing twice."""

import math

import numpy as np
import pytest

from argus_otel.semconv import names
from argus_otel.store.digests import read_digests
from argus_otel.store.spans import read_request
from argus_otel.store.tables import collectives_table, ranks_table, steps_table
from argus_otel.tables.schemas import COLLECTIVES, RANKS, STEPS
from argus_otel.testing.otlp import GROUP, NONCE, digest_request, example_digest, resource_of
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.digest import PhaseColumns, SyncColumns, fold_sync


def received(*digests, **resource):
    spans = []
    for digest in digests:
        identity = resource_of(digest.rank, world_size=4, **resource)
        spans += read_request(digest_request([digest], identity))
    return read_digests(spans)


def sync(rows, *, start_counts, channels=()):
    """Columns from (group index, op, peer, arrival in µs, duration in µs) rows."""
    group, op, peer, arrival, duration = (np.array(column) for column in zip(*rows, strict=True))
    return SyncColumns(
        group_keys=np.arange(1, len(start_counts) + 1, dtype=np.uint64),
        start_counts=np.array(start_counts),
        channels=np.array(channels, np.int64).reshape(-1, 4),
        group=group,
        op=np.array([OPS.index(name) for name in op]),
        payload_bytes=np.full(group.size, 8),
        peer=peer,
        phase=np.full(group.size, -1),
        arrival_us=arrival,
        duration_us=duration,
    )


def test_a_step_becomes_one_row_with_everything_that_its_digest_says():
    """Compared whole: a column that is forgotten or in another unit shows."""
    found = received(example_digest(7, 2, keep="slow", gc_s=0.25, gc_count=2, drops=3))

    table = steps_table(found.received)

    assert table.schema == STEPS
    row = table.to_pylist()[0]
    assert row.pop("trace_id") == found.received[0].trace_id
    assert row == {
        "run": NONCE,
        "attempt": 0,
        "ordinal": 7,
        "rank": 2,
        "iteration": 1007,
        "start_ns": 1_800_000_000_700_000_000,
        "step_s": pytest.approx(0.06),
        "between_s": 0.002,
        "busy_s": 0.042,
        "cpu_s": 0.039,
        "run_delay_s": None,
        "data_wait_s": 0.001,
        "gc_s": 0.25,
        "gc_count": 2,
        "phases": [
            {"name": "data.wait", "start_s": 0.0, "host_s": 0.001, "gpu_s": None},
            {"name": "forward", "start_s": 0.001, "host_s": 0.019, "gpu_s": None},
            {"name": "backward", "start_s": 0.02, "host_s": 0.035, "gpu_s": None},
            {"name": "optimizer.step", "start_s": 0.055, "host_s": 0.005, "gpu_s": None},
        ],
        "tokens": None,
        "samples": None,
        "sum_len2": None,
        "memory_bytes": None,
        "boundary_counts": [{"group": GROUP, "count": 21}],
        "end_rule": "optimizer",
        "keep": "slow",
        "truncated": False,
        "drops": 3,
        "self_cpu_s": None,
        "aligned": None,
        "clock_offset_ns": None,
        "clock_error_ns": None,
    }


def test_a_collective_becomes_one_row_numbered_from_its_groups_creation():
    """Step 2 of a job with three buckets: the seventh, eighth and ninth."""
    table = collectives_table(received(example_digest(2, 1)).received)

    assert table.schema == COLLECTIVES
    assert table["seq"].to_pylist() == [6, 7, 8]
    assert table.to_pylist()[1] == {
        "run": NONCE,
        "attempt": 0,
        "ordinal": 2,
        "rank": 1,
        "group": GROUP,
        "op": "all_reduce",
        "seq": 7,
        "peer": None,
        "phase": "backward",
        "payload_bytes": 1 << 20,
        "arrival_s": 0.0251,
        "duration_s": pytest.approx(0.0019),
        "count": 1,
        "last_arrival_s": 0.0251,
        "min_duration_s": pytest.approx(0.0019),
    }


def test_an_unknown_duration_is_null_and_not_minus_one():
    """Most operations of gloo have no known end."""
    columns = sync([(0, "all_reduce", -1, 5, -1), (0, "barrier", -1, 9, 0)], start_counts=[0])

    table = collectives_table(received(example_digest(0, 0, sync=columns)).received)

    assert table["duration_s"].to_pylist() == [None, 0.0]
    assert table["min_duration_s"].to_pylist() == [None, 0.0]
    assert table["phase"].to_pylist() == [None, None]


def test_each_group_and_each_digest_counts_for_itself():
    """Two groups interleaved, on two ranks that stand at different counts."""
    rows = [(0, "all_reduce", -1, 1, 1), (1, "all_gather", -1, 2, 1), (0, "barrier", -1, 3, 1)]
    first = example_digest(0, 0, sync=sync(rows, start_counts=[10, 100]))
    second = example_digest(0, 1, sync=sync(rows, start_counts=[20, 200]))

    table = collectives_table(received(first, second).received)

    assert table["seq"].to_pylist() == [10, 100, 11, 20, 200, 21]
    assert table["group"].to_pylist() == [1, 2, 1, 1, 2, 1]


def test_point_to_point_counts_by_channel_and_not_with_the_groups_collectives():
    """Rank 1 of a pipeline: what it receives from 0 and what it sends to 2 are two channels."""
    rows = [
        (0, "recv", 0, 1, 1),
        (0, "all_reduce", -1, 2, 1),
        (0, "send", 2, 3, 1),
        (0, "recv", 0, 4, 1),
        (0, "all_reduce", -1, 5, 1),
    ]
    columns = sync(rows, start_counts=[50], channels=[(0, 0, 1, 7), (0, 1, 2, 30)])

    table = collectives_table(received(example_digest(0, 1, sync=columns)).received)

    assert table["seq"].to_pylist() == [7, 50, 30, 8, 51]
    assert table["peer"].to_pylist() == [0, None, 2, 0, None]


def test_a_channel_that_the_digest_does_not_list_has_no_number():
    """Nought would claim that nothing went before."""
    columns = sync([(0, "send", 2, 3, 1)], start_counts=[0], channels=[(0, 1, 3, 5)])

    table = collectives_table(received(example_digest(0, 1, sync=columns)).received)

    assert table["seq"].to_pylist() == [None]


def test_operations_of_a_step_that_overflowed_have_no_numbers():
    """Some are missing, and nobody knows which; a wrong number would pair strangers."""
    table = collectives_table(received(example_digest(2, 1, truncated=True)).received)

    assert table["seq"].to_pylist() == [None, None, None]


def test_a_folded_digest_gives_rows_that_stand_for_several_operations():
    """Where a step has too many collectives for a vector."""
    rows = [(0, "all_reduce", -1, 10, 4), (0, "all_reduce", -1, 30, -1), (0, "barrier", -1, 50, 6)]
    columns = fold_sync(sync(rows, start_counts=[5]))

    table = collectives_table(received(example_digest(0, 0, sync=columns)).received)

    by_op = {row["op"]: row for row in table.to_pylist()}
    assert by_op["all_reduce"]["count"] == 2
    assert by_op["all_reduce"]["seq"] is None
    assert by_op["all_reduce"]["payload_bytes"] == 16
    assert by_op["all_reduce"]["arrival_s"] == 10e-6
    assert by_op["all_reduce"]["last_arrival_s"] == 30e-6
    assert by_op["all_reduce"]["duration_s"] == 4e-6
    assert by_op["all_reduce"]["min_duration_s"] == 4e-6
    assert by_op["barrier"]["count"] == 1


def test_phases_that_a_user_named_keep_their_names_beside_each_other():
    """Two ranks with different names of their own in one table."""

    def named(rank, *own):
        phases = PhaseColumns(
            name=np.array([len(PHASES), 2]),
            start_us=np.array([0, 5]),
            duration_us=np.array([5, 5]),
            names=(*PHASES, *own),
        )
        return example_digest(0, rank, phases=phases)

    table = steps_table(received(named(0, "rollout"), named(1, "reward")).received)

    assert [[phase["name"] for phase in row] for row in table["phases"].to_pylist()] == [
        ["rollout", "forward"],
        ["reward", "forward"],
    ]


def test_rows_are_sorted_by_step_then_rank_however_they_came():
    """Ranks send at their own pace."""
    digests = [example_digest(step, rank) for step, rank in [(1, 0), (0, 3), (1, 1), (0, 1)]]

    table = steps_table(received(*digests).received)

    pairs = zip(table["ordinal"].to_pylist(), table["rank"].to_pylist(), strict=True)
    assert list(pairs) == [(0, 1), (0, 3), (1, 0), (1, 1)]


def test_a_step_that_came_twice_is_there_once():
    """A batch is sent again when its answer got lost."""
    found = received(example_digest(0, 0), example_digest(0, 0), example_digest(0, 1))

    assert [item.digest.rank for item in found.received] == [0, 1]


def test_a_number_that_is_none_is_null():
    """NaN would poison every mean downstream."""
    table = steps_table(received(example_digest(0, 0, busy_s=math.nan)).received)

    assert table["busy_s"].to_pylist() == [None]


def damaged(attributes=None, **times):
    identity = resource_of(0, world_size=4)
    spans = list(read_request(digest_request([example_digest(0, 0)], identity)))
    for name, value in (attributes or {}).items():
        spans[1].attributes[name] = value
    for name, value in times.items():
        setattr(spans[1], name, value)
    return spans


@pytest.mark.parametrize(
    "spans",
    [
        damaged({names.ARGUS_DIGEST_SYNC: "not base64!"}),
        damaged({names.ARGUS_DIGEST_SYNC: "AQAB"}),
        damaged({names.ARGUS_DIGEST_PHASES: "/w8="}),
        damaged({names.DL_RANK: None}),
        damaged({names.DL_RANK: 2**40}),
        damaged({names.DL_RANK: -1}),
        damaged({names.ARGUS_STEP_ORDINAL: 2**62}),
        damaged({names.ARGUS_STEP_BUSY: ["a", "list"]}),
        damaged({names.DL_ITERATION: 1e300}),
        damaged(end_ns=5),
    ],
)
def test_a_damaged_digest_is_counted_and_costs_the_others_nothing(spans):
    """Whatever is in it: the batch it came with is stored."""
    healthy = read_request(digest_request([example_digest(0, 1)], resource_of(1, world_size=4)))

    found = read_digests([*spans, *healthy])

    assert found.damaged == 1
    assert [item.digest.rank for item in found.received] == [1]


def test_a_collective_of_a_group_that_is_not_listed_damages_the_digest():
    """The index would point into another rank's groups."""
    columns = sync([(1, "all_reduce", -1, 1, 1)], start_counts=[0])

    assert received(example_digest(0, 0, sync=columns)).damaged == 1


def test_no_digests_make_empty_tables_of_the_same_schema():
    """So that nobody downstream has to ask first."""
    assert steps_table([]).schema == STEPS
    assert collectives_table([]).schema == COLLECTIVES
    assert ranks_table([]).schema == RANKS


def test_a_rank_says_where_it_runs_and_its_place_on_the_axes():
    """Compared whole."""
    found = received(
        example_digest(0, 3), **{names.DL_PIPELINE_PARALLEL_RANK: 1, "hw.id": "GPU-1", "attempt": 2}
    )

    table = ranks_table(item.origin for item in found.received)

    assert table.schema == RANKS
    assert table.to_pylist() == [
        {
            "run": NONCE,
            "run_id": "demo",
            "attempt": 2,
            "rank": 3,
            "world_size": 4,
            "role": "trainer",
            "host": "node-0",
            "local_rank": 3,
            "pid": 1003,
            "gpu": "GPU-1",
            "dp": None,
            "tp": None,
            "pp": 1,
            "ep": None,
            "cp": None,
            "nonce_local": False,
        }
    ]
