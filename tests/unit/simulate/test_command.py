"""``argus simulate``: into a folder, or over the wire as the ranks would send it."""

import json

import pytest
from typer.testing import CliRunner

from argus_otel import service
from argus_otel._runtime.errors import ConfigError
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

    with pytest.raises(ConfigError, match="naming 'dpp'"):
        simulate("--set", "dpp=4", "--out", str(tmp_path))
    with pytest.raises(ConfigError, match="ep divides dp"):
        simulate("--set", "ep=3", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "without --out or --otlp"),
        (("--out", "x", "--otlp", "http://x"), "both"),
        (("--cluster", "huge", "--out", "x"), "moe-12960"),
    ],
)
def test_wrong_usage_says_what_would_be_right(arguments, says):
    """Before anything is written."""
    with pytest.raises(ConfigError, match=says):
        simulate(*arguments)


def test_what_there_is_can_be_listed():
    """For people, and for programs."""
    assert "moe-12960" in simulate("--list").output
    document = json.loads(simulate("--list", "--json").output)
    assert document["faults"]["link"]["cause"] == "slow_link"
