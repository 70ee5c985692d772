"""Traces of torch.profiler: four real ones, made ones, and files that are none."""

import gzip
import json

import pytest

from argus_otel.convert.kineto import convert_kineto
from argus_otel.convert.sources import SourceError


@pytest.fixture(scope="session")
def dlrm(data, stored):
    """8 V100, one step; NCCL kernels without arguments."""
    (run,) = stored(convert_kineto([data / "param/dlrm_kineto.tar.gz"])).values()
    return run


@pytest.fixture(scope="session")
def sampled(data, stored):
    """Ranks 0 and 1 of 128, two steps."""
    paths = [data / f"hta/sampled_rank-{rank}.json.gz" for rank in (0, 1)]
    (run,) = stored(convert_kineto(paths)).values()
    return run


@pytest.fixture(scope="session")
def a100(data, stored):
    """Rank 0 of 2, three steps; NCCL kernels with arguments."""
    (run,) = stored(convert_kineto([data / "hta/a100_2ranks_rank0_nccl.json.gz"])).values()
    return run


def span(cat, name, ts, dur, **args):
    """An event that lasts."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": 1, "args": args}  # fmt: skip


def launch(ts, correlation):
    """The host launches a kernel."""
    return span("cuda_runtime", "cudaLaunchKernel", ts, 1, correlation=correlation)


def kernel(name, ts, dur, correlation, **args):
    """The device runs it."""
    return span("kernel", name, ts, dur, correlation=correlation, device=0, stream=7, **args)


ONE_STEP = [
    span("user_annotation", "ProfilerStep#20", 1000.0, 1000.0),
    span("user_annotation", "## forward ##", 1100.0, 300.0),
    launch(1150.0, 1),
    launch(1250.0, 2),
    kernel("gemm", 1200.0, 400.0, 1),
    kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1500.0, 300.0, 2),
]


@pytest.fixture
def trace(tmp_path):
    """Write a trace of one rank; gives its path."""

    def write(events=ONE_STEP, rank=0, world_size=2, name=None, **more):
        document = {"schemaVersion": 1, "traceEvents": events, **more}
        if rank is not None:
            document["distributedInfo"] = {"rank": rank, "world_size": world_size}
        path = tmp_path / (name or f"rank{rank}.json")
        path.write_text(json.dumps(document))
        return path

    return write


@pytest.fixture
def convert(stored):
    """Convert and read back."""

    def convert(*paths, **options):
        (run,) = stored(convert_kineto([*paths], **options)).values()
        return run

    return convert


def test_figures_of_eight_ranks(dlrm):
    """One step of all ranks, eight collectives each."""
    tables = dlrm.tables

    assert (dlrm.summary.ranks_seen, dlrm.summary.world_size, dlrm.summary.steps) == (8, 8, 1)
    assert tables.steps["ordinal"].to_pylist() == [10] * 8
    assert tables.collectives.num_rows == 64
    assert dlrm.account.files == 8
    assert dlrm.account.mapped["kernel"] == 2104
    assert dlrm.account.unmapped["gpu_memcpy"] == 128


def test_without_arguments_the_operation_is_that_of_the_annotation(dlrm):
    """A kernel that sends and receives may be several; the group is not known."""
    (group,) = dlrm.rows("groups")
    operations = [row["op"] for row in dlrm.rows("collectives", rank=3)]

    assert group["description"] == "unknown of 8"
    assert operations == ["all_to_all"] * 4 + ["all_reduce", "all_to_all", "all_reduce", "all_reduce"]  # fmt: skip


def test_who_comes_last_waits_least(dlrm):
    """Rank 7 keeps the others waiting in the first exchange; ranks 1 and 3 wait longest."""
    first = min(row["seq"] for row in dlrm.rows("collectives"))
    waits = {row["rank"]: row["duration_s"] for row in dlrm.rows("collectives", seq=first)}

    assert min(waits, key=waits.get) == 7
    assert waits[7] == pytest.approx(10e-6)
    assert sorted(waits, key=waits.get)[-2:] == [3, 1]


def test_compute_is_alike_where_only_waiting_differs(dlrm):
    """Steps differ by 60 %, what the ranks do themselves by 30 %."""
    steps = dlrm.rows("steps")
    lengths, busy = ([step[name] for step in steps] for name in ("step_s", "busy_s"))

    assert max(lengths) / min(lengths) > 1.55
    assert max(busy) / min(busy) < 1.32


def test_phases_are_those_that_were_annotated(dlrm):
    """With the host's time and the kernels that were launched in them."""
    (step,) = dlrm.rows("steps", rank=0)
    phases = {phase["name"]: phase for phase in step["phases"]}

    assert [*phases] == ["h2d", "data.wait", "forward", "backward", "optimizer.step"]
    assert phases["forward"]["host_s"] == pytest.approx(0.0045, abs=1e-4)
    assert phases["backward"]["gpu_s"] == pytest.approx(0.000513, abs=1e-6)
    assert step["data_wait_s"] == pytest.approx(0.001187)
    assert step["start_ns"] == 1694128201426674000


