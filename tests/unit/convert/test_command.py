"""``argus convert`` as a person runs it."""

import json

import pytest
from typer import Typer
from typer.testing import CliRunner

from argus_otel._runtime.errors import ConfigError
from argus_otel.cli import convert as command
from argus_otel.convert.sources import SourceError
from argus_otel.store.parquet import ParquetStore


@pytest.fixture
def argus(tmp_path):
    app = Typer()
    command.register(app)
    app.command("other")(lambda: None)
    store = tmp_path / "store"

    def run(*arguments, out=str(store)):
        return CliRunner().invoke(app, ["convert", *map(str, arguments), "--out", out])

    run.store = store
    return run


def test_a_trace_becomes_a_run_in_a_store(argus, data):
    """And what was read, used and assumed is said."""
    result = argus("bytedance", data / "bytedance/trace-ST.parquet")

    assert result.exit_code == 0
    assert "8 of 8 ranks, 32 steps" in result.stdout
    assert "6,784 records in 1 file; 6,784 of use" in result.stdout
    assert "argus detect --store" in result.stdout
    assert [run.run_id for run in ParquetStore(argus.store).runs()] == ["ST"]


def test_what_was_done_is_told_as_json(argus, data):
    """For scripts."""
    archive = data / "nvrx/flight_recorder_lock_gil.tar.gz"

    result = argus("flight-recorder", archive, "--run-id", "hang", "--json")

    document = json.loads(result.stdout)
    (run,) = document["runs"]
    assert document["schema"] == "argus.convert/1"
    assert (run["run_id"], run["ranks_seen"], run["rows"]["heartbeats"]) == ("hang", 16, 60)
    assert (run["files"], run["skipped"], run["unmapped"]) == (16, [], {})


def test_traces_of_all_ranks_are_one_run(argus, data):
    """In whatever they are packed."""
    result = argus("kineto", data / "param/dlrm_kineto.tar.gz", "--json")

    assert [run["ranks_seen"] for run in json.loads(result.stdout)["runs"]] == [8]


def test_a_bad_file_ends_it_with_an_error(argus, tmp_path):
    """One that the command line prints without a traceback; nothing is left behind."""
    (tmp_path / "rank0.json").write_text("cut")

    result = argus("kineto", tmp_path / "rank0.json")

    assert isinstance(result.exception, SourceError)
    assert result.exception.exit_code == 2
    assert ParquetStore(argus.store).runs() == []


def test_a_bad_file_is_left_out_where_that_was_asked_for(argus, data, tmp_path):
    """It is named, and the exit code says so."""
    bad = tmp_path / "rank1.json"
    bad.write_text("cut")
    good = data / "hta/sampled_rank-0.json.gz"

    result = argus("kineto", good, bad, "--keep-going")

    assert result.exit_code == command.SKIPPED
    assert f"skipped   {bad} is not readable at character 0" in result.stdout
    assert [run.ranks_seen for run in ParquetStore(argus.store).runs()] == [1]


def test_where_nothing_is_left_no_more_is_to_be_left_out(argus, tmp_path):
    """The hint is not what was given already."""
    bad = tmp_path / "rank1.json"
    bad.write_text("cut")

    error = str(argus("kineto", bad, "--keep-going").exception)

    assert f"without a file that can be read ({bad} is not readable at character 0" in error
    assert "--keep-going" not in error


@pytest.mark.parametrize("packed", [True, False], ids=["archive", "file"])
def test_a_flight_recorder_dump_is_named_as_such(argus, data, tmp_path, packed):
    """With the command that reads it."""
    path = data / "nvrx/flight_recorder_gpu_error.tar.gz"
    if not packed:
        path = tmp_path / "rank0"
        path.write_bytes(b"\x80\x05}.")

    error = str(argus("kineto", path).exception)

    assert "torch's flight recorder" in error
    assert "argus convert flight-recorder" in error


def test_where_it_goes_is_a_folder(argus, data):
    """Jaeger cannot be written to this way."""
    result = argus("bytedance", data / "bytedance", out="jaeger+http://localhost:16686")

    assert isinstance(result.exception, ConfigError)
