"""Whole runs written as tables, and read back whole or in blocks."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argus_otel._runtime.errors import StoreError
from argus_otel.store import bulk, windows
from argus_otel.store.bulk import write_run
from argus_otel.store.dataset import read_manifest
from argus_otel.store.parquet import ParquetStore
from argus_otel.store.row_groups import RowGroups
from argus_otel.store.windows import StepIndex
from argus_otel.store.writer import ParquetWriter
from argus_otel.tables.schemas import (
    COLLECTIVES,
    DEVICES,
    EVENTS,
    GROUPS,
    HEARTBEATS,
    KERNELS,
    MICRO_BATCHES,
    RANKS,
    STEPS,
    RunSummary,
    RunTables,
)

RUN = "00c0ffee00c0ffee"
TABLES = [
    field.name
    for field in fields(RunTables)
    if field.name not in ("damaged_digests", "kernels", "experts")
]


def rows(schema, *given):
    """Rows of a schema: what is not given is null where it may be, else nothing much."""
    empty = {
        pa.string(): "",
        pa.bool_(): False,
        pa.float64(): 0.5,
        pa.uint64(): 0,
        pa.int32(): 0,
        pa.int64(): 0,
        pa.binary(): b"",
    }
    fixed = {"run": RUN, "attempt": 0}
    made = []
    for row in given:
        made.append(
            {
                field.name: row.get(
                    field.name,
                    fixed.get(field.name, None if field.nullable else empty.get(field.type, [])),
                )
                for field in schema
            }
        )
    return pa.Table.from_pylist(made, schema=schema)


def block(*ordinals, ranks=2, ops=3):
    """Some steps of a small job, with something in every table."""
    pairs = [(ordinal, rank) for ordinal in ordinals for rank in range(ranks)]
    start = 1_000_000_000
    return RunTables(
        ranks=rows(
            RANKS, *({"rank": r, "world_size": ranks, "host": f"h{r}"} for r in range(ranks))
        ),
        steps=rows(
            STEPS,
            *(
                {"ordinal": o, "rank": r, "start_ns": start * (o + 1), "step_s": 0.75,
                 "phases": [{"name": "forward", "start_s": 0.0, "host_s": 0.1, "gpu_s": None}],
                 "trace_id": f"{o:032x}"}
                for o, r in pairs
            ),
        ),
        collectives=rows(
            COLLECTIVES,
            *(
                {"ordinal": o, "rank": r, "group": 7, "op": "all_reduce", "seq": o * ops + n,
                 "count": 1, "arrival_s": n / 8}
                for o, r in pairs
                for n in range(ops)
            ),
        ),
        groups=rows(GROUPS, {"group": 7, "description": "dp", "ranks": list(range(ranks))}),
        events=rows(EVENTS, *({"ordinal": o, "rank": 0, "kind": "gc"} for o in ordinals)),
        micro_batches=rows(MICRO_BATCHES, *({"ordinal": o, "rank": r} for o, r in pairs)),
        devices=rows(DEVICES, *({"ordinal": o, "rank": r, "xid": 79} for o, r in pairs)),
        heartbeats=rows(HEARTBEATS, *({"ordinal": o, "rank": r, "seq": 4} for o, r in pairs)),
    )  # fmt: skip


SUMMARY = RunSummary(
    run=RUN, run_id="night", attempt=0, role="trainer", service="simulated", world_size=0,
    ranks_seen=0, first_ns=0, last_ns=0, steps=0,
)  # fmt: skip


def joined(blocks, table):
    return pa.concat_tables([getattr(part, table) for part in blocks])


def test_a_run_comes_back_as_it_was_written(tmp_path):
    """Every table, from two blocks, whole."""
    given = [block(0, 1), block(2)]

    written = write_run(tmp_path, SUMMARY, given)

    store = ParquetStore(tmp_path)
    read = store.read(store.resolve("night"))
    for table in TABLES:
        whole = given[0] if table in ("ranks", "groups") else None
        expected = getattr(whole, table) if whole else joined(given, table)
        assert getattr(read, table).equals(expected), table
    assert store.runs() == [written]
    assert (written.steps, written.ranks_seen, written.world_size) == (3, 2, 2)
    assert (written.first_ns, written.last_ns) == (1_000_000_000, 3_750_000_000)


def test_kernels_are_read_for_the_ranks_and_steps_asked_for_alone(tmp_path):
    """The largest table by far: whoever reads steps does not read it."""
    given = [
        replace(
            block(*ordinals),
            kernels=rows(
                KERNELS,
                *(
                    {"ordinal": o, "rank": r, "name": name, "stream": 7, "sketch": b"\x01"}
                    for o in ordinals
                    for r in range(2)
                    for name in ("gemm", "attention")
                ),
            ),
        )
        for ordinals in ((0, 1), (2, 3))
    ]
    write_run(tmp_path, SUMMARY, given)
    store = ParquetStore(tmp_path)
    run = store.resolve("night")

    read = store.rows(run, "kernels", (1, 3), [1])

    everything = joined(given, "kernels")
    wanted = [o in (1, 2) and r == 1 for o, r in zip(
        everything["ordinal"].to_pylist(), everything["rank"].to_pylist(), strict=True
    )]  # fmt: skip
    assert read.equals(everything.filter(pa.array(wanted)))
    assert store.rows(run, "kernels", (0, 4)).equals(everything)
    assert store.rows(run, "kernels", (4, 9)).num_rows == 0
    assert store.read(run).kernels.num_rows == 0
    assert all(part.kernels.num_rows == 0 for part in store.blocks(run))


def test_dictionaries_are_written_as_the_strings_they_stand_for(tmp_path):
    """A maker of many rows hands over codes; a reader sees strings all the same."""
    given = block(0)
    coded = given.collectives.set_column(
        COLLECTIVES.get_field_index("op"), "op", given.collectives["op"].dictionary_encode()
    )

    write_run(tmp_path, SUMMARY, [replace(given, collectives=coded)])

    store = ParquetStore(tmp_path)
    assert store.read(store.resolve("night")).collectives.equals(given.collectives)


def test_ranks_and_groups_may_become_known_block_by_block(tmp_path):
    """A converter learns of ranks as it reads: the last row of a rank holds."""
    later = block(1, ranks=3)
    renamed = rows(RANKS, *({"rank": r, "world_size": 3, "host": "new"} for r in range(3)))

    write_run(tmp_path, SUMMARY, [block(0), replace(later, ranks=renamed)])

    store = ParquetStore(tmp_path)
    assert store.read(store.resolve("night")).ranks["host"].to_pylist() == ["new"] * 3


def test_writing_a_run_again_replaces_it(tmp_path):
    """Converting the same trace twice leaves one run, and no files of the first time."""
    write_run(tmp_path, SUMMARY, [block(0, 1)])
    write_run(tmp_path, SUMMARY, [block(5)])

    store = ParquetStore(tmp_path)
    assert [run.steps for run in store.runs()] == [1]
    assert store.read(store.resolve("night")).steps["ordinal"].to_pylist() == [5, 5]
    assert len(list(tmp_path.glob("*/steps/*"))) == 1


def test_what_fails_half_way_leaves_the_store_as_it_was(tmp_path):
    """An error in the maker of the blocks is the caller's; the run of before still reads."""

    def breaking():
        yield block(7)
        raise ZeroDivisionError

    write_run(tmp_path, SUMMARY, [block(0)])
    with pytest.raises(ZeroDivisionError):
        write_run(tmp_path, SUMMARY, breaking())

    store = ParquetStore(tmp_path)
    assert store.read(store.resolve("night")).steps["ordinal"].to_pylist() == [0, 0]
    assert not list(tmp_path.glob("*/*/*.tmp"))


