"""The Parquet store: what is written comes back, once, through restarts, retries and compaction."""

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import duckdb
import pyarrow.parquet as pq
import pytest

from argus_otel._runtime.errors import StoreError
from argus_otel.semconv import names
from argus_otel.store.dataset import MANIFEST
from argus_otel.store.events import KINDS
from argus_otel.store.parquet import ParquetStore
from argus_otel.store.spans import Span, read_origin
from argus_otel.store.writer import ParquetWriter
from argus_otel.tables.schemas import EVENTS, GROUPS, SPANS, RunSummary
from argus_otel.testing.otlp import GROUP, NONCE, resource_of, trace_of
from argus_otel.wire import scopes

OTHER_NONCE = "0123456789abcdef"


def write(folder, *batches, **options):
    with ParquetWriter(folder, **options) as writer:
        for batch in batches:
            writer.write(batch)


@pytest.fixture
def writers():
    """Opens writers, and closes them in the end."""
    with contextlib.ExitStack() as opened:
        yield lambda *where, **options: opened.enter_context(ParquetWriter(*where, **options))


def latest(folder):
    store = ParquetStore(folder)
    return store.read(store.resolve("latest"))


def timeline_span(name, ordinal, rank, start_ns, end_ns, **attributes):
    resource = resource_of(rank, world_size=4)
    return Span(
        origin=read_origin(resource),
        scope=scopes.TIMELINE,
        name=name,
        trace_id=trace_of(ordinal, rank, resource).hex(),
        span_id=f"{start_ns % 2**60:016x}",
        parent_id=None,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=attributes,
    )


def test_a_run_comes_back_whole_and_sorted(tmp_path, job_spans):
    """Four ranks, three steps, sent rank by rank."""
    write(tmp_path, *[job_spans(ranks=[rank]) for rank in (2, 0, 3, 1)])

    tables = latest(tmp_path)

    places = list(
        zip(tables.steps["ordinal"].to_pylist(), tables.steps["rank"].to_pylist(), strict=True)
    )
    assert places == [(step, rank) for step in range(3) for rank in range(4)]
    assert tables.collectives["seq"].to_pylist() == [
        3 * step + bucket for step in range(3) for _rank in range(4) for bucket in range(3)
    ]
    assert tables.ranks["rank"].to_pylist() == [0, 1, 2, 3]
    assert tables.groups.to_pylist() == [
        {
            "run": NONCE,
            "attempt": 0,
            "group": GROUP,
            "description": "default_pg",
            "ranks": [0, 1, 2, 3],
        }
    ]
    assert tables.groups.schema == GROUPS
    assert tables.events.schema == EVENTS
    assert tables.damaged_digests == 0


def test_a_run_is_summed_up_without_reading_its_steps(tmp_path, job_spans):
    """For `argus runs`."""
    write(tmp_path, job_spans(steps=range(5), ranks=[0, 2]))

    assert ParquetStore(tmp_path).runs() == [
        RunSummary(
            run=NONCE,
            run_id="demo",
            attempt=0,
            role="trainer",
            service="training",
            world_size=4,
            ranks_seen=2,
            first_ns=1_800_000_000_000_000_000,
            last_ns=1_800_000_000_460_000_000,
            steps=5,
        )
    ]


def test_runs_and_attempts_share_a_folder_and_stay_apart(tmp_path, job_spans):
    """A restart has another nonce; another job another id."""
    restarted = job_spans(steps=range(2), nonce=OTHER_NONCE, attempt=1)
    for span in restarted:
        span.start_ns += 10**10
        span.end_ns += 10**10
    other = job_spans(steps=range(1), nonce="f" * 16, run_id="../../etc/pass wd")

    write(tmp_path, job_spans(), [*restarted, *other])

    store = ParquetStore(tmp_path)
    assert [(run.run, run.attempt, run.steps) for run in store.runs()] == [
        (OTHER_NONCE, 1, 2),
        (NONCE, 0, 3),
        ("f" * 16, 0, 1),
    ]
    assert store.resolve("demo").run == OTHER_NONCE
    assert store.read(store.resolve(NONCE)).steps.num_rows == 12
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["demo-01234567", "demo-9f2c41d6", "etc_pass_wd-ffffffff"]


