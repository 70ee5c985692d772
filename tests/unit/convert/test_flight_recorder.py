"""Flight-recorder dumps: two real hangs, and files that are none or mean harm."""

import json
import os
import pickle
import re

import pytest

from argus_otel.convert.flight_recorder import convert_flight_recorder
from argus_otel.convert.sources import SourceError


@pytest.fixture(scope="session")
def hangs(data, stored):
    runs = {}
    for name in ("lock_gil", "gpu_error"):
        archive = data / f"nvrx/flight_recorder_{name}.tar.gz"
        (runs[name],) = stored(convert_flight_recorder([archive])).values()
    return runs


@pytest.fixture
def dump(tmp_path):
    """Write a dump of one rank of two; gives its path."""

    def write(rank=0, entries=(), ranks=(0, 1), name=None, **more):
        document = {
            "version": "2.10",
            "pg_config": {"0": {"desc": "default_pg", "name": "0", "ranks": json.dumps(ranks)}},
            "entries": list(entries),
            **more,
        }
        path = tmp_path / (name or f"nccl_trace_rank_{rank}")
        path.write_bytes(pickle.dumps(document))
        return path

    return write


def entry(seq=1, **more):
    """An operation as torch writes it."""
    return {
        "record_id": seq,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_758_000_000_000_000_000 + seq * 1_000_000,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["BFloat16"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 180_000,
        "is_p2p": False,
        **more,
    }


def waits(run):
    """Rank → operation, count and members of what it waits in first."""
    groups = {row["group"]: row for row in run.rows("groups")}
    found = {}
    for row in run.rows("heartbeats"):
        if row["rank"] not in found:
            members = groups[row["group"]]["ranks"] if row["group"] is not None else None
            found[row["rank"]] = (row["op"], row["seq"], members)
    return found


def test_figures_of_the_real_dumps(hangs):
    """All 16 ranks, every entry; none of them is completed."""
    for name, entries, groups in (("lock_gil", 142, 59), ("gpu_error", 289, 65)):
        run = hangs[name]
        assert (run.summary.ranks_seen, run.summary.world_size) == (16, 16)
        assert run.account.mapped == {"not completed": entries}
        assert run.account.unmapped == {}
        assert run.tables.collectives.num_rows == entries
        assert run.tables.collectives["duration_s"].null_count == entries
        assert run.tables.groups.num_rows == groups
        assert (run.tables.steps.num_rows, run.summary.steps) == (0, 0)


def test_ranks_that_never_entered_are_those_with_the_fault(hangs, unpack):
    """Ranks 9 and 14 held the GIL: they are in nothing, and their six peers wait for them."""
    (log,) = unpack("nvrx/flight_recorder_lock_gil.tar.gz").rglob("fault_injection.log")
    faulty = [int(rank) for rank in re.findall(r"Rank (\d+), fault_type", log.read_text())]
    found = waits(hangs["lock_gil"])

    assert faulty == [9, 14]
    assert [rank for rank, wait in found.items() if wait[0] is None] == faulty
    for rank in (8, 10, 11, 12, 13, 15):
        assert found[rank] == ("all_to_all", 45265, list(range(8, 16)))
    assert found[0] == ("send", None, [0, 8])


def test_ranks_behind_the_others_of_their_group_are_those_with_the_fault(hangs):
    """Ranks 12 and 14 lost their GPU: they wait as well, in what their peers have left behind."""
    run = hangs["gpu_error"]
    key = run.group("EXPERT_MODEL_PARALLEL_GROUP", 12, 13, 14, 15)

    progress = {row["rank"]: row["seq"] for row in run.rows("heartbeats", group=key)}

    assert progress == {12: 20530, 13: 20537, 14: 20530, 15: 20537}
    assert waits(run)[12] == ("all_gather", 42806, [12, 13])


def test_places_come_from_the_names_of_the_groups(hangs):
    """As Megatron calls them."""
    (rank,) = hangs["gpu_error"].rows("ranks", rank=13)

    assert (rank["tp"], rank["pp"], rank["dp"], rank["ep"]) == (1, 3, 0, 1)


def test_how_long_it_waits_is_the_timeout_where_files_were_copied(hangs):
    """The archive was packed a year later."""
    beats = hangs["lock_gil"].rows("heartbeats", rank=8)

    assert beats[0]["age_s"] == pytest.approx(180, abs=0.1)
    assert any("timeout" in note for note in hangs["lock_gil"].account.notes)


def test_how_long_it_waits_is_told_by_the_files_where_they_fit(dump, stored):
    """Dumped 250 s after the last operation."""
    path = dump(entries=[entry(seq=1)])
    written_s = 1_758_000_000 + 250
    os.utime(path, (written_s, written_s))

    (run,) = stored(convert_flight_recorder([path])).values()

    assert run.rows("heartbeats")[0]["age_s"] == pytest.approx(249.999)
    assert run.summary.last_ns == written_s * 10**9


def test_completed_operations_have_a_duration(dump, stored):
    """torch's own where it measured one, else what its watchdog saw."""
    began = 1_758_000_000_000_000_000
    path = dump(
        entries=[
            entry(1, state="completed", duration_ms=2.5),
            entry(2, state="completed", time_discovered_started_ns=began + 10**9,
                  time_discovered_completed_ns=began + 3 * 10**9),
            entry(3, state="started"),
        ]
    )  # fmt: skip

    (run,) = stored(convert_flight_recorder([path])).values()

    rows = run.rows("collectives")
    durations = {row["seq"]: row["duration_s"] for row in rows}
    assert durations == {1: pytest.approx(0.0025), 2: pytest.approx(2.0), 3: None}
    assert {row["payload_bytes"] for row in rows} == {64}
    assert [row["seq"] for row in run.rows("heartbeats")] == [3]
    assert run.account.mapped == {"completed": 2, "not completed": 1}


def test_a_stack_is_outermost_first(dump, stored):
    """As in heartbeats; torch writes the innermost first."""
    frames = [
        {"name": "all_reduce", "filename": "c10d.py", "line": 5},
        {"name": "train", "filename": "train.py", "line": 9},
    ]

    (run,) = stored(convert_flight_recorder([dump(entries=[entry(frames=frames)])])).values()

    assert run.rows("heartbeats")[0]["stack"] == "train.py:9 train > c10d.py:5 all_reduce"


def test_a_dump_in_json_is_read_as_well(stored, tmp_path):
    """torch writes either."""
    group = {"desc": "default_pg", "name": "0", "ranks": "[0, 1]"}
    path = tmp_path / "nccl_trace_rank_1.json"
    path.write_text(json.dumps({"pg_config": {"0": group}, "entries": [entry()]}))

    (run,) = stored(convert_flight_recorder([path])).values()

    assert run.tables.ranks["rank"].to_pylist() == [1]
    assert run.rows("heartbeats")[0]["op"] == "all_reduce"


def test_a_pickle_that_asks_for_code_is_refused_and_not_run(tmp_path):
    """Loading it as usual would create the file."""
    proof = tmp_path / "proof"

    class Harm:
        def __reduce__(self):
            return (os.system, (f"touch {proof}",))

    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Harm()]}))

    with pytest.raises(SourceError, match=r"refused: the pickle asks for posix\.system"):
        convert_flight_recorder([path])
    assert not proof.exists()


