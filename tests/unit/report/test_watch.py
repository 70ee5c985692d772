"""A job that is watched while it is written: each thing is said once, whatever happens to the store."""

import http.server
import io
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from rich.console import Console
from typer.testing import CliRunner

from argus_otel._runtime.bundled import bundled_path
from argus_otel._runtime.errors import ConfigError
from argus_otel.cli import watch as command
from argus_otel.cli.watch import STATE_FILE, Lines, Publisher, Session
from argus_otel.cli.watch_screen import screen_of, sparkline
from argus_otel.cli.watching import FIRST_STEPS, KEPT_STEPS, Watcher
from argus_otel.detect.definition import load_detectors
from argus_otel.publish.ledger import Ledger
from argus_otel.semconv import names
from argus_otel.store.opening import open_store

DETECTORS = load_detectors(bundled_path("detectors"))


def slow(until, *, steps=140):
    """Four ranks, of which rank 2 is slow from step 30 on, until it is not."""
    changes = [{"ranks": [2], "steps": [30, until], "own_times": 1.6}]
    return {"ranks": 4, "steps": steps, "ranks_per_host": 2, "changes": changes}


def start(folder, **options):
    """A session as ``argus watch`` begins it, also after a restart; and what it says."""
    out = io.StringIO()
    watcher = Watcher(
        open_store=lambda: open_store(str(folder)),
        run_name="latest",
        ledger=Ledger.read(folder.parent / STATE_FILE),
        detectors=DETECTORS,
    )
    lines = Lines(console=Console(file=out, width=400), now_ns=lambda: 0, **options)
    publisher = Publisher(watcher, str(folder), None, lines)
    return Session(watcher=watcher, lines=lines, publisher=publisher), out


@pytest.fixture
def endpoint():
    """An OTLP/HTTP endpoint: what was posted by path, and the status that each path answers with."""
    posted, status = {}, {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            code = status.get(self.path, 200)
            if code == 200:
                posted.setdefault(self.path, []).append(body)
            self.send_response(code)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{server.server_port}", posted=posted, status=status
        )
        server.shutdown()
        thread.join()


def told(out, word):
    """The lines that say a word."""
    return [line for line in out.getvalue().splitlines() if word in line]


@pytest.fixture
def folder(tmp_path):
    """Where a store is written."""
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def test_a_finding_is_raised_once_and_closed_when_it_is_over(folder, write_store):
    """However often one looks, and however long it goes on."""
    job = slow(until=70)
    session, out = start(folder)
    for begin in range(0, 140, 10):
        write_store(folder, job, from_step=begin, until_step=begin + 10)
        session.try_look()
        session.try_look()

    (raised,) = told(out, "compute straggler")[:1]
    assert "CRITICAL" in raised
    assert "rank 2 on host-1, since step 30" in raised
    assert "Do now: " in raised
    assert len(told(out, "CRITICAL")) == 1
    assert len(told(out, "over ")) == 1
    assert out.getvalue().index("CRITICAL") < out.getvalue().index("over ")


def test_a_finding_comes_within_five_steps_of_its_onset(folder, write_store):
    """What is 1.6 times as slow need not wait until half of a window is."""
    session, out = start(folder)
    write_store(folder, slow(until=140), until_step=30)
    session.try_look()
    steps = 0
    while not told(out, "straggler") and steps < 15:
        write_store(folder, slow(until=140), from_step=30 + steps, until_step=31 + steps)
        steps += 1
        session.try_look()

    assert steps <= 5


def test_a_restart_raises_nothing_twice(folder, write_store):
    """What was raised is known from the state file; what is over is told by whoever comes after."""
    first, out = start(folder)
    write_store(folder, slow(until=70), until_step=60)
    first.try_look()
    assert len(told(out, "CRITICAL")) == 1

    second, out = start(folder)
    second.try_look()
    assert told(out, "CRITICAL") == []
    assert told(out, "1 raised before and still open")

    write_store(folder, slow(until=70), from_step=60)
    third, out = start(folder)
    third.try_look()
    assert len(told(out, "over ")) == 1
    assert told(out, "CRITICAL") == []


def test_a_store_that_is_away_is_said_once_and_waited_for(folder, write_store):
    """Nothing is lost: what happened meanwhile is told when it is back."""
    session, out = start(folder)
    write_store(folder, slow(until=140), until_step=25)
    session.try_look()
    away = folder.rename(folder.parent / "elsewhere")

    for _ in range(3):
        assert session.try_look() is None
    write_store(away, slow(until=140), from_step=25, until_step=60)
    away.rename(folder)
    session.try_look()

    assert len(told(out, "cannot look now")) == 1
    assert len(told(out, "can be read again")) == 1
    assert len(told(out, "CRITICAL")) == 1