def test_two_runs_whose_names_begin_alike_do_not_mix(tmp_path, job_spans):
    """The folder's name has only half of the nonce."""
    twin = NONCE[:8] + "0" * 8

    write(tmp_path, job_spans(), job_spans(steps=range(1), nonce=twin))
    write(tmp_path, job_spans(steps=range(1, 2), nonce=twin))

    store = ParquetStore(tmp_path)
    assert store.read(store.resolve(NONCE)).steps.num_rows == 12
    assert store.read(store.resolve(twin)).steps.num_rows == 8


def test_runs_can_be_limited_to_recent_ones(tmp_path, job_spans):
    """Those that sent something since then."""
    write(tmp_path, job_spans())
    store = ParquetStore(tmp_path)
    (run,) = store.runs()

    assert store.runs(since_ns=run.last_ns) == [run]
    assert store.runs(since_ns=run.last_ns + 1) == []


def test_a_batch_that_is_sent_again_changes_nothing(tmp_path, job_spans):
    """Within one writer's life and after a restart of it."""
    write(tmp_path, job_spans(), job_spans())
    once = latest(tmp_path)
    write(tmp_path, job_spans())

    again = latest(tmp_path)

    assert again.steps.num_rows == 12
    assert again.steps.equals(once.steps)
    assert again.collectives.equals(once.collectives)
    assert again.ranks.equals(once.ranks)
    assert again.groups.equals(once.groups)
    store = ParquetStore(tmp_path)
    assert store.spans(store.resolve("latest")).num_rows == 15


def test_a_restarted_writer_goes_on_where_the_last_one_ended(tmp_path, job_spans):
    """Totals go on as well."""
    write(tmp_path, job_spans(steps=range(3)))
    write(tmp_path, job_spans(steps=range(3, 6)))

    (run,) = ParquetStore(tmp_path).runs()

    assert run.steps == 6
    assert latest(tmp_path).steps.num_rows == 24


def test_what_a_rank_says_later_is_added_to_what_it_said_first(tmp_path, job_spans):
    """Its place on the pipeline is known only once the groups are made."""
    write(
        tmp_path,
        job_spans(steps=[0], ranks=[0]),
        job_spans(steps=[1], ranks=[0], **{names.DL_PIPELINE_PARALLEL_RANK: 3}),
    )

    assert latest(tmp_path).ranks["pp"].to_pylist() == [3]


def test_some_steps_can_be_read_without_the_others(tmp_path, job_spans):
    """Large jobs are read in windows."""
    write(tmp_path, job_spans(steps=range(10)))
    store = ParquetStore(tmp_path)

    tables = store.read(store.resolve("latest"), steps=(4, 6))

    assert set(tables.steps["ordinal"].to_pylist()) == {4, 5}
    assert set(tables.collectives["ordinal"].to_pylist()) == {4, 5}


def test_compaction_changes_the_number_of_files_and_nothing_else(tmp_path, writers, job_spans):
    """Every row is there before and after, in the same order."""
    writer = writers(tmp_path, files_per_size=4)
    for step in range(11):
        writer.write(job_spans(steps=[step]))
    before, files = latest(tmp_path), len(list(tmp_path.glob("*/steps/*.parquet")))

    writer.compact()
    between, fewer = latest(tmp_path), len(list(tmp_path.glob("*/steps/*.parquet")))
    writer.close()
    after = latest(tmp_path)

    assert (files, fewer) == (11, 1)
    for tables in (between, after):
        for name in ("steps", "collectives", "ranks", "groups", "events"):
            assert getattr(tables, name).equals(getattr(before, name)), name
    assert len(list(tmp_path.glob("*/steps/*.parquet"))) == 1


def test_a_reader_overtaken_by_compaction_reads_the_newer_files(
    tmp_path, writers, job_spans, monkeypatch
):
    """It has read the manifest, and the files are merged before it gets to them."""
    writer = writers(tmp_path, files_per_size=2)
    for step in range(4):
        writer.write(job_spans(steps=[step]))
    store = ParquetStore(tmp_path)
    run = store.resolve("latest")
    read_table, overtaken = pq.read_table, []

    def compact_first(*args, **options):
        if not overtaken:
            overtaken.append(True)
            writer.compact()
        return read_table(*args, **options)

    monkeypatch.setattr(pq, "read_table", compact_first)

    tables = store.read(run)

    assert overtaken
    assert tables.steps.num_rows == 16


