"""ByteDance's operation traces: two real jobs, and files that are none."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from argus_otel.convert.bytedance import convert_bytedance
from argus_otel.convert.sources import SourceError


@pytest.fixture(scope="session")
def runs(data, stored):
    return stored(convert_bytedance([data / "bytedance"]))


@pytest.fixture(scope="session")
def lopsided(runs):
    """8 GPUs, 2 replicas of 4 stages; the last stage holds too much."""
    return runs["ST"]


@pytest.fixture(scope="session")
def one_slow(runs):
    """64 GPUs, 4 replicas of 4 stages, tensor-parallel over 4; worker 0 is slow."""
    return runs["AR"]


@pytest.fixture
def trace(data, tmp_path):
    """Write a changed copy of a real trace; gives its path."""

    def write(change=lambda table: table, name="trace-X.parquet"):
        path = tmp_path / name
        pq.write_table(change(pq.read_table(data / "bytedance/trace-ST.parquet")), path)
        return path

    return write


def busy_of(run):
    """Median busy time of each rank."""
    steps = run.tables.steps
    return {
        rank: float(np.median(steps.filter(pc.equal(steps["rank"], rank))["busy_s"]))
        for rank in run.tables.ranks["rank"].to_pylist()
    }


def test_every_operation_is_used(lopsided, one_slow):
    """Nothing of the real traces is dropped."""
    assert (lopsided.account.read, lopsided.account.unmapped) == (6784, {})
    assert (one_slow.account.read, one_slow.account.unmapped) == (117_216, {})


def test_figures_of_the_lopsided_job(lopsided):
    """Its tables have as many rows as the trace has operations of each kind."""
    tables = lopsided.tables

    assert (lopsided.summary.ranks_seen, lopsided.summary.steps) == (8, 32)
    assert tables.steps.num_rows == 256
    assert tables.collectives.num_rows == 4224
    assert tables.micro_batches.num_rows == 2048
    assert tables.events.num_rows == 256
    assert len(set(tables.steps["ordinal"].to_pylist())) == 32


def test_figures_of_the_job_with_a_slow_worker(one_slow):
    """One rank of each tensor-parallel group was traced; the steps are not contiguous."""
    tables = one_slow.tables
    ordinals = sorted(set(tables.steps["ordinal"].to_pylist()))

    assert tables.ranks["rank"].to_pylist() == list(range(0, 64, 4))
    assert (len(ordinals), ordinals[:3], ordinals[-1]) == (44, [16, 21, 27], 1238)
    assert tables.collectives.num_rows == 70_752
    assert tables.micro_batches.num_rows == 45_056
    assert any("16 of 64 ranks" in note for note in one_slow.account.notes)


def test_ranks_have_their_places(one_slow):
    """Stage and replica are in the trace, the tensor-parallel place follows from the layout."""
    (rank,) = one_slow.rows("ranks", rank=24)

    assert (rank["pp"], rank["dp"], rank["tp"], rank["host"]) == (1, 2, 0, "")


def test_groups_are_those_that_end_together(one_slow):
    """Gradients within a stage, embeddings between the first and last stage, the clip everywhere."""
    one_slow.group("dp", 16, 20, 24, 28)
    one_slow.group("embedding", 8, 56)
    one_slow.group("world", *range(64))
    one_slow.group("tp", 20, 21, 22, 23)
    one_slow.group("pp", 4, 20, 36, 52)

    assert one_slow.tables.groups.num_rows == 4 + 4 + 1 + 16 + 4


def test_members_of_a_collective_meet_at_one_count_and_end_together(one_slow):
    """By group and count, without looking at the clock."""
    starts = {(r["ordinal"], r["rank"]): r["start_ns"] for r in one_slow.rows("steps")}
    key = one_slow.group("dp", 16, 20, 24, 28)
    ends = {}
    for row in one_slow.rows("collectives", group=key, op="reduce_scatter"):
        end = starts[row["ordinal"], row["rank"]] * 1e-9 + row["arrival_s"] + row["duration_s"]
        ends.setdefault(row["seq"], []).append(end)

    assert len(ends) == 44
    assert {len(some) for some in ends.values()} == {4}
    assert max(max(some) - min(some) for some in ends.values()) < 0.005


def test_a_send_meets_its_receive(lopsided):
    """Both ends name the other one, and count alike."""
    sends = {(r["rank"], r["peer"], r["seq"]) for r in lopsided.rows("collectives", op="send")}
    receives = {(r["peer"], r["rank"], r["seq"]) for r in lopsided.rows("collectives", op="recv")}

    assert len(sends) == 1536
    assert sends == receives
    assert {(source, target) for source, target, _ in sends} == {
        pair
        for stage in range(3)
        for place in range(2)
        for pair in (
            (stage * 2 + place, stage * 2 + 2 + place),
            (stage * 2 + 2 + place, stage * 2 + place),
        )
    }


def test_the_slow_worker_is_busy_and_the_others_wait(one_slow):
    """What a rank waits for in something that was not traced is no work of its own."""
    busy = busy_of(one_slow)
    slow = busy.pop(0)

    assert slow == pytest.approx(45.46, abs=0.05)
    assert max(busy.values()) < 20.5
    assert slow / np.median(list(busy.values())) > 2.3


def test_the_last_stage_is_busy_and_the_others_wait(lopsided):
    """As the study found: it computes 1.6 times as long."""
    busy = busy_of(lopsided)

    assert [busy[rank] for rank in range(6)] == pytest.approx([0.92] * 6, abs=0.01)
    assert [busy[6], busy[7]] == pytest.approx([1.45, 1.46], abs=0.02)


def test_a_mark_of_a_collection_says_when_and_not_how_long(lopsided):
    """All of them have length 0 in the trace."""
    step = lopsided.rows("steps", ordinal=23, rank=3)[0]

    assert (step["gc_count"], step["gc_s"]) == (1, None)


def test_what_the_trace_does_not_say_is_null(lopsided):
    """No CPU time, no memory, no input: not 0."""
    step = lopsided.rows("steps", ordinal=23, rank=0)[0]

    for name in ("cpu_s", "run_delay_s", "data_wait_s", "tokens", "memory_bytes", "iteration"):
        assert step[name] is None, name


def test_the_same_file_gives_the_same_run(data):
    """So that converting it again replaces it."""
    path = data / "bytedance/trace-ST.parquet"

    first, again, other = (
        convert_bytedance([path], run_id=name)[0].summary.run for name in (None, None, "other")
    )

    assert first == again != other


def test_without_a_meta_file_sizes_are_the_least_possible(trace, stored):
    """And it is said."""
    run = stored(convert_bytedance([trace()]))["trace-X"]

    assert run.summary.world_size == 8
    assert any("no meta file" in note for note in run.account.notes)


def test_operations_of_a_kind_that_is_not_known_are_counted(trace, stored):
    """Not lost without a word."""

    def rename(table):
        names = pc.replace_substring(
            table["optype"].cast(pa.string()), "params-all-gather", "moe-all-to-all"
        )
        return table.set_column(table.schema.get_field_index("optype"), "optype", names)

    run = stored(convert_bytedance([trace(rename)]))["trace-X"]

    assert run.account.unmapped == {"moe-all-to-all": 256}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["seq_id"]), "without the column seq_id"),
        (lambda t: t.slice(0, 0), "empty"),
        (lambda t: t.set_column(2, "rank", pa.array(["x"] * t.num_rows)), "of other types"),
        (lambda t: t.set_column(2, "rank", pa.array([-1] * t.num_rows)), "rank out of range"),
        (lambda t: t.set_column(5, "start_ts", pa.nulls(t.num_rows, pa.float32())), "start_ts"),
        (lambda t: t.set_column(2, "rank", pa.array(range(t.num_rows))), "two worlds"),
        (lambda t: t.set_column(1, "stage", pa.array([10**9] * t.num_rows)), "stage out of range"),
        (lambda t: t.set_column(6, "duration", pa.array([1e30] * t.num_rows)), "duration out of"),
    ],
)
def test_what_is_no_such_trace_is_named(trace, change, message):
    """What, where, what was expected."""
    path = trace(change)

    with pytest.raises(SourceError, match=message) as error:
        convert_bytedance([path])

    assert str(path) in str(error.value)


def test_a_file_cut_short_is_named_or_left_out(data, tmp_path, stored):
    """The rest is converted where that was asked for."""
    whole = (data / "bytedance/trace-ST.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:20_000])
    (tmp_path / "b.parquet").write_bytes(whole)

    with pytest.raises(SourceError, match=r"a\.parquet is not readable"):
        convert_bytedance([tmp_path])
    run = stored(convert_bytedance([tmp_path], keep_going=True))["b"]

    assert [name for name, _ in run.account.skipped] == [str(tmp_path / "a.parquet")]
    assert run.summary.steps == 32


def test_a_meta_file_that_is_no_mapping_is_named(trace, tmp_path):
    """Somebody saved something else under that name."""
    (tmp_path / "meta-X.yaml").write_text("[1, 2", encoding="utf-8")

    with pytest.raises(SourceError, match=r"meta-X\.yaml is not readable"):
        convert_bytedance([trace()])


def test_an_empty_folder_is_an_error(tmp_path):
    """As is one that is not there, and one name for several runs."""
    with pytest.raises(SourceError, match="without a file of that kind"):
        convert_bytedance([tmp_path])
    with pytest.raises(SourceError, match="not there"):
        convert_bytedance([tmp_path / "nothing"])


def test_one_name_for_two_runs_is_an_error(data):
    """They would be told apart by nothing."""
    with pytest.raises(SourceError, match="one name for 2 traces"):
        convert_bytedance([data / "bytedance"], run_id="both")