def test_no_blocks_are_refused(tmp_path):
    """A run of nothing would only confuse whoever lists it."""
    with pytest.raises(ValueError, match="at least one block"):
        write_run(tmp_path, SUMMARY, [])

    assert ParquetStore(tmp_path).runs() == []
    assert [path.name for path in tmp_path.iterdir()] == [".writer.lock"]


def test_a_damaged_run_beside_it_does_not_keep_a_run_out(tmp_path, caplog):
    """It is another one's, and is said."""
    (tmp_path / "old-1").mkdir()
    (tmp_path / "old-1/manifest.json").write_text("{")

    assert write_run(tmp_path, SUMMARY, [block(0)]).steps == 1
    assert "old-1" in caplog.text


def test_a_store_that_is_being_served_is_left_alone(tmp_path):
    """One writer a folder."""
    with ParquetWriter(tmp_path), pytest.raises(StoreError, match="in use"):
        write_run(tmp_path, SUMMARY, [block(0)])


def test_spans_can_be_added_to_a_run_written_in_bulk(tmp_path, job_spans):
    """Verdicts are published into the same folder: the tables stay as they are."""
    given = block(0, 1)
    write_run(tmp_path, SUMMARY, [given])

    with ParquetWriter(tmp_path) as writer:
        writer.write(job_spans())

    store = ParquetStore(tmp_path)
    read = store.read(store.resolve("night"))
    assert read.steps.equals(given.steps)
    assert read.heartbeats.equals(given.heartbeats)


def test_blocks_are_whole_steps_in_order(tmp_path, monkeypatch):
    """Rows are read a few steps at a time, and together they are all rows."""
    monkeypatch.setattr(bulk, "_GROUP_ROWS", 6)
    monkeypatch.setattr(windows.StepIndex.windows, "__defaults__", (30,))
    given = [block(0, 1, 2, 3), block(4, 7, 9)]
    write_run(tmp_path, SUMMARY, given)
    store = ParquetStore(tmp_path)

    blocks = list(store.blocks(store.resolve("night")))

    assert len(blocks) > 3
    ordinals = [sorted(set(part.steps["ordinal"].to_pylist())) for part in blocks]
    assert [*itertools.chain(*ordinals)] == [0, 1, 2, 3, 4, 7, 9]
    for table in ("steps", "collectives", "events", "micro_batches", "devices", "heartbeats"):
        assert joined(blocks, table).equals(joined(given, table)), table
    assert all(part.ranks.num_rows == 2 and part.groups.num_rows == 1 for part in blocks)