def test_figures_of_the_sampled_ranks(sampled):
    """Two of 128 ranks, ten collectives each; how many there are is said."""
    assert (sampled.summary.ranks_seen, sampled.summary.world_size) == (2, 128)
    assert sorted({row["ordinal"] for row in sampled.rows("steps")}) == [551, 552]
    assert sampled.tables.collectives.num_rows == 20
    assert any("2 of 128 ranks" in note for note in sampled.account.notes)
    assert sampled.summary.run_id == "hta"


def test_arguments_of_nccl_kernels_are_used(a100):
    """Operation, group, bytes."""
    key = a100.group("default_pg", 0, 1)
    rows = a100.rows("collectives")
    kinds = [(row["op"], row["phase"]) for row in rows]

    assert {row["group"] for row in rows} == {key}
    assert kinds.count(("all_reduce", "backward")) == 15
    assert kinds.count(("broadcast", "forward")) == 6
    assert rows[0]["payload_bytes"] == 53120 * 4
    assert max(row["payload_bytes"] for row in rows) == 7_875_584 * 4


def test_figures_of_the_a100(a100):
    """Times are relative to a base that stands behind the events."""
    assert a100.account.mapped["kernel"] == 2700
    assert a100.account.read == 40573
    assert [row["ordinal"] for row in a100.rows("steps")] == [4, 5, 6]
    assert a100.rows("steps")[0]["start_ns"] == 1716423322416788066
    assert a100.rows("ranks")[0]["gpu"] == "NVIDIA A100-PG509-200"
    assert a100.rows("steps")[0]["data_wait_s"] is None


def test_busy_is_the_step_without_what_only_nccl_ran_in(trace, convert):
    """300 µs of all_reduce, of which 100 are behind a kernel that computes."""
    run = convert(trace())

    (step,) = run.rows("steps")
    (row,) = run.rows("collectives")
    assert step["busy_s"] == pytest.approx(800e-6)
    assert step["phases"][0]["gpu_s"] == pytest.approx(400e-6)
    assert (row["op"], row["phase"]) == ("all_reduce", "forward")
    assert (row["arrival_s"], row["duration_s"]) == pytest.approx((500e-6, 300e-6))


def test_a_kernel_belongs_to_the_step_it_was_launched_in(trace, convert):
    """It runs while the host is in the next one already."""
    events = [
        span("user_annotation", "ProfilerStep#20", 1000, 1000),
        span("user_annotation", "ProfilerStep#21", 2000, 1000),
        launch(1900, 5),
        kernel("ncclDevKernel_AllGather_RING_LL", 2500, 100, 5),
    ]

    run = convert(trace(events))

    assert [row["ordinal"] for row in run.rows("collectives")] == [20]


def test_without_steps_a_file_is_one(trace, convert):
    """From its first event to its last."""
    events = [span("cpu_op", "aten::mm", 500, 100), span("cpu_op", "aten::mm", 900, 200)]

    run = convert(trace(events))

    (step,) = run.rows("steps")
    assert (step["ordinal"], step["step_s"], step["busy_s"]) == (0, pytest.approx(600e-6), None)


def test_torchs_own_count_is_used_where_there_is_one(trace, convert):
    """Newer traces have it."""
    about = {"Collective name": "_reduce_scatter_base", "Seq": 41, "In msg nelems": 8,
             "dtype": "BFloat16", "Process Group Name": "3", "Group size": 2,
             "Process Group Ranks": "[0, ..., 1]"}  # fmt: skip

    run = convert(
        trace([*ONE_STEP[:4], kernel("ncclDevKernel_ReduceScatter", 1500, 10, 2, **about)])
    )

    (row,) = run.rows("collectives")
    assert (row["seq"], row["op"], row["payload_bytes"]) == (41, "reduce_scatter", 16)
    run.group("undefined", 0, 1)


def test_the_autograd_engine_is_the_backward_where_nobody_says_so(trace, convert):
    """From its first function to its last."""
    name = "autograd::engine::evaluate_function: AddmmBackward0"
    events = [*ONE_STEP, span("cpu_op", name, 1500, 50), span("cpu_op", name, 1700, 50)]

    run = convert(trace(events))

    phases = {phase["name"]: phase for phase in run.rows("steps")[0]["phases"]}
    assert phases["backward"]["host_s"] == pytest.approx(250e-6)


def test_several_files_of_a_rank_are_its_steps(trace, convert):
    """A profiler with a schedule writes one each cycle."""
    later = [span("user_annotation", "ProfilerStep#30", 9000, 1000)]

    run = convert(trace(), trace(later, name="rank0_cycle2.json"))

    assert [row["ordinal"] for row in run.rows("steps")] == [20, 30]