def test_reading_while_writing_and_compacting_never_sees_a_hole_or_a_double(
    tmp_path, writers, job_spans
):
    """Each read is of one moment: the tables of a batch are there together or not at all."""
    writer = writers(tmp_path, files_per_size=2)
    writer.write(job_spans(steps=[0]))
    store = ParquetStore(tmp_path)
    run = store.resolve("latest")

    def write_all():
        for step in range(1, 20):
            writer.write(job_spans(steps=[step]))
            writer.compact()

    sizes = []
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all)
        while not writing.done():
            tables = store.read(run)
            sizes.append(tables.steps.num_rows)
            assert tables.collectives.num_rows == 3 * tables.steps.num_rows
            steps = tables.steps["ordinal"].to_pylist()
            assert steps == [step for step in range(len(steps) // 4) for _ in range(4)]
        writing.result()

    assert sizes == sorted(sizes)
    assert store.read(run).steps.num_rows == 80


def test_leftovers_of_a_killed_writer_are_ignored_and_then_removed(tmp_path, job_spans):
    """A temporary file, a data file that was never committed, half a manifest."""
    write(tmp_path, job_spans())
    (folder,) = tmp_path.glob("demo-*")
    leftovers = [
        folder / "steps" / "00000099.parquet.tmp",
        folder / "steps" / "00000099.parquet",
        folder / f"{MANIFEST}.tmp",
    ]
    for path in leftovers:
        path.write_bytes(b"half")

    assert latest(tmp_path).steps.num_rows == 12
    write(tmp_path)

    assert [path for path in leftovers if path.exists()] == []
    assert latest(tmp_path).steps.num_rows == 12


@pytest.mark.parametrize("fails_at", range(1, 12))
def test_a_disk_that_refuses_midway_leaves_the_store_as_it_was(
    tmp_path, writers, job_spans, monkeypatch, fails_at
):
    """At whichever write it happens; and the same batch can be written later."""
    writer = writers(tmp_path)
    writer.write(job_spans(steps=[0]))
    fsync, calls = os.fsync, []

    def refuse(descriptor):
        calls.append(descriptor)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    batch = job_spans(steps=[1], nonce=NONCE)
    refused = False
    try:
        writer.write(batch)
    except OSError:
        refused = True
    monkeypatch.setattr(os, "fsync", fsync)
    seen = latest(tmp_path).steps.num_rows

    writer.write(batch)

    # The last call syncs the folder after the manifest is in place: then it counts already.
    assert seen == 4 or not refused or fails_at == len(calls)
    assert latest(tmp_path).steps.num_rows == 8
    assert latest(tmp_path).collectives.num_rows == 24


def test_a_second_writer_is_refused(tmp_path):
    """Two would overwrite each other's manifests."""
    with ParquetWriter(tmp_path), pytest.raises(StoreError, match="in use"):
        ParquetWriter(tmp_path)

    ParquetWriter(tmp_path).close()


def test_a_damaged_manifest_is_an_error_with_a_way_out(tmp_path, job_spans):
    """Exit code 4, not a traceback."""
    write(tmp_path, job_spans())
    next(tmp_path.glob("*/manifest.json")).write_text("{}")

    with pytest.raises(StoreError, match="another schema") as raised:
        ParquetStore(tmp_path).runs()

    assert raised.value.exit_code == 4


def test_damaged_digests_are_counted_once_and_kept_for_a_newer_reader(tmp_path, job_spans):
    """Their packed values stay in the spans table."""
    spans = job_spans(steps=[0])
    spans[1].attributes[names.ARGUS_DIGEST_SYNC] = "damaged"

    write(tmp_path, spans, spans)

    tables = latest(tmp_path)
    assert tables.damaged_digests == 1
    assert tables.steps["rank"].to_pylist() == [1, 2, 3]
    store = ParquetStore(tmp_path)
    rows = store.spans(store.resolve("latest")).to_pylist()
    packed = [row["rank"] for row in rows if names.ARGUS_DIGEST_SYNC in row["attributes"]]
    assert packed == [0]


def test_duckdb_reads_the_files_as_they_are(tmp_path, job_spans):
    """Lists, structures and unsigned keys included, over all runs at once."""
    write(tmp_path, job_spans(), job_spans(steps=range(1), nonce=OTHER_NONCE, run_id="b"))

    steps = duckdb.execute(
        "select run, count(*), max(busy_s), sum(len(phases)) from read_parquet(?) "
        "group by run order by run",
        [f"{tmp_path}/*/steps/*.parquet"],
    ).fetchall()
    lateness = duckdb.execute(
        "select seq, max(arrival_s) - min(arrival_s) from read_parquet(?) "
        'where "group" = ? group by seq order by seq limit 1',
        [f"{tmp_path}/demo-*/collectives/*.parquet", GROUP],
    ).fetchall()

    slowest_s = pytest.approx(0.043)
    assert steps == [(OTHER_NONCE, 4, slowest_s, 16), (NONCE, 12, slowest_s, 48)]
    assert lateness == [(0, pytest.approx(0.0003))]


def test_every_span_is_kept_with_its_attributes_and_step(tmp_path, job_spans):
    """Timelines find their step by trace id; the user's own spans too, whose sender knew no run."""
    phase = timeline_span("forward", 1, 2, 5, 9, note="ü", size=3)
    resource = {"service.name": "training", names.DL_RANK: 2}
    own = replace(phase, origin=read_origin(resource), scope="my.app", name="tokenize")
    own.span_id = "00000000000000aa"
    stranger = replace(own, trace_id="ab" * 16)

    write(tmp_path, [phase, own, stranger], job_spans())

    store = ParquetStore(tmp_path)
    rows = store.spans(store.resolve("latest"), steps=(1, 2))
    assert rows.schema == SPANS
    found = {row["name"]: row for row in rows.to_pylist()}
    assert sorted(found) == ["forward", "rank.step", "tokenize", "train.step"]
    assert json.loads(found["forward"]["attributes"]) == {"note": "ü", "size": 3}
    assert found["forward"]["ordinal"] == found["tokenize"]["ordinal"] == 1
    assert found["tokenize"]["rank"] == 2
    assert found["tokenize"]["run"] is None


@pytest.mark.parametrize("folded_s", [0.02, 2], ids=["seconds", "a whole number"])
def test_a_compilation_is_an_event_with_its_reason_and_the_time_of_all_that_is_folded(
    tmp_path, job_spans, folded_s
):
    """From the first to the last of two there lies other work; a store may drop the ".0"."""
    compiled = timeline_span(
        "compilation",
        1,
        2,
        1_800_000_000_110_000_000,
        1_800_000_000_160_000_000,
        **{
            "code.function.name": "Model.forward",
            names.ARGUS_COMPILATION_REASON: "a size",
            names.ARGUS_FOLD_COUNT: 2,
            names.ARGUS_FOLD_DURATION: folded_s,
        },
    )

    write(tmp_path, [compiled], [], job_spans())

    (event,) = latest(tmp_path).events.to_pylist()
    assert (event["kind"], event["name"], event["detail"], event["duration_s"]) == (
        "compilation", "Model.forward", "a size", folded_s,
    )  # fmt: skip


def test_pauses_and_exceptions_become_events_of_their_step(tmp_path, job_spans):
    """The step that an exception ended has no digest; its trace id still says which it is."""
    pause = timeline_span(
        "gc",
        1,
        2,
        1_800_000_000_110_000_000,
        1_800_000_000_160_000_000,
        **{names.ARGUS_GC_GENERATION: 2},
    )
    fatal = timeline_span(
        "exception",
        3,
        1,
        1_800_000_000_350_000_000,
        1_800_000_000_350_000_000,
        **{"error.type": "OutOfMemoryError", "exception.message": "no room"},
    )

    write(tmp_path, [pause, fatal], [pause], job_spans())

    assert set(KINDS) == {"gc", "compilation", "exception"}
    assert latest(tmp_path).events.to_pylist() == [
        {
            "run": NONCE,
            "attempt": 0,
            "ordinal": 1,
            "rank": 2,
            "kind": "gc",
            "name": "generation 2",
            "start_s": pytest.approx(0.01),
            "duration_s": pytest.approx(0.05),
            "detail": '{"argus.gc.generation":2}',
        },
        {
            "run": NONCE,
            "attempt": 0,
            "ordinal": 3,
            "rank": 1,
            "kind": "exception",
            "name": "OutOfMemoryError",
            "start_s": 0.0,
            "duration_s": 0.0,
            "detail": "no room",
        },
    ]


def test_a_folder_that_is_not_there_is_an_error_that_says_how_to_start(tmp_path):
    """The first thing that a new user meets."""
    with pytest.raises(StoreError, match="argus serve"):
        ParquetStore(tmp_path / "nowhere")


def test_a_file_for_a_store_is_said_to_be_one(tmp_path):
    """Not that it is not there."""
    file = tmp_path / "steps.parquet"
    file.touch()

    with pytest.raises(StoreError, match="is a file; expected a folder"):
        ParquetStore(file)
