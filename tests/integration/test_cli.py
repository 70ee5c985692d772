"""The command line as people and scripts use it: what it says, where it says it, and exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from argus_otel._runtime.errors import StoreError
from argus_otel.settings import Settings
from argus_otel.store.opening import open_store
from argus_otel.store.writer import ParquetWriter
from argus_otel.tables.findings import (
    SCHEMA,
    Abstention,
    Finding,
    Onset,
    Severity,
    Suppressed,
)
from argus_otel.testing import InMemoryReceiver

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(1500), pytest.mark.slow]

JOBS = Path(__file__).parent / "jobs"
TRAIN = JOBS / "train.py"
BIN = Path(sys.executable).parent
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")
WITHIN_S = 400
"""A deadline for a loaded machine, not an expectation."""

# Exit codes, as `argus detect --help` lists them.
NOTHING, SOMETHING, USAGE, ALL_ABSTAINED, NO_STORE = 0, 1, 2, 3, 4

COMMANDS = ("run", "demo", "doctor", "runs", "detect", "report", "serve", "stack")


# --- How the tests call it ----------------------------------------------------------------------


def environment(**variables: object) -> dict[str, str]:
    """A person's shell, and nothing of what runs these tests."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ARGUS_", "OTEL_", "TORCHELASTIC_", "PYTEST_", "JOB_"))
        and name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")
    }
    return {
        **inherited,
        "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in variables.items()},
    }


