"""Two runs side by side: what is slower, where, and when nothing can be said."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
import typer
from typer.testing import CliRunner

from argus_otel._runtime.errors import ConfigError
from argus_otel.align import align
from argus_otel.cli import compare as command
from argus_otel.cli.compare import read_stretch
from argus_otel.detect.compare import PhaseBuilder, Side, compare, comparison_document
from argus_otel.detect.kernel_times import kernel_seconds, ranks_to_read
from argus_otel.detect.run import run_of
from argus_otel.simulate.cluster import PRESETS
from argus_otel.simulate.faults import parse_fault
from argus_otel.simulate.model import Model
from argus_otel.simulate.tables import RunName, TableMaker
from argus_otel.store.bulk import write_run
from argus_otel.tables.schemas import RunSummary
from argus_otel.wire.kernels import REST


def side(cluster, *faults, seed=1, steps=60, label="run", **changes):
    """A simulated run, as one side of a comparison."""
    job = replace(PRESETS[cluster], **changes)
    model = Model(job, [parse_fault(fault, job) for fault in faults], seed)
    tables = align(TableMaker(model, RunName.of("sim", 1)).whole(steps))
    run, phases = run_of(tables), PhaseBuilder()
    phases.add(tables.steps)
    return Side(label=label, run=run, phases=phases.build(run))


def parts(comparison):
    """Lines by part."""
    return {line.part: line for line in comparison.lines}


@pytest.mark.parametrize("seed", range(2, 8))
def test_two_healthy_runs_are_alike(seed):
    """Whatever noise each of them had."""
    comparison = compare(side("ddp-8"), side("ddp-8", seed=seed))

    assert comparison.slower == ()
    step = comparison.lines[0]
    assert step.kind == "step"
    assert step.change.low <= 1.01
    assert step.change.high >= 0.99


def test_one_slow_rank_of_eight_is_named_with_its_own_numbers():
    """The median over ranks does not move; the rank itself does, and the step with it."""
    comparison = compare(side("ddp-8"), side("ddp-8", "compute:rank=3,factor=1.5,from=0", seed=2))

    found = parts(comparison)
    assert comparison.slower[0].part == "step"
    (place,) = found["own work"].places
    assert place.ranks == (3,)
    assert place.change.low < 1.5 < place.change.high * 1.05
    assert abs(found["own work"].change.ratio - 1) < 0.03


def test_a_transfer_that_slowed_everywhere_is_told_from_waiting():
    """Its line is a cause; nobody waits longer for anybody."""
    comparison = compare(
        side("ddp-8"), side("ddp-8", "comm:factor=5,fraction=1,from=0", seed=2)
    )  # fmt: skip

    slower = {line.part for line in comparison.slower}
    transfers = [part for part in slower if part.endswith(": transfer")]
    assert transfers
    assert "own work" not in slower
    for part in transfers:
        assert parts(comparison)[part].change.low > 3


def test_the_other_way_round_it_is_faster():
    slow, sound = side("ddp-8", "compute:rank=3,factor=1.5,from=0", seed=2), side("ddp-8")

    comparison = compare(slow, sound)

    assert comparison.slower == ()
    assert comparison.lines[0].state == "faster"


def test_causes_come_before_what_they_cause():
    """Own work, input and transfers first; phases and waits hold what others do."""
    comparison = compare(
        side("pipeline-32"),
        side("pipeline-32", "micro_batch:rank=24,extra_s=0.2,index=3,from=0", seed=2),
    )

    kinds = [line.kind in ("wait", "phase") for line in comparison.lines]
    assert kinds == sorted(kinds)
    assert comparison.lines[1].part == "own work"
    assert comparison.lines[1].places[0].ranks == (24,)


def test_too_few_steps_are_no_comparison():
    """And what was missing is said."""
    comparison = compare(side("ddp-2", label="base"), side("ddp-2", steps=15, label="new"))

    assert comparison.lines == ()
    assert comparison.missing == (
        "10 steps of new after the first 10 and without compilation; there are 5",
    )


def test_jobs_of_different_size_are_compared_with_a_note():
    """Step and phases can be; which rank is slow among others cannot."""
    comparison = compare(side("ddp-2"), side("ddp-8"))

    assert any("there are 2 and 8" in note for note in comparison.missing)
    assert "step" in parts(comparison)
    assert parts(comparison)["own work"].places == ()


def test_the_interval_covers_a_known_ratio_about_as_often_as_it_says():
    """95 %; blocks of steps and medians make it a little shy of that."""
    sound = [side("ddp-2", seed=seed, steps=50) for seed in range(12)]
    inside = 0
    for one, other in itertools.pairwise(sound):
        change = compare(one, other).lines[0].change
        inside += change.low - 0.005 <= 1.0 <= change.high + 0.005

    assert inside >= 9


def test_the_document_has_nulls_for_what_is_not_known():
    """JSON has no NaN."""
    document = comparison_document(compare(side("ddp-2"), side("ddp-2", seed=2)))

    assert document["schema"] == "argus.compare/1"
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    collection = next(p for p in document["parts"] if p["part"] == "garbage collection")
    assert collection["before_s"] == 0.0
    assert collection["ratio"] is None


def test_phases_of_one_name_in_a_step_are_added_up():
    tables = align(TableMaker(Model(PRESETS["ddp-2"], [], 1), RunName.of("sim", 1)).whole(3))
    phases = PhaseBuilder()
    phases.add(tables.steps)

    forward = phases.build(run_of(tables))["forward"]

    (first, *_) = tables.steps.to_pylist()
    expected = sum(p["host_s"] for p in first["phases"] if p["name"] == "forward")
    assert forward.shape == (3, 2)
    assert forward[0, 0] == pytest.approx(expected)
    assert not np.isnan(forward).any()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest", ("latest", None)),
        ("run-7@10-50", ("run-7", (10, 50))),
        ("run-7@51-", ("run-7", (51, None))),
        ("@0-9", ("latest", (0, 9))),
    ],
)
def test_a_stretch_of_steps_follows_the_run(text, expected):
    assert read_stretch(text) == expected


@pytest.mark.parametrize("text", ["run@", "run@50-10", "run@a-b"])
def test_a_stretch_that_is_none_is_a_clear_error(text):
    with pytest.raises(ConfigError, match="two step numbers"):
        read_stretch(text)


SLOW = {"ranks": 4, "steps": 80, "changes": [{"ranks": [2], "steps": [40, 80], "own_times": 1.6}]}


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("latest@10-39", "latest@40-79", 1),
        ("latest@10-24", "latest@25-39", 0),
        ("latest@10-39", "latest@40-79 --threshold 200", 0),
        ("latest@10-12", "latest@40-79", 3),
    ],
    ids=["slower", "alike", "below the threshold", "too short"],
)
def test_the_exit_code_tells(tmp_path, write_store, before, after, code):
    """CI goes by it, whatever the table says."""
    write_store(tmp_path, SLOW)
    app = typer.Typer()
    command.register(app)

    result = CliRunner().invoke(app, [before, *after.split(), "--store", str(tmp_path)])

    assert result.exit_code == code, result.output
    assert all(line == line.rstrip() or "  " in line for line in result.output.splitlines())
    if code == 1:
        assert "rank 2" in result.output


@pytest.mark.parametrize("stretch", ["latest@5000-", "latest@5000-5010"])
def test_a_stretch_beyond_the_end_is_refused_with_the_steps_that_there_are(tmp_path, stretch):
    """Whichever side it is on."""
    job, name = PRESETS["ddp-2"], RunName.of("sim", 1)
    summary = RunSummary(
        run=name.nonce.hex(), run_id="sim", attempt=0, role="trainer", service="s", world_size=2,
        ranks_seen=0, first_ns=0, last_ns=0, steps=0,
    )  # fmt: skip
    write_run(tmp_path, summary, TableMaker(Model(job, [], 1), name).blocks(60))
    app = typer.Typer()
    command.register(app)

    for sides in ((stretch, "latest"), ("latest", stretch)):
        with pytest.raises(ConfigError, match="from 5000 .*the run has steps 0 to 59"):
            CliRunner().invoke(app, [*sides, "--store", str(tmp_path)], catch_exceptions=False)


def kernels(comparison):
    """Lines of kernels by name."""
    return {line.part: line for line in comparison.lines if line.kind == "kernel"}


def test_the_kernels_that_became_slower_on_one_rank_are_named():
    """Those of the class that the fault is in, with its factor; the others are as before."""
    after = side("ddp-8", "compute:rank=3,kernel=gemm,factor=1.5,from=0", seed=2)

    found = kernels(compare(side("ddp-8"), after))

    slower = {part: line for part, line in found.items() if line.state == "slower"}
    assert slower
    assert len(slower) < len(found)
    assert not any("nccl" in part.lower() for part in found)
    for part, line in slower.items():
        assert "gemm" in part.lower()
        (place,) = line.places
        assert place.name == "rank 3"
        assert place.change.low < 1.5 < place.change.high * 1.05
        assert place.change.after_s - place.change.before_s > 0.001


def test_a_kernel_that_only_one_side_has_is_told_beside_the_comparison():
    """A slow path that was taken: there is nothing to hold it against."""
    before, after = side("ddp-8", label="old"), side("ddp-8", seed=2, label="new")
    names = [part.removeprefix("kernel ") for part in kernels(compare(before, after))]

    def without_first(table, steps, ranks):
        rows = after.run.rows(table, steps, ranks)
        return rows.filter(pc.not_equal(rows["name"], names[0])) if table == "kernels" else rows

    less = replace(after, run=replace(after.run, rows=without_first, cached={}))
    comparison = compare(before, less)

    assert f"kernel {names[0]}" not in kernels(comparison)
    (note,) = (note for note in comparison.missing if names[0] in note)
    assert note.startswith(f"kernel {names[0]} on both sides; only old has it (")


def test_runs_without_kernels_are_compared_without_a_word_about_them():
    comparison = compare(side("cpu-4"), side("cpu-4", seed=2))

    assert comparison.lines
    assert kernels(comparison) == {}
    assert not any("kernel" in note for note in comparison.missing)


def test_of_a_large_job_some_ranks_kernels_are_read_and_those_that_stand_out():
    """Rank 301 is on no even spread of 64 among 512."""
    # Slow enough to stand out in its own work and in several phases.
    cause = "compute:rank=301,kernel=attention,factor=3,from=0"
    before, after = side("audio-512", steps=24), side("audio-512", cause, seed=2, steps=24)
    asked = []

    def counted(table, steps, ranks):
        asked.append(ranks)
        return after.run.rows(table, steps, ranks)

    comparison = compare(before, replace(after, run=replace(after.run, rows=counted, cached={})))

    assert [len(ranks) for ranks in asked if ranks is not None] == [64]
    slower = [line for line in kernels(comparison).values() if line.state == "slower"]
    assert slower
    assert {place.ranks for line in slower for place in line.places} == {(301,)}


def test_a_rank_that_stands_out_several_times_is_read_once():
    """In its own work, in its forward and in its backward."""
    read = ranks_to_read(range(512), [301, 301, 7, 301])

    assert len(read) == len(set(read)) == 64
    assert {7, 301} <= set(read)
    assert read == sorted(read)
    assert ranks_to_read(range(64), [3, 3]) == list(range(64))


def test_kernels_are_compared_from_a_store_too(tmp_path):
    """They are read for this alone, in another way than the rest."""
    job, faults = PRESETS["ddp-8"], ["compute:rank=3,kernel=gemm,factor=1.5,from=0"]
    for label, seed, planted in (("before", 1, []), ("after", 2, faults)):
        name = RunName.of(label, seed)
        summary = RunSummary(
            run=name.nonce.hex(), run_id=label, attempt=0, role="trainer", service="s",
            world_size=8, ranks_seen=0, first_ns=0, last_ns=0, steps=0,
        )  # fmt: skip
        model = Model(job, [parse_fault(fault, job) for fault in planted], seed)
        write_run(tmp_path, summary, TableMaker(model, name).blocks(60))
    app = typer.Typer()
    command.register(app)

    result = CliRunner().invoke(app, ["before", "after", "--store", str(tmp_path), "--json"])

    slower = [part for part in json.loads(result.stdout)["parts"] if part["state"] == "slower"]
    named = [part for part in slower if part["kind"] == "kernel"]
    assert named
    assert all(place["ranks"] == [3] for part in named for place in part["places"])


def test_of_many_steps_the_latest_kernels_are_read_and_what_was_folded_into_one_is_none():
    """Sixty of them; the rest of a step has no name to compare by."""
    after = side("ddp-8", steps=90)
    rows = after.run.rows("kernels", (0, 90), None)
    renamed = pc.if_else(pc.equal(rows["name"], "gemm"), REST, rows["name"])
    rows = rows.set_column(rows.schema.get_field_index("name"), "name", renamed)
    asked = []

    def read(table, steps, ranks):
        asked.append(steps)
        at = pc.and_(
            pc.greater_equal(rows["ordinal"], steps[0]), pc.less(rows["ordinal"], steps[1])
        )
        return rows.filter(at)

    run = replace(after.run, rows=read, cached={})
    found = kernel_seconds(run, np.arange(10, 90), list(range(8)))

    assert asked[-1] == (30, 90)
    assert found
    assert REST not in found
    assert {values.shape for values in found.values()} == {(60, 8)}