def test_the_same_step_twice_is_an_error(trace, convert):
    """Two copies of one file."""
    with pytest.raises(SourceError, match="a second trace of step 20 of rank 0"):
        convert(trace(), trace(name="copy.json"))


def test_traces_of_two_jobs_are_not_mixed(trace, convert):
    """Unless told to go on: then the odd one is left out, and named."""
    paths = trace(), trace(rank=1, world_size=4)

    with pytest.raises(SourceError, match="of a job with 4 ranks"):
        convert(*paths)
    run = convert(*paths, keep_going=True)

    assert run.summary.ranks_seen == 1
    assert [name for name, _ in run.account.skipped] == [str(paths[1])]


def test_without_a_rank_in_it_the_name_tells(trace, convert):
    """Or there is just one trace."""
    run = convert(trace(rank=None, name="trace_rank_1.json"), trace(rank=0))
    assert run.tables.ranks["rank"].to_pylist() == [0, 1]

    alone = convert(trace(rank=None, name="trace.json"))
    assert alone.tables.ranks["rank"].to_pylist() == [0]

    with pytest.raises(SourceError, match="without a rank"):
        convert(trace(rank=None, name="one.json"), trace(rank=None, name="two.json"))


def test_damaged_events_are_counted(trace, convert):
    """They cost nothing but themselves."""
    broken = [
        5,
        None,
        {"ph": "X"},
        span("kernel", "gemm", "soon", 5),
        span("kernel", "gemm", 5, -1),
        span("kernel", 7, 5, 1),
        {"ph": "X", "cat": 3, "name": "x", "ts": float("inf"), "dur": 1},
    ]

    run = convert(trace([*broken, *ONE_STEP]))

    assert run.account.unmapped["damaged event"] == len(broken)
    assert run.tables.collectives.num_rows == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at character 0"),
        (b"hello", "at character 0"),
        (b'{"traceEvents": [{"ph": "X", "ts"', "breaks off|expected a value"),
        (b'{"traceEvents": [1, 2] "x"', "expected ','"),
        (b'{"traceEvents": []}', "without an event that lasts"),
        (b'{"other": 1}', "without an event that lasts"),
        (b"[[[[[[" * 50_000, "expected a value"),
        (gzip.compress(b'{"traceEvents": [' + b"1," * 10_000)[:40], "not readable"),
        (gzip.compress(b"{}")[:-6] + b"junk", "not readable"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, convert, content, message):
    """Empty, of another kind, cut short, nested for ever, gzip that breaks off."""
    path = tmp_path / "rank0.json"
    path.write_bytes(content)

    with pytest.raises(SourceError, match=message) as error:
        convert(path)

    assert str(path) in str(error.value)


def test_a_trace_cut_anywhere_is_an_error(trace):
    """Wherever a full disk stopped it."""
    path = trace()
    whole = path.read_bytes().rstrip()

    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        (conversion,) = convert_kineto([path])
        with pytest.raises(SourceError):
            list(conversion.blocks)


def test_numbers_that_cannot_be_are_left_out(trace, convert):
    """Times beyond all clocks, jobs of more ranks than there are."""
    far = [span("kernel", "gemm", 1e30, 5), span("kernel", "gemm", 5, 10**30)]

    run = convert(trace([*far, *ONE_STEP], baseTimeNanoseconds=2**80))

    assert run.account.unmapped["damaged event"] == 2
    assert run.rows("steps")[0]["start_ns"] == 1_000_000
    with pytest.raises(SourceError, match="of a job with"):
        convert(trace(world_size=10**12))


def test_a_real_trace_cut_short_is_an_error(data, tmp_path, convert):
    """A copy that was not finished."""
    whole = (data / "hta/sampled_rank-0.json.gz").read_bytes()
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(SourceError, match="not readable"):
        convert(path)


def test_an_archive_cut_short_is_an_error(data, tmp_path, convert):
    """Found when its members are listed."""
    path = tmp_path / "traces.tar.gz"
    path.write_bytes((data / "param/dlrm_kineto.tar.gz").read_bytes()[:200_000])

    with pytest.raises(SourceError, match="not readable"):
        convert(path)
    run = convert(path, data / "hta/sampled_rank-0.json.gz", keep_going=True)

    assert [name for name, _ in run.account.skipped] == [str(path)]


def test_an_empty_folder_is_an_error(tmp_path, convert):
    """Nothing to convert."""
    with pytest.raises(SourceError, match="without a file of that kind"):
        convert(tmp_path)


def test_how_far_it_has_come_is_told(data):
    """In bytes of the file as it lies on disk."""
    path = data / "hta/sampled_rank-0.json.gz"
    read = []

    (conversion,) = convert_kineto([path], advance=read.append)
    list(conversion.blocks)

    assert sum(read) == path.stat().st_size