@pytest.mark.parametrize(
    "harm",
    [
        pickle.dumps(os.system, protocol=0),
        pickle.dumps(print, protocol=5),
        b"\x80\x02\x82\x01.",  # an extension code
        b"Pabc\n.",  # a persistent object
        b"cbuiltins\neval\n(S'1'\ntR.",
    ],
)
def test_every_way_to_ask_for_a_name_is_refused(tmp_path, harm):
    """Old protocols and new ones, extensions and persistent ids."""
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(harm)

    with pytest.raises(SourceError):
        convert_flight_recorder([path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable as a pickle"),
        (b"\x80\x04\x95\xff\xff", "not readable as a pickle"),
        (b"hello", "not readable as a pickle"),
        (b'{"entries": [', "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (pickle.dumps([1, 2]), "without entries"),
        (pickle.dumps({"entries": 5}), "without entries"),
    ],
)
def test_what_is_no_dump_is_named(tmp_path, content, message):
    """Cut short, of another kind, nested for ever."""
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(content)

    with pytest.raises(SourceError, match=message) as error:
        convert_flight_recorder([path])

    assert str(path) in str(error.value)


def test_a_dump_cut_or_changed_anywhere_is_an_error_or_a_run(unpack, tmp_path):
    """Never anything else: a thousand damaged copies of a real one."""
    (path,) = unpack("nvrx/flight_recorder_gpu_error.tar.gz").rglob("_dump_12")
    whole = path.read_bytes()
    damaged = [whole[:end] for end in range(0, len(whole), 11)]
    damaged += [
        whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        for at in range(0, len(whole), 23)
        for bit in (1, 0x80)
    ]
    outcomes = set()

    for content in damaged:
        path.write_bytes(content)
        try:
            (conversion,) = convert_flight_recorder([path])
            outcomes.add(len(list(conversion.blocks)))
        except SourceError:
            outcomes.add("refused")

    assert outcomes == {1, "refused"}


def test_damaged_entries_are_counted(dump, stored):
    """One that lacks a field costs nothing but itself."""
    broken = [
        None,
        7,
        {},
        entry(time_created_ns="x"),
        entry(time_created_ns=2**70),
        entry(process_group=3),
        entry(collective_seq_id=-(2**70)),
    ]

    (run,) = stored(convert_flight_recorder([dump(entries=[*broken, entry()])])).values()

    assert run.account.unmapped == {"damaged entry": 7}
    assert run.tables.collectives.num_rows == 1


def test_entries_of_a_group_that_is_not_described_are_counted(dump, stored):
    """Its members are not known, so nobody can be said to be missing."""
    other = entry(process_group=("9", "gone"))

    (run,) = stored(convert_flight_recorder([dump(entries=[other])])).values()

    assert run.account.unmapped.total() == 1
    assert run.rows("heartbeats")[0]["group"] is None


def test_dumps_of_two_jobs_are_not_mixed(dump):
    """Two ranks here, four there."""
    paths = [dump(0), dump(1, ranks=(0, 1, 2, 3))]

    with pytest.raises(SourceError, match="of a job with 4 ranks"):
        convert_flight_recorder(paths)


def test_two_dumps_of_one_rank_are_not_mixed(dump):
    """Which of them holds is not known."""
    paths = [dump(1), dump(1, name="old_trace_rank_1")]

    with pytest.raises(SourceError, match="a second dump of rank 1"):
        convert_flight_recorder(paths)


def test_a_name_that_cannot_be_is_refused(dump):
    """Rank 7 in a job of two."""
    with pytest.raises(SourceError, match="named after rank 7"):
        convert_flight_recorder([dump(7)])


def test_without_a_rank_in_its_name_the_groups_may_tell(dump, stored):
    """The only rank that all its groups have."""
    with pytest.raises(SourceError, match="without a rank"):
        convert_flight_recorder([dump(name="dump")])
    alone = {"5": {"desc": "edp", "name": "5", "ranks": "[1]"}}
    path = dump(name="dump", entries=[], pg_config=alone)

    (run,) = stored(convert_flight_recorder([path])).values()

    assert run.tables.ranks["rank"].to_pylist() == [1]


def test_bad_dumps_are_left_out_where_that_was_asked_for(dump, stored, tmp_path):
    """And named."""
    dump(0, entries=[entry()])
    (tmp_path / "nccl_trace_rank_1").write_bytes(b"cut")

    (run,) = stored(convert_flight_recorder([tmp_path], keep_going=True)).values()

    assert run.summary.ranks_seen == 1
    assert [name for name, _ in run.account.skipped] == [str(tmp_path / "nccl_trace_rank_1")]
    assert any("1 of 2 ranks" in note for note in run.account.notes)


def test_nothing_but_bad_dumps_is_an_error(tmp_path):
    """There is no run to write."""
    (tmp_path / "nccl_trace_rank_1").write_bytes(b"cut")

    with pytest.raises(SourceError, match="without a file that can be read"):
        convert_flight_recorder([tmp_path], keep_going=True)


def test_an_empty_folder_is_an_error(tmp_path):
    """Other files in it are passed over."""
    (tmp_path / "fault_injection.log").write_text("Rank 9")

    with pytest.raises(SourceError, match="without a file of that kind"):
        convert_flight_recorder([tmp_path])