def test_blocks_bring_only_the_columns_asked_for(tmp_path):
    """And those that say where a row belongs."""
    write_run(tmp_path, SUMMARY, [block(0)])
    store = ParquetStore(tmp_path)

    (part,) = store.blocks(store.resolve("night"), {"collectives": ["duration_s", "seq"]})

    assert part.collectives.column_names == ["ordinal", "rank", "seq", "duration_s"]
    assert part.steps.column_names == STEPS.names


def test_blocks_of_a_run_that_was_received_are_its_tables(tmp_path, job_spans, monkeypatch):
    """Many small files with the same steps in them; events from spans among them."""
    monkeypatch.setattr(windows.StepIndex.windows, "__defaults__", (8,))
    with ParquetWriter(tmp_path) as writer:
        spans = job_spans(steps=range(6))
        for begin in range(0, len(spans), 5):
            writer.write(spans[begin : begin + 5])
        store = ParquetStore(tmp_path)
        run = store.resolve("latest")
        blocks = list(store.blocks(run))
        whole = store.read(run)

    assert len(blocks) > 2
    for table in ("steps", "collectives", "events"):
        assert joined(blocks, table).equals(getattr(whole, table)), table


def test_files_that_were_read_past_are_let_go(tmp_path, job_spans):
    """What they held would add up to the whole run."""
    with ParquetWriter(tmp_path) as writer:  # which merges files when it closes
        for step in range(12):
            writer.write(job_spans(steps=[step]))
        (folder,) = {path.parent for path in tmp_path.glob("*/manifest.json")}
        index = StepIndex(folder, read_manifest(folder))
        held = []
        for window in index.windows(8):
            for table in ("steps", "collectives"):
                index.read(table, window)
            held.append(len(index._readers))

    assert len(held) > 6
    assert max(held) <= 4


def test_a_row_group_that_two_windows_share_is_decoded_once(tmp_path, monkeypatch):
    """Windows go by the table with most rows; those of others reach over their ends."""
    write_run(tmp_path, SUMMARY, [block(*range(8))])
    (folder,) = tmp_path.glob("night-*")
    decoded = []
    read = RowGroups.read

    def counted(groups, numbers):
        decoded.extend((groups._path.parent.name, number) for number in numbers)
        return read(groups, numbers)

    monkeypatch.setattr(RowGroups, "read", counted)
    index = StepIndex(folder, read_manifest(folder))
    windows = index.windows(60)
    rows = [index.read("steps", window) for window in windows]

    assert len(windows) > 1
    assert decoded == [("steps", 0)]
    assert sorted(pa.concat_tables(rows)["ordinal"].unique().to_pylist()) == list(range(8))


def test_a_run_without_steps_still_gives_one_block(tmp_path):
    """Heartbeats alone say that a job hangs before its first step."""
    only = replace(block(0), **{
        table: getattr(block(0), table).slice(0, 0)
        for table in ("steps", "collectives", "events", "micro_batches", "devices")
    })  # fmt: skip
    write_run(tmp_path, replace(SUMMARY, first_ns=5, last_ns=9), [only])
    store = ParquetStore(tmp_path)
    run = store.resolve("night")

    (part,) = store.blocks(run)

    assert part.heartbeats.num_rows == 2
    assert (run.first_ns, run.last_ns, run.steps, run.ranks_seen) == (5, 9, 0, 2)


def test_a_file_without_statistics_is_named(tmp_path):
    """Somebody rewrote a file by other means."""
    write_run(tmp_path, SUMMARY, [block(0)])
    (path,) = tmp_path.glob("*/steps/*.parquet")
    pq.write_table(pq.read_table(path), path, write_statistics=False)
    store = ParquetStore(tmp_path)

    with pytest.raises(StoreError, match="statistics"):
        list(store.blocks(store.resolve("night")))


def test_the_manifest_lists_what_is_there(tmp_path):
    """The layout on disk is the one that `argus serve` writes."""
    write_run(tmp_path, SUMMARY, [block(0)])

    (path,) = tmp_path.glob("night-00c0ffee/manifest.json")
    manifest = json.loads(path.read_bytes())

    assert manifest["schema"] == "argus.store/1"
    assert set(manifest["files"]) == set(TABLES)


def test_windows_hold_no_more_than_they_may(tmp_path):
    """A long row group is cut; a step is not."""
    write_run(tmp_path, SUMMARY, [block(*range(100))])
    (folder,) = tmp_path.glob("night-*")
    store = ParquetStore(tmp_path)
    index = StepIndex(folder, read_manifest(folder))

    found = index.windows(260)

    assert found[0][0] is None
    assert found[-1][1] is None
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert len(found) == 6  # 15 rows a step, over all tables
    assert len(index.windows(1)) == 100
    assert store.runs()
