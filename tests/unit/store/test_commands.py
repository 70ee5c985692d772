"""``argus serve`` and ``argus runs`` as a person runs them."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from typer import Typer
from typer.testing import CliRunner

from argus_otel._runtime.errors import ConfigError, StoreError
from argus_otel.cli import runs as runs_command
from argus_otel.cli.options import read_age_ns
from argus_otel.store.parquet import ParquetStore
from argus_otel.store.writer import ParquetWriter
from argus_otel.testing.otlp import NONCE, digest_request, example_digest, resource_of


@pytest.fixture
def argus():
    app = Typer()
    runs_command.register(app)
    return lambda *arguments, **env: CliRunner().invoke(app, arguments, env=env)


@pytest.fixture
def filled(tmp_path, job_spans):
    with ParquetWriter(tmp_path) as writer:
        writer.write(job_spans(ranks=[0, 2]))
    return tmp_path


def test_runs_are_listed_as_json(argus, filled):
    """For scripts."""
    result = argus("--store", str(filled), "--json")

    document = json.loads(result.stdout)
    assert document["schema"] == "argus.runs/1"
    assert [(run["run"], run["steps"]) for run in document["runs"]] == [(NONCE, 3)]


def test_runs_are_listed_as_a_table_that_tells_missing_ranks(argus, filled):
    """For people; the folder comes from the environment here."""
    result = argus(COLUMNS="200", ARGUS_STORE=str(filled))

    assert result.exit_code == 0
    assert "demo" in result.stdout
    assert "2/4" in result.stdout


def test_a_folder_of_other_things_is_not_a_store(argus, tmp_path):
    """A slip of the pen; an empty folder is a store without runs."""
    assert argus("--store", str(tmp_path)).exit_code == 0
    (tmp_path / "notes.txt").touch()

    result = argus("--store", str(tmp_path))

    assert isinstance(result.exception, StoreError)
    assert "is not a store: it has notes.txt, and no run" in str(result.exception)


def test_an_empty_store_option_is_refused(argus):
    """``--store "$STORE"`` with the variable not set: the default is not what was meant."""
    result = argus("--store", "")

    assert isinstance(result.exception, ConfigError)
    assert "--store is empty" in str(result.exception)


def test_old_runs_are_left_out(argus, tmp_path, job_spans):
    """Started in 1970 and not heard of since."""
    spans = job_spans()
    for span in spans:
        span.start_ns, span.end_ns = 1, 2
    with ParquetWriter(tmp_path) as writer:
        writer.write(spans)

    result = argus("--store", str(tmp_path), "--since", "2h", "--json")
    words = argus("--store", str(tmp_path), "--since", "2h").stderr

    assert json.loads(result.stdout)["runs"] == []
    assert words == "No run in the last 2h. The newest, demo, is from 1970-01-01 00:00:00 UTC.\n"


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("2d", 172800)])
def test_ages_are_read_with_their_unit(text, seconds):
    """As people write them."""
    assert read_age_ns(text) == seconds * 10**9


@pytest.mark.parametrize("text", ["", "2", "h", "-1h", "2 fortnights"])
def test_an_age_without_a_unit_is_refused(text):
    """Seconds or hours? Better ask."""
    with pytest.raises(ConfigError, match="--since"):
        read_age_ns(text)


@pytest.mark.multiproc
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_where_to_send_and_stops_cleanly(tmp_path, ending):
    """A real process, a real post, a real signal."""
    program = "from argus_otel.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "serve", "--store", str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        said = []
        while "Ctrl-C" not in "".join(said):
            said.append(process.stdout.readline())
            assert said[-1], "it ended before it was ready"
        endpoint = said[0].split()[-1]
        body = digest_request([example_digest(0, 0)], resource_of(0, world_size=1))
        httpx.post(
            f"{endpoint}/v1/traces",
            content=body.SerializeToString(),
            headers={"Content-Type": "application/x-protobuf"},
            trust_env=False,
            timeout=60,
        ).raise_for_status()
        process.send_signal(ending)
        rest = process.stdout.read()

    assert process.returncode == 0
    assert f"OTEL_EXPORTER_OTLP_ENDPOINT={endpoint}" in "".join(said)
    assert f"Stored 2 spans in {tmp_path}" in rest
    assert ParquetStore(tmp_path).resolve("latest").steps == 1