def test_a_store_that_is_not_there_yet_is_waited_for(tmp_path, write_store):
    """The watch may be started before the job."""
    session, out = start(tmp_path / "later")
    assert session.try_look() is None
    (tmp_path / "later").mkdir()
    assert session.try_look() is None  # no run yet

    write_store(tmp_path / "later", slow(until=140), until_step=60)
    session.try_look()

    assert len(told(out, "cannot look now")) == 1
    assert len(told(out, "CRITICAL")) == 1


def test_a_state_that_cannot_be_kept_does_not_end_the_watch(folder, write_store):
    """A full disk is no reason to be silent about a job."""
    session, out = start(folder)
    session.watcher.ledger.path = folder / "nowhere" / "state.json"
    write_store(folder, slow(until=140), until_step=60)
    session.try_look()
    write_store(folder, slow(until=140), from_step=60, until_step=70)
    session.try_look()

    assert len(told(out, "a restart would raise things again")) == 1
    assert len(told(out, "CRITICAL")) == 1


def test_what_comes_late_is_read_when_it_has_come(folder, write_store):
    """A rank's digests leave it once a second, and not when the others' do."""
    session, _ = start(folder)
    write_store(folder, slow(until=140), until_step=40)
    write_store(folder, slow(until=140), from_step=40, until_step=50, only_ranks=[0, 1, 3])
    assert session.try_look().steps.num_rows == 190

    write_store(folder, slow(until=140), from_step=40, until_step=50, only_ranks=[2])
    look = session.try_look()

    assert look.steps.num_rows == 200
    keys = zip(look.steps["ordinal"].to_pylist(), look.steps["rank"].to_pylist(), strict=True)
    assert len(set(keys)) == 200


def test_a_long_run_is_held_in_part(folder, write_store):
    """Its first steps, to compare with, and its latest ones; also where the watch begins late."""
    job = {"ranks": 2, "steps": 900}
    session, _ = start(folder)
    sizes = []
    for begin in range(0, 900, 100):
        write_store(folder, job, from_step=begin, until_step=begin + 100)
        sizes.append(session.try_look().steps.num_rows)
    late, _ = start(folder)

    look = late.try_look()

    assert max(sizes) <= 2 * (FIRST_STEPS + KEPT_STEPS + 200)
    ordinals = set(look.steps["ordinal"].to_pylist())
    assert {0, FIRST_STEPS - 1, 700, 899} <= ordinals
    assert not ordinals & set(range(FIRST_STEPS, 600))
    assert look.changes == ()


def test_a_fault_older_than_what_is_held_goes_on_being_open(folder, write_store):
    """Its onset has long been forgotten by all but the ledger."""
    job = slow(until=600, steps=600)
    session, out = start(folder)
    for begin in range(0, 600, 60):
        write_store(folder, job, from_step=begin, until_step=begin + 60)
        look = session.try_look()

    assert len(told(out, "CRITICAL")) == 1
    assert told(out, "over ") == []
    (finding,) = look.open
    assert finding.onset.step == 30


def test_a_new_run_closes_what_was_open_in_the_one_before(folder, write_store):
    """A restart of the job is a run of its own; its faults are told anew."""
    session, out = start(folder)
    write_store(folder, slow(until=140), until_step=60)
    session.try_look()
    later = {**slow(until=60, steps=60)}
    write_store(folder, later, run_id="llama-70b-4", nonce=b"12345678")
    session.watcher.run_name = "llama-70b-4"

    session.try_look()

    assert [line for line in told(out, "over ") if "another run began" in line]
    assert len(told(out, "watching run")) == 2
    assert len(told(out, "CRITICAL")) == 2


def test_verdicts_go_into_the_traces_once_each_way(folder, write_store):
    """Open where it began, ended in the last slow step; a restart adds none."""
    for begin in range(0, 140, 35):
        write_store(folder, slow(until=70), from_step=begin, until_step=begin + 35)
        session, _ = start(folder)
        session.try_look()
        session.try_look()

    store = open_store(str(folder))
    rows = store.spans(store.resolve("latest")).to_pylist()
    states = [
        json.loads(row["attributes"])[names.ARGUS_FINDING_STATE]
        for row in rows
        if row["name"] == names.SPAN_ARGUS_FINDING
    ]
    assert sorted(states) == ["ended", "open"]


