"""``argus simulate``: into a folder, or over the wire as the ranks would send it."""

import json
import socket
import time

import pytest
from typer.testing import CliRunner

from argus_otel import service
from argus_otel._runtime.errors import ArgusError, ConfigError
from argus_otel.cli.main import app, register_commands
from argus_otel.store.opening import open_store
from argus_otel.testing import InMemoryReceiver

FAULT = "compute:rank=5,factor=1.7,from=30"


@pytest.fixture(scope="module", autouse=True)
def commands():
    if not any(group.name == "detectors" for group in app.registered_groups):
        register_commands("")


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def culprits(folder):
    judged = service.judge(open_store(str(folder), {}), "latest")
    return [(f.cause, f.ranks) for f in judged.verdict.diagnosis.findings if f.severity != "info"]


def test_a_simulated_run_is_diagnosed_like_any_other(tmp_path):
    """With its truth beside its tables."""
    out = tmp_path / "store"
    done = simulate("--cluster", "ddp-8", "--fault", FAULT, "--steps", "60", "--out", str(out))

    assert done.exit_code == 0
    assert "60 steps of 8 ranks" in done.output
    assert culprits(out) == [("compute_straggler", (5,))]
    (truth,) = out.glob("*/truth.json")
    (fault,) = json.loads(truth.read_text("utf-8"))["faults"]
    assert (fault["cause"], fault["ranks"], fault["first_step"]) == ("compute_straggler", [5], 30)


def test_ranks_send_what_real_ones_would():
    """Every digest once, each from its own resource, under one root a step."""
    with InMemoryReceiver() as receiver:
        done = simulate("--cluster", "ddp-8", "--steps", "4", "--otlp", receiver.endpoint)
        spans = receiver.spans()

    assert done.exit_code == 0
    steps = [span for span in spans if span.name == "rank.step"]
    assert len(steps) == 8 * 4
    assert len([span for span in spans if span.name == "train.step"]) == 4
    assert len({span.trace_id for span in spans}) == 4
    assert {span.resource["dl.rank"] for span in steps} == set(range(8))
    assert {span.resource["dl.data_parallel.rank"] for span in steps} == set(range(8))


def test_a_cluster_can_be_changed(tmp_path):
    """Numbers, truth values, and what does not fit."""
    done = simulate("--set", "dp=4", "--set", "gpu=false", "--steps", "2", "--out", str(tmp_path))
    assert "4 ranks" in done.output

    with pytest.raises(ConfigError, match="dpp=.* no cluster has"):
        simulate("--set", "dpp=4", "--out", str(tmp_path))
    with pytest.raises(ConfigError, match="ep divides dp"):
        simulate("--set", "ep=3", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "without --out or --otlp"),
        (("--out", "x", "--otlp", "http://x"), "both"),
        (("--cluster", "huge", "--out", "x"), "moe-12960"),
        (("--otlp", "nonsense"), "--otlp is 'nonsense'; expected an http://"),
        (
            ("--steps", "60", "--fault", "compute:rank=1,from=500", "--out", "x"),
            "never acting: it begins at step 500, and the run has steps 0 to 59",
        ),
        (("--set", "noise=-1", "--out", "x"), "noise is -1.0"),
        (("--set", "buckets=2000", "--out", "x"), "a digest would fold"),
    ],
)
def test_wrong_usage_says_what_would_be_right(arguments, says):
    """Before anything is written."""
    with pytest.raises(ConfigError, match=says):
        simulate(*arguments)


def test_a_negative_seed_is_wrong_usage(tmp_path):
    """Said by the option itself."""
    done = simulate("--seed", "-1", "--out", str(tmp_path))

    assert done.exit_code == 2
    assert "--seed" in done.output


def test_a_run_that_takes_the_place_of_another_says_so(tmp_path):
    """The id and the seed are the same, so it is the same run anew."""
    arguments = ("--cluster", "ddp-2", "--steps", "3", "--run-id", "mine", "--out", str(tmp_path))
    first, second = simulate(*arguments), simulate(*arguments)

    assert "replaced" not in first.output
    assert "replaced the run mine that was there" in second.output
    assert len(open_store(str(tmp_path), {}).runs()) == 1


def test_a_run_is_of_today_and_the_next_command_names_it(tmp_path):
    """So that latest and --since find it; it ends about when it was made."""
    before_ns = time.time_ns()
    done = simulate(
        "--cluster", "ddp-2", "--steps", "40", "--run-id", "my run", "--out", str(tmp_path)
    )

    (run,) = open_store(str(tmp_path), {}).runs()
    assert abs(run.last_ns - before_ns) < 60e9
    assert run.first_ns < before_ns
    assert done.output.rstrip().endswith("--run 'my run'")


def test_what_is_sent_twice_is_two_runs():
    """A receiver does not replace what it has stored."""
    with InMemoryReceiver() as receiver:
        arguments = ("--cluster", "ddp-2", "--steps", "2", "--otlp", receiver.endpoint)
        outputs = [simulate(*arguments).output for _ in range(2)]
        runs = {span.resource["argus.run.nonce"] for span in receiver.spans()}

    assert len(runs) == 2
    assert "Next: argus detect --run ddp-2-0, from the store that the endpoint feeds" in outputs[0]


def test_a_dead_endpoint_is_told_once_and_at_once(caplog):
    """One attempt, one message with the reason, and an exit code of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(ArgusError, match=f"--otlp, http://127.0.0.1:{port}.*refused") as raised:
        simulate("--otlp", f"http://user:secret@127.0.0.1:{port}")

    assert raised.value.exit_code == 5
    assert "secret" not in str(raised.value)
    assert caplog.records == []


def test_an_endpoint_that_refuses_is_told_with_its_answer():
    """It is there, and is no OTLP receiver."""
    with InMemoryReceiver() as receiver:
        receiver.respond(404, times=99)
        with pytest.raises(ArgusError, match="HTTP 404") as raised:
            simulate("--steps", "2", "--otlp", receiver.endpoint)
        posts = len(receiver.requests)

    assert raised.value.exit_code == 5
    assert posts == 1


def test_nothing_is_drawn_where_nobody_looks(tmp_path):
    """Not even the empty line of a progress bar."""
    assert simulate("--steps", "2", "--out", str(tmp_path)).stderr == ""


def test_the_list_is_readable_at_80_columns(monkeypatch):
    """What a fault does stands in a line or two, without blanks at the end."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = simulate("--list").output.splitlines()

    assert "link         transfers through the place take factor times as long" in lines
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


def test_what_there_is_can_be_listed():
    """For people, and for programs."""
    assert "moe-12960" in simulate("--list").output
    document = json.loads(simulate("--list", "--json").output)
    assert document["faults"]["link"]["cause"] == "slow_link"