def argus(*arguments: object, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run the command; whatever happens, a traceback is wrong."""
    done = subprocess.run(
        [BIN / "argus", *map(str, arguments)],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert "Traceback" not in done.stdout, done.stdout
    if "--" not in arguments:  # there the job's own may be on standard error
        assert "Traceback" not in done.stderr, done.stderr
    return done


def checked(document: dict) -> dict:
    """The document, which is argus.findings/1 to the last name and nothing beside it."""
    assert document.keys() == {"schema", "run", "findings", "abstained"}
    assert document["schema"] == SCHEMA
    for given in document["findings"]:
        finding = Finding(
            **given
            | {
                "onset": Onset(**given["onset"]),
                "suppressed": tuple(Suppressed(**each) for each in given["suppressed"]),
            }
        )
        assert plain(asdict(finding)) == given
        assert finding.severity in get_args(Severity)
        assert finding.state in ("open", "ended")
        assert finding.slowdown >= 1
        assert 0 <= finding.first_step <= finding.last_step
        assert finding.summary
        assert finding.next_step
        assert re.fullmatch("[0-9a-f]{16}", finding.id)
    for given in document["abstained"]:
        assert plain(asdict(Abstention(**given))) == given
        assert given["code"]
        assert given["missing"]
    return document


def plain(value: object) -> object:
    return json.loads(json.dumps(value))


def said(done: subprocess.CompletedProcess[str], *, code: int) -> str:
    """What a command that cannot go on says: on standard error, with nothing on standard output."""
    assert (done.returncode, done.stdout) == (code, ""), done.stdout + done.stderr
    return done.stderr


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# --- Runs that several tests read ---------------------------------------------------------------


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Two ranks, 60 steps, the second with ten times the work; by torchrun, kept in a folder."""
    store = tmp_path_factory.mktemp("launched") / "store"
    done = argus(
        *("run", "--local", "--store", store, "--run-id", "two-ranks", "--service", "llama"),
        *("--", *TORCHRUN, TRAIN),
        JOB_STEPS=60,
        JOB_WORK_S=0.004,
        JOB_CULPRIT=1,
        JOB_CULPRIT_WORK_S=0.04,
    )
    return done, store


@pytest.fixture
def two_ranks(launched, tmp_path) -> Path:
    """A copy of that store, since a verdict is written into it."""
    return shutil.copytree(launched[1], tmp_path / "two-ranks")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Path:
    """Forty steps of a process that trains alone."""
    store = tmp_path_factory.mktemp("one-rank") / "store"
    done = argus("run", "--local", "--store", store, "--", "python", TRAIN, JOB_STEPS=40)
    assert done.returncode == 0, done.stderr
    return store


# --- argus run ----------------------------------------------------------------------------------


def test_run_becomes_the_command():
    """Same process: what a scheduler signals, waits for and accounts is the job itself."""
    with subprocess.Popen(
        [BIN / "argus", "run", "--", "sh", "-c", "echo $$"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=WITHIN_S)

    assert int(output) == process.pid


def test_run_hands_on_what_it_was_told():
    """Options become the variables that the job's processes read."""
    done = argus(
        *("run", "--service", "llama", "--run-id", "third-try", "--endpoint", "http://there:4318"),
        *("--", "env"),
    )

    job = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert job["OTEL_SERVICE_NAME"] == "llama"
    assert job["ARGUS_RUN_ID"] == "third-try"
    assert job["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://there:4318"
    assert "auto_instrumentation" in job["PYTHONPATH"].split(":")[0]


@pytest.mark.parametrize("options", [(), ("--local",)], ids=["exec", "local"])
def test_run_ends_with_the_commands_exit_code(options, tmp_path):
    """Whether it becomes the command or waits for it."""
    done = argus("run", *with_store(options, tmp_path), "--", "sh", "-c", "exit 7")

    assert done.returncode == 7


@pytest.mark.parametrize("options", [(), ("--local",)], ids=["exec", "local"])
def test_a_command_that_is_not_there_is_127(options, tmp_path):
    """As a shell says it, with what to do."""
    done = argus("run", *with_store(options, tmp_path), "--", "torchrum", "train.py")

    message = said(done, code=127)
    assert "'torchrum', which is not on the PATH" in message
    assert "full path" in message


@pytest.mark.parametrize("options", [(), ("--local",)], ids=["exec", "local"])
def test_a_command_that_cannot_be_run_is_126(options, tmp_path):
    """A training script without its interpreter."""
    script = tmp_path / "train.py"
    script.write_text("print('never')")
    script.chmod(0o755)

    done = argus("run", *with_store(options, tmp_path), "--", script)

    message = said(done, code=126)
    assert f"'{script}', which cannot be run" in message
    assert "argus run -- python SCRIPT" in message


@pytest.mark.parametrize("options", [(), ("--local",)], ids=["exec", "local"])
def test_a_script_that_is_not_executable_is_126(options, tmp_path):
    """It is there: as a shell says it, with both ways on."""
    script = tmp_path / "train.py"
    script.write_text("print('never')")

    done = argus("run", *with_store(options, tmp_path), "--", script)

    message = said(done, code=126)
    assert f"-- python {script}" in message
    assert f"chmod +x {script}" in message


def test_local_and_an_endpoint_exclude_each_other(tmp_path):
    """The endpoint would silently get nothing."""
    done = argus("run", "--local", "--endpoint", "http://gateway:4318", "--", "true")

    assert "--endpoint http://gateway:4318" in said(done, code=USAGE)


def with_store(options: tuple[str, ...], folder: Path) -> tuple[object, ...]:
    return (*options, "--store", folder / "store") if options else ()


def test_a_store_without_local_is_a_mistake(tmp_path):
    """It would be silently empty."""
    done = argus("run", "--store", tmp_path / "store", "--", "true")

    assert "--local" in said(done, code=USAGE)
    assert not (tmp_path / "store").exists()


def test_run_without_a_command_shows_its_usage():
    """And where to read on."""
    message = said(argus("run"), code=USAGE)

    assert "argus run [OPTIONS]" in message
    assert "argus run --help" in message


def test_a_file_where_the_store_should_be_is_said_before_the_job_starts(tmp_path):
    """Nothing has trained in vain."""
    (tmp_path / "store").write_text("mine")

    done = argus(
        *("run", "--local", "--store", tmp_path / "store"),
        *("--", "touch", tmp_path / "trained"),
    )

    assert "not writable" in said(done, code=NO_STORE)
    assert not (tmp_path / "trained").exists()


def test_a_job_that_sends_nothing_is_told_so(tmp_path):
    """Else the next command says that the store is empty, and nobody knows why."""
    done = argus("run", "--local", "--store", tmp_path / "store", "--", "true")

    assert done.returncode == 0
    assert "nothing arrived" in done.stderr
    assert "argus doctor" in done.stderr


def test_a_failing_jobs_exit_code_and_steps_are_kept(tmp_path):
    """It fails in its fourth step with 5; the three before it can be read."""
    store = tmp_path / "store"

    done = argus(
        *("run", "--local", "--store", store, "--", "python", TRAIN),
        JOB_STEPS=6,
        JOB_FAIL_AT=3,
        JOB_FAIL_CODE=5,
    )

    assert done.returncode == 5, done.stderr
    (run,) = open_store(str(store)).runs()
    assert run.steps == 3


@pytest.mark.parametrize(
    ("number", "launcher", "code"),
    [
        # A shell's own reading of an end by signal; torchrun makes 1 of it.
        pytest.param(signal.SIGTERM, ("python",), 128 + signal.SIGTERM, id="SIGTERM-python"),
        pytest.param(signal.SIGTERM, TORCHRUN, 1, id="SIGTERM-torchrun"),
        pytest.param(signal.SIGINT, TORCHRUN, 1, id="SIGINT-torchrun"),
    ],
)
def test_a_signal_ends_the_job_and_leaves_a_finished_store(number, launcher, code, tmp_path):
    """Sent to argus alone, as a scheduler does; no process of the job stays behind."""
    store, progress = tmp_path / "store", tmp_path / "progress"
    with (tmp_path / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [BIN / "argus", "run", "--local", "--store", store, "--", *launcher, TRAIN],
            env=environment(JOB_STEPS=10**6, JOB_PAUSE_S=0.02, JOB_PROGRESS=progress),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        wait_for("steps in the store", lambda: process.poll() is not None or has_steps(store))
        process.send_signal(number)
        ended = process.wait(WITHIN_S)
    finally:
        process.kill()

    messages = (tmp_path / "stderr").read_text("utf-8", "replace")
    assert ended == code, messages
    assert f"spans in {store}" in messages
    wait_for("the end of every process of the job", lambda: not processes_of(progress))
    listed = argus("runs", "--store", store, "--json")
    assert json.loads(listed.stdout)["runs"][0]["steps"] > 0
    assert argus("detect", "--store", store).returncode in (NOTHING, SOMETHING, ALL_ABSTAINED)


def has_steps(store: Path) -> bool:
    try:
        return any(run.steps for run in open_store(str(store)).runs())
    except StoreError:  # the folder is not there yet
        return False


def processes_of(progress: Path) -> list[int]:
    """Processes that were given this file to write to."""
    mark = f"JOB_PROGRESS={progress}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found


def wait_for(what: str, condition) -> None:
    """Poll until ``condition()`` gives something true."""
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WITHIN_S} s: {what}"
        time.sleep(0.1)


# --- From a job to its report -------------------------------------------------------------------


def test_a_local_job_says_what_to_do_next(launched):
    """The exit code is the job's own; the next command can be copied."""
    done, store = launched

    assert done.returncode == 0, done.stderr
    assert re.search(rf"^argus: \d+ spans in {store}$", done.stderr, re.MULTILINE)
    assert f"argus detect --store {store}" in done.stderr


def test_runs_lists_the_finished_store(two_ranks):
    """For programs, and as one line for people."""
    document = json.loads(argus("runs", "--store", two_ranks, "--json").stdout)
    table = argus("runs", "--store", two_ranks).stdout

    assert document["schema"] == "argus.runs/1"
    (run,) = document["runs"]
    assert (run["run_id"], run["service"]) == ("two-ranks", "llama")
    assert (run["ranks_seen"], run["world_size"], run["steps"]) == (2, 2, 60)
    (line,) = [line for line in table.splitlines() if line.startswith("two-ranks")]
    assert line.split()[1:7] == [run["run"][:8], "0", "trainer", "llama", "2/2", "60"]


def test_the_store_can_come_from_the_environment(two_ranks):
    """ARGUS_STORE, so that nobody types it all day."""
    assert "two-ranks" in argus("runs", ARGUS_STORE=two_ranks).stdout


def test_detect_prints_one_json_document_and_nothing_else(two_ranks):
    """The planted rank and cause; exit code 1 because it is above info."""
    done = argus("detect", "--store", two_ranks, "--json")

    assert done.returncode == SOMETHING, done.stderr
    document = checked(json.loads(done.stdout))
    assert document["run"] == open_store(str(two_ranks)).resolve("two-ranks").run
    assert ("compute_straggler", [1]) in [(f["cause"], f["ranks"]) for f in document["findings"]]


def test_detect_says_it_in_words(two_ranks):
    """Who, what, since when, and what to do now; on standard output."""
    done = argus("detect", "--store", two_ranks, "--run", "two-ranks")

    assert done.returncode == SOMETHING, done.stderr
    assert re.search(r"^CRITICAL +compute straggler: rank 1 on ", done.stdout, re.MULTILINE)
    assert re.search(r"^ +do now +\S", done.stdout, re.MULTILINE)


def test_a_verdict_that_cannot_be_written_still_stands(two_ranks):
    """Another process writes the folder, or nothing answers at the endpoint: said, exit code kept."""
    with ParquetWriter(two_ranks):
        locked = argus("detect", "--store", two_ranks, "--json")
    nobody = f"http://127.0.0.1:{closed_port()}"
    refused = argus("detect", "--store", two_ranks, "--json", "--otlp-endpoint", nobody)

    for done, why in ((locked, "in use by another"), (refused, "not taking the verdict")):
        assert done.returncode == SOMETHING
        assert "not published" in done.stderr
        assert why in done.stderr
        checked(json.loads(done.stdout))


def test_report_writes_one_page_that_stands_alone(two_ranks, tmp_path):
    """The verdict is in it, and nothing is loaded from elsewhere."""
    page = tmp_path / "report.html"

    done = argus("report", "--store", two_ranks, "--html", page)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Wrote {page}\n")
    html = page.read_text("utf-8")
    assert "two-ranks" in html
    assert "compute straggler" in html
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.https?:", html)


def test_report_into_a_folder_that_is_not_there(two_ranks, tmp_path):
    """Said as a mistake of the path, not as a failure of the report."""
    done = argus("report", "--store", two_ranks, "--html", tmp_path / "no" / "report.html")

    assert "not writable" in said(done, code=USAGE)


def test_colours_are_for_terminals_and_respect_no_color(two_ranks):
    """None in a pipe; none either where somebody has set NO_COLOR."""
    colour = re.compile(r"\x1b\[[\d;]*(3[0-8]|9[0-7])[\d;]*m")
    detect = ("detect", "--store", two_ranks, "--dry-run")

    assert "\x1b" not in argus(*detect).stdout
    assert colour.search(argus(*detect, FORCE_COLOR=1, TERM="xterm").stdout)
    assert not colour.search(argus(*detect, FORCE_COLOR=1, NO_COLOR=1, TERM="xterm").stdout)
    error = argus("detect", "--store", "nowhere", FORCE_COLOR=1, NO_COLOR=1, TERM="xterm").stderr
    assert not colour.search(error)


# --- argus detect where there is little or nothing to detect ------------------------------------


def test_detect_on_one_rank_judges_what_needs_no_peers(one_rank):
    """Nobody to compare it with is said, and the rest is judged."""
    done = argus("detect", "--store", one_rank, "--json")

    document = checked(json.loads(done.stdout))
    silent = {each["detector"]: each for each in document["abstained"]}
    assert silent["compute_straggler"]["code"] == "too_few_peers"
    assert "second rank" in silent["compute_straggler"]["missing"]
    assert not {"input_stall", "gc_pause"} & silent.keys(), "both can be judged without peers"
    expected = SOMETHING if document["findings"] else NOTHING
    assert done.returncode == expected, done.stdout


def test_detect_abstains_where_half_of_the_ranks_are_missing(tmp_path):
    """The other rank trained, and was not traced: no verdict, and not an all-clear."""
    store = tmp_path / "store"
    ran = argus(
        *("run", "--local", "--store", store, "--", *TORCHRUN, "--no-python"),
        *(JOBS / "trace_rank_0_only.sh", TRAIN),
        JOB_STEPS=40,
    )
    assert ran.returncode == 0, ran.stderr

    done = argus("detect", "--store", store, "--json")
    words = argus("detect", "--store", store)

    assert (done.returncode, words.returncode) == (ALL_ABSTAINED, ALL_ABSTAINED)
    document = checked(json.loads(done.stdout))
    assert all(finding["severity"] == "info" for finding in document["findings"])
    because = {each["detector"]: each for each in document["abstained"]}
    for detector in ("compute_straggler", "input_stall", "gc_pause"):
        assert because[detector]["code"] == "missing_ranks"
        assert "only 1 sent any" in because[detector]["missing"]
    assert words.stdout.startswith("No verdict on 30 steps (10 to 39) of 1 of 2 ranks")


def test_detect_abstains_on_a_run_without_steps(tmp_path):
    """A job that only forms its group: the run is known, and that it has no step is said."""
    store = tmp_path / "store"
    ran = argus("run", "--local", "--store", store, "--", "python", JOBS / "no_steps.py")
    assert ran.returncode == 0, ran.stderr
    assert "no steps seen" in ran.stderr

    done = argus("detect", "--store", store, "--json")
    words = argus("detect", "--store", store)

    assert (done.returncode, words.returncode) == (ALL_ABSTAINED, ALL_ABSTAINED)
    assert {a["code"] for a in checked(json.loads(done.stdout))["abstained"]} == {"no_steps"}
    assert words.stdout.startswith("No verdict")
    assert argus("report", "--store", store, "--html", tmp_path / "report.html").returncode == 0


def test_a_folder_of_documents_is_not_a_store(tmp_path):
    """Said alike by both commands."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("…")

    messages = [
        said(argus(command, "--store", tmp_path), code=NO_STORE) for command in ("detect", "runs")
    ]

    assert messages[0] == messages[1]
    assert "is not a store: it has thesis, and no run" in messages[0]


def test_a_folder_without_runs(tmp_path):
    """No run there, and what may be wrong."""
    message = said(argus("detect", "--store", tmp_path), code=NO_STORE)

    assert "no run has sent anything" in message
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in message
    listed = argus("runs", "--store", tmp_path)
    assert (listed.returncode, listed.stdout, listed.stderr) == (0, "", "No runs yet.\n")
    assert json.loads(argus("runs", "--store", tmp_path, "--json").stdout)["runs"] == []


@pytest.mark.parametrize("command", [("detect",), ("runs",), ("report", "--html", "page.html")])
def test_a_store_that_is_down(command):
    """The address that was tried, and what to look at."""
    port = closed_port()

    message = said(argus(*command, "--store", f"jaeger+http://127.0.0.1:{port}"), code=NO_STORE)

    assert f"Jaeger at http://127.0.0.1:{port} is not answering" in message
    assert "16686" in message


def test_a_store_that_is_not_there(tmp_path):
    """A slip of the pen is not an empty store."""
    message = said(argus("detect", "--store", tmp_path / "argus-stor"), code=NO_STORE)

    assert f"{tmp_path / 'argus-stor'} is not there" in message


def test_a_damaged_store(two_ranks):
    """A file that was cut short: which one, and no guess at the rest."""
    (file,) = two_ranks.glob("*/steps/*.parquet")
    file.write_bytes(file.read_bytes()[:100])

    message = said(argus("detect", "--store", two_ranks), code=NO_STORE)

    assert str(file) in message


def test_a_run_that_nobody_knows(two_ranks):
    """The nearest name is offered."""
    message = said(argus("detect", "--store", two_ranks, "--run", "two-rank"), code=NO_STORE)

    assert "'two-rank'" in message
    assert "Nearest: two-ranks" in message


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("detect", "--stor-folder", "x"), "--stor-folder"),
        (("detect", "--since", "yesterday"), "--since 2h"),
        (("report", "--html", "page.html", "--since", "2"), "--since 2h"),
        (("detect", "--store", "http://127.0.0.1:16686"), "jaeger+http://127.0.0.1:16686"),
        (("detect", "--store", "ftp://there"), "jaeger+http"),
        (("detect", "--header", "secret"), "'Name: value'"),
        (("report", "--ui-url", "foo"), "http://jaeger:16686"),
        (("demo", "--steps", "3"), "--steps"),
        (("detekt",), "detekt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_usage(arguments, hint):
    """Exit code 2 and what would be right, before anything is read."""
    assert hint in said(argus(*arguments), code=USAGE)


# --- argus serve --------------------------------------------------------------------------------


def test_serve_keeps_what_it_is_sent_until_it_is_told_to_stop(tmp_path):
    """A span of `argus doctor`, from its address to the end by SIGTERM."""
    store = tmp_path / "store"
    with subprocess.Popen(
        [BIN / "argus", "serve", "--port", "0", "--store", store],
        env=environment(PYTHONUNBUFFERED=1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            endpoint = server.stdout.readline().split()[-1]
            asked = argus("doctor", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
            server.terminate()
            output, errors = server.communicate(timeout=WITHIN_S)
        finally:
            server.kill()

    assert f"[ok] endpoint: {endpoint}/v1/traces accepted a span" in asked.stdout
    assert (server.returncode, errors) == (0, "")
    assert f"Stored 1 span in {store}" in output


def test_serve_on_a_port_that_is_taken(tmp_path):
    """Which address, and how to take another."""
    with InMemoryReceiver() as other:
        port = other.endpoint.rpartition(":")[2]

        message = said(argus("serve", "--port", port, "--store", tmp_path / "store"), code=USAGE)

    assert f"127.0.0.1:{port}" in message
    assert "--port" in message


# --- argus doctor -------------------------------------------------------------------------------


@pytest.fixture
def receiver():
    """A real OTLP endpoint."""
    with InMemoryReceiver() as running:
        yield running


def test_doctor_finds_a_healthy_environment(receiver):
    """Exit code 0: the hooks are in place, and a real span was taken."""
    done = argus("doctor", "--json", **receiver.environment)

    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert document["schema"] == "argus.doctor/1"
    states = {check["what"]: check["state"] for check in document["checks"]}
    assert "fail" not in states.values()
    assert states["endpoint"] == states["settings"] == states["torch"] == "ok"
    assert [span.name for span in receiver.spans()] == ["argus.doctor"]


def test_doctor_offline_asks_nobody(receiver):
    """For machines that may not reach the endpoint."""
    done = argus("doctor", "--offline", **receiver.environment)

    assert done.returncode == 0, done.stdout
    assert "endpoint" not in done.stdout
    assert receiver.requests == []


def test_doctor_says_what_to_do_where_nobody_answers():
    """Exit code 1, the address that was tried, and three ways out."""
    endpoint = f"http://127.0.0.1:{closed_port()}"

    done = argus("doctor", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)

    assert done.returncode == 1
    failed = done.stdout[done.stdout.index("[FAIL] endpoint") :]
    assert f"{endpoint}/v1/traces" in failed
    assert "argus stack up" in failed
    assert "argus run --local" in failed
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in failed


def test_doctor_says_what_is_wrong_with_settings():
    """A misspelt name with the nearest one, a value with what it should be, and what then holds."""
    done = argus(
        "doctor", "--offline", "--json", ARGUS_BASELIN_RATIO="0.1", ARGUS_INTERVAL_S="soon"
    )

    document = json.loads(done.stdout)
    failed = [check for check in document["checks"] if check["state"] == "fail"]
    interval = next(row for row in document["settings"] if row["name"] == "ARGUS_INTERVAL_S")
    assert done.returncode == 1
    assert [check["what"] for check in failed] == ["settings", "settings"]
    assert "Did you mean ARGUS_BASELINE_RATIO?" in "".join(check["fix"] for check in failed)
    assert "a number, 0.05 or more" in "".join(check["detail"] for check in failed)
    assert (interval["value"], interval["origin"]) == (str(Settings().interval_s), "default")


def test_doctor_says_that_argus_is_switched_off():
    """A warning, since somebody may have meant it."""
    done = argus("doctor", "--offline", ARGUS_ENABLED=0)

    assert done.returncode == 0, done.stdout
    assert "[!!] switch: ARGUS_ENABLED is off: nothing is traced" in done.stdout


# --- argus demo ---------------------------------------------------------------------------------


def test_demo_leaves_a_store_and_a_report_and_says_what_it_planted(tmp_path):
    """What it finds depends on how busy this machine is; what it prints does not."""
    store = tmp_path / "demo"

    done = argus("demo", "--ranks", 2, "--steps", 60, "--store", store, "--json")

    document = json.loads(done.stdout)
    planted, as_planted = document.pop("planted"), document.pop("as_planted")
    if not as_planted:
        print(done.stdout)  # noqa: T201 - for whoever wonders why
    assert done.returncode == (0 if as_planted else 1), done.stderr
    assert planted == {"fault": "compute", "ranks": [1], "from_step": 20}
    assert "Planted: three times the matrix work in rank 1, from step 20." in done.stderr
    checked(document)
    (run,) = open_store(str(store)).runs()
    assert (run.run, run.steps, run.ranks_seen) == (document["run"], 60, 2)
    assert run.run_id in (store / "report.html").read_text("utf-8")


# --- The command itself -------------------------------------------------------------------------


def test_version():
    """Name and number on one line."""
    done = argus("--version")

    assert done.returncode == 0
    assert re.fullmatch(r"argus-otel \d+\.\d+\.\d+\S*\n", done.stdout)


def test_help_lists_every_command():
    """Each with a line of its own."""
    done = argus("--help")

    assert done.returncode == 0
    assert [c for c in COMMANDS if not re.search(rf"^ +{c} +\w", done.stdout, re.MULTILINE)] == []


@pytest.mark.parametrize(
    "command",
    [*((c,) for c in COMMANDS), *(("stack", c) for c in ("up", "down", "status", "build"))],
)
def test_help_of_every_command(command):
    """Exit code 0, and how it is called."""
    done = argus(*command, "--help")

    assert done.returncode == 0
    assert f"argus {' '.join(command)} " in done.stdout


# A base installation: the packages of the extra "service" cannot be imported.
BASE_ONLY = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pyarrow", "httpx", "jinja2", "plotly", "yaml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv[0] = "argus"

from argus_otel.cli import main

main()
"""


def base_only(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BASE_ONLY, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs",),
        ("detect", "--json"),
        ("report", "--html", "report.html"),
        ("serve",),
        ("demo",),
        ("run", "--local", "--", "true"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_its_packages_a_command_says_what_to_install(arguments):
    """No traceback, and nothing is done by halves."""
    message = said(base_only(*arguments), code=USAGE)

    assert "called without the package" in message
    assert "pip install 'argus-otel[service]'" in message


def test_a_base_installation_can_start_jobs_and_check_itself():
    """Where it trains, the packages that read and diagnose are not needed."""
    assert base_only("run", "--", "sh", "-c", "exit 7").returncode == 7
    assert base_only("doctor", "--offline").returncode == 0
    assert "argus-otel" in base_only("--version").stdout
    helped = base_only("--help")
    assert helped.returncode == 0
    assert "pip install 'argus-otel[service]'" in helped.stdout