def test_an_endpoint_gets_spans_logs_and_the_metric(folder, write_store, endpoint):
    """A log record for each that is raised or over; the metric at every look while one is open."""
    session, out = start(folder)
    session.publisher.endpoint = endpoint.url
    for begin in range(0, 140, 35):
        write_store(folder, slow(until=70), from_step=begin, until_step=begin + 35)
        session.try_look()

    assert len(endpoint.posted["/v1/traces"]) == 2
    assert len(endpoint.posted["/v1/logs"]) == 2
    values = [
        point.as_int
        for body in endpoint.posted["/v1/metrics"]
        for point in ExportMetricsServiceRequest.FromString(body)
        .resource_metrics[0]
        .scope_metrics[0]
        .metrics[0]
        .gauge.data_points
    ]
    assert values[0] == 1
    assert values[-1] == 0
    assert told(out, "not published") == []


def test_an_endpoint_that_is_down_is_said_once_and_tried_again(folder, write_store, endpoint):
    """The finding stands meanwhile; nothing is lost, and nothing is sent twice."""
    session, out = start(folder)
    session.publisher.endpoint = endpoint.url
    endpoint.status["/v1/traces"] = 503
    write_store(folder, slow(until=140), until_step=60)
    session.try_look()
    session.try_look()
    assert len(told(out, "not published, will try again")) == 1
    assert len(told(out, "CRITICAL")) == 1

    endpoint.status.clear()
    session.try_look()
    session.try_look()

    assert len(endpoint.posted["/v1/traces"]) == 1
    assert len(endpoint.posted["/v1/logs"]) == 1


def test_an_endpoint_without_logs_is_not_asked_for_them_again(folder, write_store, endpoint):
    """``argus serve`` takes spans only."""
    session, out = start(folder)
    session.publisher.endpoint = endpoint.url
    endpoint.status.update({"/v1/logs": 404, "/v1/metrics": 404})
    write_store(folder, slow(until=70), until_step=60)
    session.try_look()
    write_store(folder, slow(until=70), from_step=60)
    session.try_look()

    assert len(told(out, "taking no logs")) == 1
    assert len(told(out, "taking no metrics")) == 1
    assert len(endpoint.posted["/v1/traces"]) == 2


def test_json_lines_carry_the_finding(folder, write_store):
    """One object a line, for programs."""
    session, out = start(folder, as_json=True, ui_url="http://j")
    write_store(folder, slow(until=140), until_step=60)
    session.try_look()

    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["watching", "raised"]
    assert {event["schema"] for event in events} == {"argus.watch-event/1"}
    assert events[1]["finding"]["ranks"] == [2]
    assert events[1]["url"].startswith("http://j/trace/")


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ({"ranks": 4, "steps": 60}, 0),
        (slow(until=140, steps=60), 1),
        ({"ranks": 4, "steps": 12}, 3),
    ],
    ids=["healthy", "slow", "too short"],
)
def test_once_is_one_look_with_an_exit_code(folder, write_store, case, code):
    """For cron."""
    write_store(folder, case)
    app = typer.Typer()
    command.register(app)

    result = CliRunner().invoke(
        app,
        ["--store", str(folder), "--once"],
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": None},
    )

    assert result.exit_code == code, result.output
    assert (folder / STATE_FILE).is_file()


def test_a_dry_run_leaves_nothing_for_a_later_watch_to_take_for_told(folder, write_store):
    """Somebody tries it, then starts it in earnest: that one raises what it finds."""
    write_store(folder, slow(until=140, steps=60))
    app = typer.Typer()
    command.register(app)

    results = [
        CliRunner().invoke(
            app,
            ["--store", str(folder), "--once", *options],
            env={"OTEL_EXPORTER_OTLP_ENDPOINT": None},
        )
        for options in (["--dry-run"], [])
    ]

    assert all("compute straggler" in result.output for result in results)


def test_an_interval_of_nothing_is_refused(folder):
    """It would ask the store without pause."""
    app = typer.Typer()
    command.register(app)

    result = CliRunner().invoke(app, ["--store", str(folder), "--interval", "0s"])

    assert isinstance(result.exception, ConfigError)
    assert "--interval is '0s'" in str(result.exception)


def test_the_screen_shows_step_times_who_is_late_and_what_is_open(folder, write_store):
    session, _ = start(folder)
    write_store(folder, slow(until=140), until_step=60)
    look = session.try_look()

    (console := Console(file=io.StringIO(), width=120)).print(screen_of(look))
    text = console.file.getvalue()

    assert "step 59, 4 ranks" in text
    assert "usually" in text
    assert "compute straggler" in text
    assert "rank 2" in text


def test_a_sparkline_is_twice_as_high_for_twice_as_long():
    assert sparkline(np.array([1.0, 0.5, 0.0])) == "█▅▁"
